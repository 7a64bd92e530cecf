"""A vector environment that steps single environments one after another with little overhead."""

import contextlib
import traceback
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from absl import logging
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate

from alfish.environments.joint_steps import joint_steps
from alfish.environments.objectives import declared
from alfish.errors import UsageError, first_line
from alfish.errors.user_code import in_words
from alfish.runs.random_state import draw_seeds

# Code that calls single environments and reads the results. An error raised in these files, not in the environment's
# own code, shows that the environment violates gymnasium's interface.
_GYMNASIUM, _NUMPY = Path(gymnasium.__file__).parent, Path(np.__file__).parent
_CALLERS = {_GYMNASIUM / "wrappers", _GYMNASIUM / "core.py", _GYMNASIUM / "vector"}
_CALLERS |= {_GYMNASIUM / "envs" / "registration.py", Path(__file__)}
_OWN = ("make.py", "finding.py", "wrapping.py", "masked_observation.py", "objectives.py")
_CALLERS |= {Path(__file__).with_name(name) for name in _OWN}

_IN_NUMPY = {kind: np.dtype(kind).type for kind in (bool, int, float)}


class SequentialVectorEnv(VectorEnv):
    """Steps environments in this process, in at most half the time of gymnasium's `SyncVectorEnv`.

    Each step and reset makes a new batch of observations. Rewards may be numbers or arrays of one element.

    Args:
      env_fns: constructors of environments with equal spaces.
      autoreset_mode: mode of resets, NEXT_STEP or DISABLED. With DISABLED, an environment rests after the end of an
        episode, or after `break_off`, until its reset: steps return its last observation, reward 0, and False for
        `terminated` and `truncated`.

    Attributes:
      envs: the environments.
      gathers_infos: True if steps return infos. False saves the time of merging them, which may exceed that of a step.
      report: function called with the index and the error of an environment that raised and is rebuilt; None means that
        errors are raised.
      replaced: indices of the environments that were rebuilt in the last step; the step returned their first
        observations.
      prepare: function that receives each rebuilt environment before its reset; None means that nothing is called.
      something_ended: True if an episode ended in the last step.
      reward_space: space of vector rewards, a Box of shape (R,); None means that rewards are numbers.
      joint: object that steps all environments in one loop, with the same results; None means that they step one by
        one.
    """

    def __init__(self, env_fns: Sequence[Callable[[], gymnasium.Env]], autoreset_mode: AutoresetMode):
        assert autoreset_mode != AutoresetMode.SAME_STEP
        self._env_fns = list(env_fns)
        self.envs: list[gymnasium.Env] = []
        for make in env_fns:
            self.envs.append(make())  # appended one by one: gymnasium 1.1 closes `envs` even if a constructor raised
        _note_open(self.envs)
        first, self.num_envs = self.envs[0], len(self.envs)
        self.metadata = {**first.metadata, "autoreset_mode": autoreset_mode}
        self.render_mode = first.render_mode
        self.single_observation_space, self.single_action_space = first.observation_space, first.action_space
        for env in self.envs:
            if (env.observation_space, env.action_space) != (first.observation_space, first.action_space):
                raise RuntimeError(
                    f"one environment has the spaces {first.observation_space} and {first.action_space}, but another "
                    f"has {env.observation_space} and {env.action_space}"
                )
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.reward_space = declared(first)
        self.gathers_infos = True
        self.report: Callable[[int, BaseException], None] | None = None
        self.replaced: list[int] = []
        self.prepare: Callable[[gymnasium.Env], None] | None = None
        self.something_ended = True  # so that the first step is checked like a step after the end of an episode
        self._observations: list[Any] = [None] * self.num_envs  # last observation of each environment
        example = create_empty_array(self.single_observation_space, 1)
        # Shape and dtype of observations that are one array; None if they are nests.
        self._form = (example.shape[1:], example.dtype) if isinstance(example, np.ndarray) else None
        self._waits = np.zeros(self.num_envs, bool)  # environments that wait for a reset after an episode's end
        self._no_ends = np.zeros(self.num_envs, bool)  # flags shared by all steps without an episode's end
        self._no_ends.flags.writeable = False
        self.joint = joint_steps(self.envs)

    @property
    def _rests(self) -> bool:
        return self.metadata["autoreset_mode"] == AutoresetMode.DISABLED

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Resets all environments, or only those selected by the mask `options["reset_mask"]`, `[B]` bool.

        Args:
          seed: list with a seed or None for each environment; None means no seeds.
          options: options of the reset; entries other than the mask are passed to each environment.
        """
        rows = np.ones(self.num_envs, bool)
        if options is not None and "reset_mask" in options:
            rows = options.pop("reset_mask")
        options = options or None  # not {}, because an environment may look for its own options in a dict
        infos: list[dict[str, Any]] = [{} for _ in self.envs]
        for i in np.flatnonzero(rows).tolist():
            own_seed = None if seed is None else seed[i]
            self._observations[i], infos[i] = self.envs[i].reset(seed=own_seed, options=options)
        self._waits = self._waits & ~rows
        some = self._observations[int(np.argmax(rows))]  # placeholder for environments that were never reset
        self._observations = [some if one is None else one for one in self._observations]
        return self._batch(self._observations), gathered(infos)

    def step(self, actions: Any) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        actions = actions if isinstance(actions, np.ndarray) else list(iterate(self.action_space, actions))
        if len(actions) != len(self.envs):
            raise ValueError(f"got {len(actions)} actions for {len(self.envs)} environments")
        all_begins = self._waits.tolist()
        was_quiet = not self.something_ended and True not in all_begins
        if self.replaced:
            self.replaced = []
        if self.joint is None or (True in all_begins and self._rests):
            batch, rewards, terminations, truncations, infos = self._step_each(actions, all_begins)
        else:
            observations, rewards, terminations, truncations = map(list, self.joint.step(actions, all_begins))
            batch, infos = self._batch(observations), []
            self._observations = list(batch)
        self.something_ended = any(terminations) or any(truncations)
        if not was_quiet or self.something_ended:  # otherwise no environment waits for a reset
            check_ends(terminations, truncations)
            resting = self._waits if self._rests else False
            self._waits = np.array(terminations, bool) | np.array(truncations, bool) | resting
        ends = self._no_ends, self._no_ends
        if self.something_ended:
            ends = np.array(terminations, bool), np.array(truncations, bool)
        return batch, np.array(rewards, np.float64), *ends, gathered(infos) if self.gathers_infos else {}

    def _step_each(self, actions: Any, all_begins: list[bool]) -> tuple[Any, list, list, list, list]:
        """Steps or resets one environment after another.

        Returns:
          A batch of observations; rewards, terminations, truncations and infos, `[B]` each.
        """
        rows: list[tuple[Any, ...]] = []
        reward: Any = 0.0
        no_reward = reward if self.reward_space is None else np.zeros(self.reward_space.shape, np.float32)
        # `actions` is the last argument, so that zip stops before the array's iterator raises its slow exception.
        for env, begins, action in zip(self.envs, all_begins, actions):
            try:
                if begins:
                    observation, info = (self._observations[len(rows)], {}) if self._rests else env.reset()
                    reward, terminated, truncated = no_reward, False, False
                else:
                    observation, reward, terminated, truncated, info = env.step(action)
                if type(reward) is not float and self.reward_space is None:
                    reward = float(reward.item() if isinstance(reward, np.ndarray) else reward)
            except (Exception, SystemExit) as error:
                refuse_vector(reward, self.reward_space)
                if self.report is None:
                    raise
                observation, info = self._replace(len(rows), error)
                reward, terminated, truncated = no_reward, False, False
            rows.append((observation, reward, terminated, truncated, info))
        observations, rewards, terminations, truncations, infos = map(list, zip(*rows))
        try:
            batch = self._batch(observations)
        except Exception:  # a wrong observation may raise any exception in gymnasium's and numpy's code
            if self.report is None:
                raise
            for i in self._replace_misfits(observations):
                rewards[i], terminations[i], truncations[i] = no_reward, False, False
            batch = self._batch(observations)
        self._observations = observations
        return batch, rewards, terminations, truncations, infos

    def render(self) -> tuple[Any, ...]:
        return tuple(env.render() for env in self.envs)

    def close_extras(self, **kwargs: Any) -> None:
        for env in self.envs:
            _OPEN.pop(id(env.unwrapped), None)
            close(env)

    def replace(self, rows: np.ndarray) -> Any:
        """Rebuilds the environments that the mask `rows`, `[B]` bool, selects.

        Returns:
          A batch of observations: the first observation of each rebuilt environment, and the last of each other
          environment.
        """
        for i in np.flatnonzero(rows):
            self._observations[i], _ = self._rebuild(int(i))
        self._waits = self._waits & ~rows
        return self._batch(self._observations)

    def break_off(self, rows: np.ndarray) -> None:
        """Makes the next step reset the environments in the mask `rows`, `[B]` bool; with DISABLED, they rest."""
        self._waits = self._waits | rows

    def _replace(self, i: int, error: BaseException) -> tuple[Any, dict[str, Any]]:
        assert self.report is not None
        self.report(i, error)
        self.replaced.append(i)
        return self._rebuild(i)

    def _replace_misfits(self, observations: list[Any]) -> list[int]:
        """Rebuilds environments whose observations do not fit the space, and replaces those observations.

        Returns:
          The indices of the rebuilt environments.
        """
        found = []
        for i, observation in enumerate(observations):
            try:
                self._batch([observation])
            except Exception as error:
                found.append(i)
                observations[i], _ = self._replace(i, error)
        return found

    def _rebuild(self, i: int) -> tuple[Any, dict[str, Any]]:
        with contextlib.suppress(Exception):  # closing a broken environment may fail
            self.envs[i].close()
        (seed,) = draw_seeds(1)  # drawn before the constructor runs, which may seed torch's generator
        env = self._env_fns[i]()
        self.envs = [*self.envs[:i], env, *self.envs[i + 1 :]]
        self.joint = joint_steps(self.envs)
        if self.prepare is not None:
            self.prepare(env)
        return env.reset(seed=seed)

    def _batch(self, observations: list[Any]) -> Any:
        if self._form is None:
            empty: Any = create_empty_array(self.single_observation_space, len(observations))
            return concatenate(self.single_observation_space, observations, empty)
        shape, dtype = self._form
        batch = np.array(observations)
        if batch.dtype != dtype:
            batch = batch.astype(dtype, casting="same_kind")
        if batch.shape[1:] != shape:
            raise ValueError(
                f"the environments returned observations of shape {batch.shape[1:]}, but their observation_space has "
                f"shape {shape}"
            )
        return batch


# Environments that vector environments have made and not yet closed, by their id.
_OPEN: weakref.WeakValueDictionary[int, gymnasium.Env] = weakref.WeakValueDictionary()


def _note_open(envs: Sequence[gymnasium.Env]) -> None:
    """Notes the environments of a vector environment, and warns if another one also steps them.

    Raises:
      UsageError: two of them are the same.
    """
    made = {id(env.unwrapped): env.unwrapped for env in envs}
    words = f"the function that makes environments returned the same {type(envs[0].unwrapped).__name__} twice"
    if len(made) < len(envs):
        raise UsageError(f"{words}; make a new one in each call")
    if made.keys() & _OPEN.keys():
        logging.warning("%s, so training and evaluation end each other's episodes; make a new one in each call", words)
    _OPEN.update(made)


def close(env: Any) -> None:
    """Closes a single or vector environment, or a simulator.

    An error is logged, because it must not make a finished run fail.
    """
    try:
        env.close()
    except (Exception, SystemExit) as error:
        logging.warning("%s", in_words(error, f"{type(getattr(env, 'unwrapped', env)).__name__}.close"))


def gathered(infos: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merges the infos of B environments into gymnasium's format for vector environments.

    The value of a key is an array `[B, ...]`, with 0 or None for environments that did not report the key; `_key` is
    the mask `[B]` bool of the environments that reported the key. Numbers of different types are converted to one type
    by numpy's rules, for example int and float to float64. Other values, such as integers beyond 64 bits, and arrays of
    different shapes are kept as objects. If an environment reports `_key` in addition to `key`, `_key` is left out.
    Nested infos are merged in the same way.
    """
    result: dict[str, Any] = {}
    for i, info in enumerate(infos):
        _gather(result, info, i, len(infos))
    return result


def _gather(result: dict[str, Any], info: dict[str, Any], i: int, num_envs: int) -> None:
    """Adds the info of environment i to `result`."""
    for key, value in info.items():
        column = result.get(key)
        if isinstance(value, dict) and (column is None or isinstance(column, dict)):
            _gather(result.setdefault(key, {}), value, i, num_envs)
        elif isinstance(column, dict) or is_mask(key, info) or is_mask(key, result):
            continue  # other environments have a dict for the key, or the key is the name of another key's mask
        else:
            if column is None:
                column = result[key] = _empty_column(value, num_envs)
            elif not _fits(value, column):
                column = result[key] = _widened(column, result[f"_{key}"], value)
            column[i] = value
        mask = f"_{key}"
        # If another environment reported a value under the name of the mask, the mask replaces the value.
        if mask not in result or f"_{mask}" in result:
            result.pop(f"_{mask}", None)
            result[mask] = np.zeros(num_envs, bool)
        result[mask][i] = True


def is_mask(key: Any, info: dict[str, Any]) -> bool:
    """Returns whether a key of an info is the name of another key's mask."""
    return isinstance(key, str) and key[:1] == "_" and key[1:] in info


def is_beyond_int64(value: Any) -> bool:
    return type(value) is int and not -(2**63) <= value < 2**63


def _empty_column(value: Any, num_envs: int) -> np.ndarray:
    """Returns an array `[B, ...]` that can hold values like the given value."""
    if isinstance(value, np.ndarray):
        return np.zeros((num_envs, *value.shape), value.dtype)
    kind = type(value)
    if (kind in (int, float, bool) or issubclass(kind, np.number)) and not is_beyond_int64(value):
        return np.zeros(num_envs, kind)
    return np.full(num_envs, None, object)


def _fits(value: Any, column: np.ndarray) -> bool:
    """Returns whether a column `[B, ...]` can hold a value in its dtype and shape."""
    if column.dtype == object:
        return True
    if isinstance(value, np.ndarray):
        return value.shape == column.shape[1:] and np.can_cast(value.dtype, column.dtype)
    kind = type(value)
    if column.ndim > 1 or is_beyond_int64(value):
        return False
    return kind is column.dtype.type or _IN_NUMPY.get(kind) is column.dtype.type


def _widened(column: np.ndarray, present: np.ndarray, value: Any) -> np.ndarray:
    """Returns a copy of a column that can also hold `value`, with a common number type or dtype object.

    Args:
      column: values `[B, ...]` reported so far.
      present: entries that were reported, `[B]` bool.
      value: value that the column cannot hold.
    """
    if isinstance(value, bool | int | float | np.number | np.ndarray):
        new = np.asarray(value)
        if new.dtype.kind in "biuf" and new.shape == column.shape[1:]:
            return column.astype(np.promote_types(column.dtype, new.dtype))
    objects = np.full(len(column), None, object)
    for i in np.flatnonzero(present):
        objects[i] = column[i]
    return objects


def check_ends(terminations: Sequence[Any], truncations: Sequence[Any]) -> None:
    """Raises UsageError if a flag is not a bool, 0 or 1: a string would count as True, and None as False."""
    for name, ends in (("terminated", terminations), ("truncated", truncations)):
        for end in ends:
            if type(end) is not bool and (np.shape(end) != () or end not in (False, True)):
                raise UsageError(f"the environment's step returned {name} = {end!r}; it must be True or False")


def refuse_vector(reward: Any, reward_space: spaces.Box | None = None) -> None:
    """Raises UsageError if a reward is a vector, but no `reward_space` declares vector rewards."""
    if np.size(reward) > 1 and reward_space is None:
        raise UsageError(
            f"a reward of the environment has {np.size(reward)} entries, but the environment has no reward_space; "
            f"declare one, a Box of shape ({np.size(reward)},), or add the entries up in a wrapper"
        )


def refuse_breach(error: BaseException, name: str, method: str) -> None:
    """Raises UsageError if an error comes from a violation of gymnasium's interface.

    Args:
      error: error that `step` or `reset` of a vector environment raised; errors from an environment's own code are
        ignored.
      name: name of the environments.
      method: name of the method: 'step', 'reset' or 'construction'.
    """
    places = [(Path(frame.filename), frame.name) for frame in traceback.extract_tb(error.__traceback__)]
    own, function = [place for place in places if _NUMPY not in place[0].parents][-1]
    is_relayed = function == "_raise_if_errors"  # gymnasium's function that re-raises errors of other processes
    if isinstance(error, UsageError) or is_relayed or not {own, *own.parents} & _CALLERS:
        return
    asked = (
        "reset(seed=, options=) returns (observation, info), and step (observation, reward, terminated, truncated, "
        "info), where infos are dicts and every part of the observation matches its space"
    )
    if method == "construction":
        asked = "check its class, its wrappers and its env_kwargs"
    raise UsageError(
        f"{name} violates gymnasium's interface: {method} raised {type(error).__name__}: {first_line(error)}; {asked}"
    ) from error
