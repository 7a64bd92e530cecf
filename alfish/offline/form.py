"""The format that all episodes of a data set share: structure, shapes and dtypes.

An episode in another format is converted if exactly one conversion is correct; otherwise it is refused.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces

from alfish import nest, specs
from alfish.nest import Nest
from alfish.offline.data_report import DataReport
from alfish.offline.episode import Episode, without_final_observation
from alfish.offline.recorded_spaces import Spaces


@dataclass(frozen=True)
class LeafForm:
    """Shape, dtype and space that a leaf of the observation or action has in each step."""

    shape: tuple[int, ...]
    dtype: np.dtype  # dtype of stored values
    space: Any  # None if no space is declared


class UnusableError(Exception):
    """Raised for an episode that cannot be converted to rows; the message completes "episode 7: ..."."""


class RecordedMask:
    """The action mask in recorded observations.

    Args:
      reader: reader of the mask in observations.
      units: units of the actions.
    """

    def __init__(self, reader: specs.MaskReader, units: specs.ActionUnits):
        self._reader, self._units = reader, units
        self.name = reader.name

    @classmethod
    def of(cls, spaces: Spaces) -> "RecordedMask | None":
        """Returns the action mask in the observations of `spaces`; None without a mask. Both spaces must be known."""
        assert spaces.observation is not None and spaces.action is not None
        reader = specs.mask_reader(specs.observation_spec(spaces.observation), specs.action_spec(spaces.action))
        return None if reader is None else cls(reader, specs.ActionUnits(spaces.action))

    def is_in(self, observations: Nest) -> bool:
        return self._reader.path in nest.keys(observations)

    def added(self, observations: Nest, count: int) -> Nest:
        """Returns observations of `count` rows, completed with a mask that allows every action."""
        *parents, key = self._reader.path
        if not isinstance(observations, dict):  # an array, which becomes the entry next to the mask
            observations = {"observation": observations}
        result = parent = dict(observations)
        for name in parents:
            parent[name] = parent = dict(parent[name])
        parent[key] = np.ones((count, self._reader.layout.size), np.int8)
        return result

    def forbids(self, observations: Nest, actions: Nest) -> bool:
        """Returns whether a mask forbids the action `[T, ...]` of its row; `observations` have at least T rows."""
        taken = self._units.from_environment(actions)
        mask = self._reader.mask(observations)[: len(nest.leaves(taken)[0])]
        return bool(self._reader.layout.forbids(mask, taken).any())


class EpisodeForm:
    """Converts episodes to the form of the spaces; without spaces, to the form of the first episode.

    Args:
      spaces: spaces of the data; either may be None.
      report: report that receives the corrections.

    Raises:
      UsageError: a space is not supported.
    """

    def __init__(self, spaces: Spaces, report: DataReport):
        if spaces.observation is not None:
            specs.check_learnable(spaces.observation, "observation")
        if spaces.action is not None:
            specs.check_learnable(spaces.action, "action")
        self._report = report
        self._leaves = {"observation": _leaves(spaces.observation), "action": _leaves(spaces.action)}
        self._reward_shape: tuple[int, ...] | None = None
        self._mask = None if None in spaces else RecordedMask.of(spaces)

    def observations(self, episode: Episode) -> Iterator[tuple[str, np.ndarray, LeafForm]]:
        """Yields the observation's leaves, each with its name for messages."""
        return self._named("observation", episode.observations)

    def actions(self, episode: Episode) -> Iterator[tuple[str, np.ndarray, LeafForm]]:
        """Yields the action's leaves, each with its name for messages."""
        return self._named("action", episode.actions)

    def action_names(self) -> list[str]:
        """Returns the names of the action's leaves."""
        return [name for name, _ in nest.named_leaves(self._leaves["action"], "action")]

    def fitted(self, episode: Episode) -> Episode:
        """Returns the episode in the format of the data set, with T+1 observations and flags for its end.

        An episode without transitions is accepted, too.

        Raises:
          UnusableError: the episode cannot have this form.
        """
        for field in ("observations", "actions", "rewards", "terminated", "truncated"):
            value = getattr(episode, field)
            if value is None or not nest.leaves(value):
                raise UnusableError(f"it has no {field}")
        rewards, length = self._rewards(episode), len(episode.rewards)
        terminated, truncated = _flags(episode.terminated, "terminated"), _flags(episode.truncated, "truncated")
        for label, leaf in (
            *nest.named_leaves(episode.observations, "observations"),
            *nest.named_leaves(episode.actions, "actions"),
        ):
            if not np.ndim(leaf):
                raise UnusableError(f"{label} is one value, but an array with one value for each step is expected")
        for name, values in (("actions", episode.actions), ("terminated", terminated), ("truncated", truncated)):
            for count in {len(leaf) for leaf in nest.leaves(values)} - {length}:
                raise UnusableError(f"it has {length} rewards but {count} {name}")
        counts = {len(leaf) for leaf in nest.leaves(episode.observations)}
        num_observations = counts.pop()
        if counts or num_observations not in (length, length + 1):
            raise UnusableError(
                f"it has {' and '.join(map(str, sorted({num_observations, *counts})))} observations for {length} "
                f"actions, not {length + 1}"
            )
        observations = episode.observations
        if self._mask is not None and not self._mask.is_in(observations):
            self._report.add("warning", f"the data have no {self._mask.name}, so every action counts as allowed")
            observations = self._mask.added(observations, num_observations)
        observations = self._cast(observations, "observation", episode.id)
        actions = self._cast(episode.actions, "action", episode.id)
        if length and self._mask is not None and self._mask.forbids(observations, actions):
            raise UnusableError(f"an action is forbidden by its mask, {self._mask.name}")
        mended = Episode(episode.id, observations, actions, rewards, terminated, truncated)
        return self._completed(mended, num_observations) if length else mended

    def _completed(self, episode: Episode, num_observations: int) -> Episode:
        """Returns the episode with flags for its end, and a final observation; drops its last step if necessary."""
        mend, id = self._report.add, episode.id
        if (episode.terminated & episode.truncated).any():
            mend("mended", "a step is both terminated and truncated; it counts as terminated", id)
            episode = episode._replace(truncated=episode.truncated & ~episode.terminated)
        if not (episode.terminated[-1] or episode.truncated[-1]):
            mend("mended", "no flag says how it ends; it counts as truncated", id)
            truncated = episode.truncated.copy()
            truncated[-1] = True
            episode = episode._replace(truncated=truncated)
        if num_observations > episode.length:
            return episode
        what = (
            "the last one is used instead, since the episode terminated"
            if episode.terminated[-1]
            else "its last step is dropped"
        )
        mend("mended", f"its final observation is missing: {what}", id)
        return without_final_observation(*episode)

    def _rewards(self, episode: Episode) -> np.ndarray:
        rewards = np.asarray(episode.rewards)
        if rewards.dtype.kind not in "fiub":
            raise UnusableError(f"its rewards have dtype {rewards.dtype}, which cannot be converted to float32")
        if rewards.ndim == 2 and rewards.shape[1] == 1:
            rewards = rewards[:, 0]
        if rewards.ndim not in (1, 2):
            raise UnusableError(f"its rewards have shape {list(rewards.shape)}, but [T] or [T, R] is expected")
        if self._reward_shape is None:
            self._reward_shape = rewards.shape[1:]
        if rewards.shape[1:] != self._reward_shape:
            one, other = list(rewards.shape[1:]), list(self._reward_shape)
            raise UnusableError(f"its rewards have shape {one} in each step, but {other} is expected")
        if rewards.dtype != np.float32:
            self._report.add("mended", f"rewards of dtype {rewards.dtype} are converted to float32", episode.id)
        with np.errstate(over="ignore"):  # an overflow is reported by the check for finite values
            return rewards.astype(np.float32)

    def _cast(self, values: Nest, kind: str, id: str) -> Nest:
        """Returns the values with each leaf in its stored dtype."""
        values = nest.map(np.asarray, values)
        if self._leaves[kind] is None:
            self._leaves[kind] = nest.map(_guessed, values)
        leaves, there, here = self._leaves[kind], nest.paths(values), nest.paths(self._leaves[kind])
        if there != here:
            one, other = ("one array" if paths == [""] else ", ".join(paths) for paths in (there, here))
            raise UnusableError(f"its {kind}s are {one}, but {other} is expected")
        cast = [
            self._cast_leaf(value, leaf, name, id)
            for (name, value), leaf in zip(nest.named_leaves(values, kind), nest.leaves(leaves))
        ]
        return nest.unflatten(nest.flatten(leaves)[1], cast)

    def _cast_leaf(self, value: np.ndarray, leaf: LeafForm, name: str, id: str) -> np.ndarray:
        if value.shape[1:] != leaf.shape and math.prod(value.shape[1:]) == math.prod(leaf.shape) == 1:
            shapes = f"shape {list(value.shape[1:])} is changed to {list(leaf.shape)}"
            self._report.add("mended", f"{name} of {shapes}", id)
            value = value.reshape(-1, *leaf.shape)
        if value.shape[1:] != leaf.shape:
            one, other = list(value.shape[1:]), list(leaf.shape)
            raise UnusableError(f"{name} has shape {one} in each step, but {other} is expected")
        if value.dtype != leaf.dtype:
            if value.dtype.kind not in "fiub":
                raise UnusableError(f"{name} has dtype {value.dtype}, which cannot be converted to {leaf.dtype}")
            with np.errstate(over="ignore", invalid="ignore"):
                cast = value.astype(leaf.dtype)
            if leaf.dtype.kind != "f" and not np.array_equal(cast, value):
                raise UnusableError(f"{name} has dtype {value.dtype}, but {leaf.dtype} cannot hold its values")
            self._report.add("mended", f"{name} of dtype {value.dtype} is converted to {leaf.dtype}", id)
            value = cast
        outside = _out_of_range(value, leaf.space)
        if outside is not None:
            raise UnusableError(f"{name} is {outside}, which is not in {leaf.space}")
        return value

    def _named(self, kind: str, values: Nest) -> Iterator[tuple[str, np.ndarray, LeafForm]]:
        for (name, value), leaf in zip(nest.named_leaves(values, kind), nest.leaves(self._leaves[kind])):
            yield name, value, leaf


def _leaves(space: spaces.Space | None) -> Nest:
    """Returns a `LeafForm` for each leaf of a space."""
    if space is None:
        return None
    return specs.map_space(lambda leaf: LeafForm(tuple(leaf.shape), _kept_dtype(leaf.dtype), leaf), space)


def _guessed(values: np.ndarray) -> LeafForm:
    """Returns the form of a leaf of the first episode; all other episodes must have the same form."""
    return LeafForm(values.shape[1:], _kept_dtype(values.dtype), None)


def _kept_dtype(dtype: Any) -> np.dtype:
    """Returns the dtype in which values are stored: float32 for all floats, otherwise `dtype`."""
    dtype = np.dtype(dtype)
    return np.dtype(np.float32) if dtype.kind == "f" else dtype


def _flags(flags: Any, name: str) -> np.ndarray:
    flags = np.asarray(flags)
    if flags.ndim == 2 and flags.shape[1] == 1:
        flags = flags[:, 0]
    if flags.ndim != 1 or flags.dtype.kind not in "biuf":
        raise UnusableError(
            f"{name} has shape {list(flags.shape)} and dtype {flags.dtype}; each step needs one value, 0 or 1"
        )
    other = flags[(flags != 0) & (flags != 1)]
    if len(other):
        raise UnusableError(f"{name} holds {other[0]}; each step needs 0 or 1")
    return flags.astype(bool)


def _out_of_range(values: np.ndarray, space: Any) -> Any:
    """Returns the first of `values` outside a space of integers; None if all are inside, or for any other space."""
    if isinstance(space, spaces.Discrete):
        low, count = space.start, space.n
    elif isinstance(space, spaces.MultiDiscrete):
        low, count = space.start, space.nvec
    elif isinstance(space, spaces.MultiBinary):
        low, count = np.int64(0), np.int64(2)
    else:
        return None
    outside = (values < low) | (values >= low + count)
    return values[outside].flat[0] if outside.any() else None
