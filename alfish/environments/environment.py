"""The interface of environments to unrollers and the evaluator."""

import abc
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec

from alfish import nest, specs
from alfish.data import TimeStep
from alfish.errors import UsageError
from alfish.nest import Array, Nest


class Environment(abc.ABC):
    """B environments that step together.

    In gymnasium's mode NEXT_STEP a finished environment resets itself in the next step. Each step then makes one row
    per environment: `step` returns the LAST row, and the next `step` the FIRST row. In the other modes (`uneven`) a
    finished environment makes two rows in one step: `step` returns the LAST row, and `take_resets` the FIRST row after
    it.

    In an environment with `has_gaps` a column may have no row in some steps, for example after an agent has left a game
    that goes on without it. Its row is then PAD, from the step after its LAST row to its next FIRST row.

    Leaves are numpy arrays on the host. Environments that compute in torch take and return tensors on their device.
    `convert` makes such leaves of arrays or tensors. Returned leaves are never written later.

    Attributes:
      num_envs: B.
      observation_space, action_space: gymnasium's, of one environment.
      observation_spec, action_spec, reward_spec: see `alfish.specs`.
      env_id: `[B]` int32, global ids.
      uneven: True if a finished environment makes two rows in one step.
      has_gaps: True if `step` may return PAD rows, which are not stored. Needs `uneven`.
      resets_rows: True if `reset` takes a mask of rows.
      seeds_rows: True if `reset` also takes one seed per row; evaluation then seeds each episode.
      name: the name of the task in messages: an id or a class.
      stepping: how environments are stepped, in words that follow their number: 'in one loop'.
      remark: a sentence about a faster way to step them, for the log; empty: none is known.
      env_spec: gymnasium's specification of one environment, without training wrappers; None if there is none.
      infos: gymnasium's info dict of the last reset or step.
      follows_progress: True if the environments have a curriculum, which `set_progress` advances.
      broken: `[B]` bool, environments that raised in the last step and were rebuilt; None if there are none. Their
        episodes ended with the rows acted from, and their returned rows are FIRST. See `tolerate_errors`.
      can_replace: True if `replace` is implemented.
    """

    uneven = False
    has_gaps = False
    follows_progress = False
    can_replace = False
    broken: np.ndarray | None = None
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
        self._masks = specs.mask_reader(self.observation_spec, self.action_spec)

    @property
    def lacks_limit(self) -> bool:
        """True if the specification has no time limit. Without a specification: False."""
        spec = self.env_spec
        limits = () if spec is None else (spec.max_episode_steps, spec.kwargs.get("max_num_frames_per_episode"))
        return spec is not None and not any(limits)  # Atari's emulator counts frames

    @abc.abstractmethod
    def reset(self, seeds: Sequence[int | None] | None = None, rows: np.ndarray | None = None) -> TimeStep:
        """Returns FIRST rows `[B]`.

        Args:
          seeds: one per environment. None: the first call uses the constructor's seeds, later calls use none.
          rows: `[B]` bool, the environments to reset, the others' rows are unchanged; None: all. Needs `resets_rows`.
        """

    @abc.abstractmethod
    def step(self, action: Nest) -> TimeStep:
        """Executes actions and returns the rows `[B]` that arrive.

        Args:
          action: leaves `[B, ...]`, in the algorithm's units.
        """

    def convert(self, rows: Nest) -> Nest:
        """Returns the leaves, arrays or tensors, as this environment takes and returns them.

        Default: arrays on the host.
        """
        if type(rows) is np.ndarray or rows is None:  # the common cases
            return rows
        if type(rows) is torch.Tensor:
            return nest.as_array(rows)
        return nest.arrays(rows) if rows else rows

    def ignore_infos(self) -> None:
        """Allows `infos` to stay empty from now on. Default: does nothing."""

    def read_executed_actions(self) -> None:
        """Makes `prev_action` the info `executed_action` from now on, where the environment reports one.

        The info has the action space's own form. A human, an expert or another controller executes such actions.

        Raises:
          UsageError: these environments have no such infos.
        """
        raise UsageError(f"{type(self).__name__} has no infos, so it cannot report executed actions")

    def method(self, name: str) -> Callable[..., Any] | None:
        """Returns a method of the environments' class or of a wrapper, or None if none has this name.

        The method must read no state of an episode. Default: None.
        """
        return None

    def set_progress(self, progress: float) -> None:
        """Sets the progress of training, in [0, 1]. Needs `follows_progress`."""

    def tolerate_errors(self, report: Callable[[int, BaseException], None]) -> None:
        """Rebuilds environments that raise from now on, in place of raising their errors.

        Default: errors are still raised.

        Args:
          report: receives the index of the environment and its error.
        """

    def replace(self, time_step: TimeStep, rows: np.ndarray) -> TimeStep:
        """Rebuilds some environments.

        Args:
          time_step: the last one returned.
          rows: `[B]` bool, the environments to rebuild.

        Returns:
          The time step with their FIRST rows.
        """
        raise NotImplementedError

    def break_off(self, time_step: TimeStep, rows: np.ndarray) -> TimeStep:
        """Truncates some episodes; the next step resets their environments. Default: truncates none.

        Args:
          time_step: the last one returned.
          rows: `[B]` bool, the environments whose episodes end.

        Returns:
          The time step, in which their MID rows are LAST.
        """
        return time_step

    @property
    def can_rest(self) -> bool:
        """True if `rest` is implemented."""
        return False

    def rest(self, rows: np.ndarray) -> None:
        """Leaves environments alone until `reset` names them: they are not stepped, and their rows mean nothing.

        Args:
          rows: `[B]` bool; environments that rest already go on.
        """
        raise NotImplementedError

    def take_resets(self) -> tuple[Array, TimeStep] | None:
        """Returns the FIRST rows that follow this step's LAST rows: a mask `[B]` bool and rows `[B]`.

        None if no episode ended, or the environments are not `uneven`.
        """
        return None

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the random generators, and of the episodes where it can be saved. Default: empty."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Restores a state. Returns True if episodes continue; if False, the next `step` resets all environments."""
        return False

    def abandon(self) -> None:
        """Marks a step that may never end. Default: does nothing.

        After this only `state_dict`, which then does not call the environments, and `close` may be called.
        """

    def close(self) -> None:
        """Closes the environments."""

    def _check_shapes(self, observation: Nest) -> None:
        """Raises UsageError where an observation that `reset` returned has another shape than its space."""
        expected = nest.leaves(self.observation_spec)
        for (name, leaf), spec in zip(nest.named_leaves(observation, "observation"), expected, strict=True):
            if tuple(leaf.shape) != (self.num_envs, *spec.shape):
                raise UsageError(
                    f"{self.name}.reset returned an {name} of shape {tuple(leaf.shape)}; with {self.num_envs} "
                    f"environments and the space {spec} it is {(self.num_envs, *spec.shape)}"
                )

    def _check_results(self, reward: Array, terminated: Array, truncated: Array) -> None:
        """Raises UsageError where results of a vector class's `step` have other shapes than gymnasium's."""
        flags, rewards = (self.num_envs,), (self.num_envs, *self.reward_spec.shape)
        found = tuple(tuple(np.shape(result)) for result in (reward, terminated, truncated))
        if found != (rewards, flags, flags):
            raise UsageError(
                f"{self.name}.step returned reward, terminated and truncated of shapes {found[0]}, {found[1]} and "
                f"{found[2]}; with {self.num_envs} environments they are {rewards}, {flags} and {flags}"
            )

    def _check_masks(self, observation: Nest, has_ended: np.ndarray | bool = False) -> None:
        """Raises UsageError if the mask of a row allows no choice of an entry of the action; not where one ended."""
        if self._masks is None:
            return
        empty = self._masks.is_empty(observation) & ~np.asarray(has_ended)
        if empty.any():
            raise UsageError(
                f"{self.name}: {self._masks.name} forbids every choice of an entry of the action in row "
                f"{int(np.flatnonzero(empty)[0])}; an environment allows one until its episode ends"
            )
