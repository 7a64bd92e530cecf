"""The interface of environments for unrollers and evaluation, and a wrapper that encodes observations."""

import abc
import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec

from alfish import nest, specs
from alfish.data import TimeStep
from alfish.errors import UsageError
from alfish.errors.user_code import calling
from alfish.nest import Array, Nest
from alfish.processes.messages import EnvironmentCall
from alfish.runs.checkpoint_file import check_loadable


class Environment(abc.ABC):
    """B environments that step together.

    In gymnasium's mode NEXT_STEP, a finished environment resets itself in the next step. Each step then makes one row
    per environment: `step` returns the LAST row, and the next `step` the FIRST row. In the other modes (`uneven`), a
    finished environment makes two rows in one step: `step` returns the LAST row, and `take_resets` the FIRST row that
    follows.

    With `has_gaps`, an environment may have no row in some steps, for example after an agent has left a game that
    continues without it. Such an environment returns PAD rows from the step after a LAST row until the next FIRST row.

    Leaves of rows are numpy arrays, or, if the environments compute in torch, tensors on their device. `convert`
    converts arrays or tensors to this type. Returned leaves are not modified later.

    Attributes:
      num_envs: number of environments, B.
      observation_space, action_space: gymnasium's spaces of one environment.
      observation_spec, action_spec, reward_spec: specs of the observation, the canonical action and the reward, see
        `alfish.specs`.
      env_id: id of each environment, `[B]` int32, unique across workers.
      uneven: True if a finished environment makes two rows in one step.
      has_gaps: True if `step` may return PAD rows, which are not stored. Requires `uneven`.
      resets_rows: True if `reset` can reset a subset of the environments.
      seeds_rows: True if `reset` also takes one seed per environment; evaluation then seeds each episode.
      name: name of the task in messages: an id or a class.
      stepping: way of stepping environments, as text after their number in the log ("8 environments in one loop").
      remark: sentence for the log about a faster way to step the environments; empty if none is known.
      env_spec: gymnasium's specification of one environment, without training wrappers; None if it has no
        specification.
      infos: gymnasium's info dict of the last reset or step.
      follows_progress: True if the environments have a curriculum, which `set_progress` advances.
      broken: environments that raised in the last step and were rebuilt, `[B]` bool; None if no environment raised. The
        episode of such an environment ends with the row before the step, and `step` returns the FIRST row of its next
        episode. See `tolerate_errors`.
      calls: newest call that `call` has made or stored of each method, by the method's name.
      delivers_calls: True if `call` makes calls itself. False if it only stores calls, because the environments are in
        workers, or because a step may never end.
      can_replace: True if `replace` is implemented.
      can_break_off: True if `break_off` truncates episodes.
      only_one: True if a process can hold only one such environment; evaluations in training then use this environment.
      lost: environments whose episode ended in the last step without a final observation, `[B]` bool. The time step
        before the end is then left out of training. None if no final observation is lost.
      sign: 0-d tensor that the unroller reads together with the rows of an unroll, and passes to `judge` as a number.
        None means that `judge` is not called.
    """

    uneven = False
    has_gaps = False
    follows_progress = False
    delivers_calls = True
    can_replace = can_break_off = False
    only_one = False
    broken: np.ndarray | None = None
    lost: Array | None = None
    sign: torch.Tensor | None = None
    resets_rows = False
    seeds_rows = False
    infos: dict[str, Any]

    def __init__(
        self,
        num_envs: int,
        observation_space: spaces.Space,
        action_space: spaces.Space,
        reward_spec: spaces.Box,
    ):
        self.num_envs = num_envs
        self.observation_space, self.action_space = observation_space, action_space
        self.observation_spec = specs.observation_spec(observation_space)
        self.action_spec = specs.action_spec(action_space)
        self.reward_spec = reward_spec
        self.name = type(self).__name__
        self.stepping = self.remark = ""
        self.env_spec: EnvSpec | None = None
        self.env_id: Array = np.arange(num_envs, dtype=np.int32)
        self.infos = {}
        self.calls: dict[str, EnvironmentCall] = {}
        self._masks = specs.mask_reader(self.observation_spec, self.action_spec)

    @property
    def lacks_limit(self) -> bool:
        """True if `env_spec` has no time limit; False if `env_spec` is None."""
        spec = self.env_spec
        limits = () if spec is None else (spec.max_episode_steps, spec.kwargs.get("max_num_frames_per_episode"))
        return spec is not None and not any(limits)  # the second limit is the Atari emulator's

    @abc.abstractmethod
    def reset(self, seeds: Sequence[int | None] | None = None, rows: np.ndarray | None = None) -> TimeStep:
        """Returns FIRST rows `[B]`.

        Args:
          seeds: one seed per environment. None means the constructor's seeds in the first call, and no seeds in later
            calls.
          rows: mask `[B]` bool of the environments to reset; all other environments do not change. None means all
            environments. Requires `resets_rows`.
        """

    @abc.abstractmethod
    def step(self, action: Nest) -> TimeStep:
        """Executes actions and returns the next rows `[B]`.

        Args:
          action: actions `[B, ...]` in the algorithm's units.
        """

    def begin(self, action: Nest) -> None:
        """Begins a step in other processes or threads, and returns at once. `step` with the same action ends the step.

        Only `abandon`, `close` and `state_dict` may be called before `step`. Default: does nothing, so that `step`
        makes the whole step.

        Args:
          action: actions `[B, ...]` in the algorithm's units.
        """

    def convert(self, rows: Nest) -> Nest:
        """Converts leaves (arrays or tensors) to the type of this environment.

        Default: numpy arrays.
        """
        if type(rows) is np.ndarray or rows is None:  # the common cases
            return rows
        if type(rows) is torch.Tensor:
            return nest.as_array(rows)
        return nest.arrays(rows) if rows else rows

    def ignore_infos(self) -> None:
        """Allows `infos` to stay empty from now on. Default: does nothing."""

    def read_executed_actions(self) -> None:
        """Makes later rows use the info `executed_action` as `prev_action`, where the environment reports this info.

        The info is an element of the environment's action space: an action of a human or another controller that was
        executed instead of the policy's action.

        Raises:
          UsageError: these environments have no such infos.
        """
        raise UsageError(f"{type(self).__name__} has no infos, so it cannot report executed actions")

    def method(self, name: str) -> Callable[..., Any] | None:
        """Returns a method of the environments' class or of a wrapper; None if neither has a method of this name.

        The method must not depend on the state of an episode. Default: None.
        """
        return None

    def call(self, name: str, *arguments: Any) -> None:
        """Calls a method of each environment, for a curriculum: `environment.call("set_level", 3)`.

        The last call of each method is part of the unroller's state. The call is repeated before the first reset in a
        resumed run, a restarted worker or a rebuilt environment. The effect of a call must therefore not depend on
        earlier calls. With `AsyncUnroller`, workers first collect the segments that were granted before the call.

        Args:
          name: name of a method of the environments or of a wrapper. Environments without this method are left out.
          arguments: positional arguments of the method, which may be numbers, strings, tensors, None, and lists and
            dicts of these.

        Raises:
          UsageError: no environment has such a method, or a checkpoint cannot hold an argument.
        """
        check_loadable(list(arguments), f"the arguments of {name}")
        methods = self.methods(name)
        if not any(map(callable, methods)):
            raise UsageError(
                f"{self.name} has no method {name!r} to call; define it in the environment or in a wrapper of it"
            )
        number = 1 + max((made.number for made in self.calls.values()), default=0)
        self.calls[name] = EnvironmentCall(number, name, copy.deepcopy(arguments))
        if self.delivers_calls:
            with calling(f"{self.name}.{name}"):
                for method in methods:
                    method(*arguments)

    def methods(self, name: str) -> list[Callable[..., Any]]:
        """Returns the method `name` of each environment that has one. Default: the result of `method`."""
        method = self.method(name)
        return [] if method is None else [method]

    def set_progress(self, progress: float) -> None:
        """Sets the progress of training, in [0, 1]; requires `follows_progress`."""

    def tolerate_errors(self, report: Callable[[int, BaseException], None]) -> None:
        """Makes later steps rebuild an environment that raises, instead of raising its error.

        Default: does nothing, so errors are raised.

        Args:
          report: function that receives the index and the error of an environment that raised.
        """

    def replace(self, time_step: TimeStep, rows: np.ndarray) -> TimeStep:
        """Rebuilds some environments.

        Args:
          time_step: time step that was returned last.
          rows: environments to rebuild, `[B]` bool.

        Returns:
          The time step, with FIRST rows for the rebuilt environments.
        """
        raise NotImplementedError

    def break_off(self, time_step: TimeStep, rows: np.ndarray) -> TimeStep:
        """Truncates the episodes of some environments, which the next step resets. Default: truncates none.

        Args:
          time_step: time step that was returned last.
          rows: environments whose episodes end, `[B]` bool.

        Returns:
          The time step, with LAST instead of MID for these environments.
        """
        return time_step

    @property
    def can_rest(self) -> bool:
        """True if `rest` is implemented."""
        return False

    def rest(self, rows: np.ndarray) -> None:
        """Stops stepping some environments until their reset; until then their rows are meaningless.

        Args:
          rows: mask `[B]` bool of the environments to rest; environments that already rest keep resting.
        """
        raise NotImplementedError

    def take_resets(self) -> tuple[Array, TimeStep] | None:
        """Returns the FIRST rows after this step's LAST rows: a mask `[B]` bool of valid rows, and rows `[B]`.

        The result is None if no episode ended, or if the environments are not `uneven`.
        """
        return None

    def judge(self, sign: float) -> None:
        """Raises UsageError if `sign` indicates that the rows cannot be used for training."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the random generators and, if possible, of the episodes. Default: an empty dict."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Restores a state; returns True if episodes continue, or False if the next `step` resets all environments."""
        return False

    def abandon(self) -> None:
        """Marks the running step as one that may never end. An override calls `super().abandon()`.

        Afterwards, only `close`, `state_dict` and `call` may be called. `state_dict` and `call` then do not call the
        environments.
        """
        self.delivers_calls = False

    def close(self) -> None:
        """Closes the environments."""

    def _check_shapes(self, observation: Nest) -> None:
        """Raises UsageError if the shape of an observation from `reset` differs from that of its space."""
        expected = nest.leaves(self.observation_spec)
        for (name, leaf), spec in zip(nest.named_leaves(observation, "observation"), expected, strict=True):
            if tuple(leaf.shape) != (self.num_envs, *spec.shape):
                raise UsageError(
                    f"{self.name}.reset returned an {name} of shape {tuple(leaf.shape)}; with {self.num_envs} "
                    f"environments and the space {spec} it must be {(self.num_envs, *spec.shape)}"
                )

    def _check_results(self, reward: Array, terminated: Array, truncated: Array) -> None:
        """Raises UsageError if results of a vector class's `step` do not have the shapes that gymnasium requires."""
        flags, rewards = (self.num_envs,), (self.num_envs, *self.reward_spec.shape)
        found = tuple(tuple(np.shape(result)) for result in (reward, terminated, truncated))
        if found != (rewards, flags, flags):
            raise UsageError(
                f"{self.name}.step returned reward, terminated and truncated of shapes {found[0]}, {found[1]} and "
                f"{found[2]}; with {self.num_envs} environments they must be {rewards}, {flags} and {flags}"
            )

    def _check_masks(self, observation: Nest, has_ended: np.ndarray | bool = False) -> None:
        """Raises UsageError if an action mask allows no choice for an entry of the action, unless the row is LAST."""
        if self._masks is None:
            return
        empty = self._masks.is_empty(observation) & ~np.asarray(has_ended)
        if empty.any():
            raise UsageError(
                f"{self.name}: {self._masks.name} forbids every choice of an entry of the action "
                f"in environment {int(np.flatnonzero(empty)[0])}; at least one choice must be allowed until the "
                "episode ends"
            )


class EncodedEnvironment:
    """An `Environment` that encodes another environment's observations; all other attributes are that environment's.

    Args:
      environment: environment to step.
      encode: function that maps observations `[B, ...]` to encoded observations `[B, ...]`.
      observation_spec: spec of the encoded observations.
    """

    def __init__(self, environment: Environment, encode: Callable[[Nest], Nest], observation_spec: Nest):
        self._set(_environment=environment, _encode=encode, observation_spec=observation_spec, _raw=None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._environment, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._environment, name, value)

    def reset(self, *arguments: Any, **keywords: Any) -> TimeStep:
        return self._encoded(self._environment.reset(*arguments, **keywords))

    def step(self, action: Nest) -> TimeStep:
        return self._encoded(self._environment.step(action))

    def replace(self, time_step: TimeStep, rows: Array) -> TimeStep:
        first = self._encoded(self._environment.replace(self._raw, rows))
        return nest.where(rows, first, time_step)

    def take_resets(self) -> tuple[Array, TimeStep] | None:
        resets = self._environment.take_resets()
        return None if resets is None else (resets[0], self._with_features(resets[1]))

    def _encoded(self, raw: TimeStep) -> TimeStep:
        self._set(_raw=raw)
        return self._with_features(raw)

    def _with_features(self, raw: TimeStep) -> TimeStep:
        return raw._replace(observation=self._environment.convert(self._encode(raw.observation)))

    def _set(self, **attributes: Any) -> None:
        """Sets attributes of this object; other assignments set attributes of the encoded environment."""
        self.__dict__.update(attributes)
