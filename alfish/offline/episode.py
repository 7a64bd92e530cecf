"""A recorded episode: numpy arrays in the environment's units and structure.

Every source yields episodes, the validator checks and corrects them, and `EpisodeEncoder` converts them to rows of the
stream.

An episode of T transitions has T+1 rows. Row 0 is FIRST. Row T is LAST and has the final observation; its discount is 0
if the episode terminated, and 1 if it was truncated; its action is padding. The reward of step t is in row t+1.
"""

import abc
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces

from alfish import nest, specs
from alfish.data import Experience, StepType, TimeStep
from alfish.errors import UsageError
from alfish.nest import Nest
from alfish.offline.recorded_spaces import NO_SPACES, Spaces


class Episode(NamedTuple):
    """An episode of T transitions. Once validated, it has the shapes and dtypes below; before, it may have others."""

    id: str  # number or name of the episode in the source, for messages
    observations: Nest  # leaves [T+1, ...]; row T is the final observation
    actions: Nest  # leaves [T, ...]
    rewards: np.ndarray  # [T], or [T, R]
    terminated: np.ndarray  # [T] bool
    truncated: np.ndarray  # [T] bool

    @property
    def length(self) -> int:
        """T, the number of rewards."""
        return len(self.rewards)


class Unreadable(NamedTuple):
    """Placeholder for an episode that cannot be read."""

    id: str
    reason: str  # text that completes "it is not readable: ..."


class EpisodeSource(abc.ABC):
    """Base class of sources, which read the episodes of one file, directory or data set.

    Attributes:
      name: name of the source, as the user gave it.
      spaces: spaces that the source declares; either may be None.
      notes, warnings: sentences about how the data are read, and about possible faults; the lists are complete when all
        episodes have been read.
    """

    def __init__(self, name: str, spaces: Spaces = NO_SPACES):
        self.name, self.spaces = name, spaces
        self.notes: list[str] = []
        self.warnings: list[str] = []

    @abc.abstractmethod
    def episodes(self) -> Iterator[Episode | Unreadable]:
        """Yields all episodes in the source's order; may be called again."""

    def note(self, sentence: str) -> None:
        """Adds a sentence to `notes`, once."""
        if sentence not in self.notes:
            self.notes.append(sentence)

    def warn(self, sentence: str) -> None:
        """Adds a sentence to `warnings`, once."""
        if sentence not in self.warnings:
            self.warnings.append(sentence)


class Arrays(EpisodeSource):
    """Source of episodes that are already in memory.

    Args:
      episodes: list of episodes; it may be empty.
      spaces: spaces of the environment that the episodes come from.
      name: name of the source, for messages.
    """

    def __init__(self, episodes: list[Episode], spaces: Spaces = NO_SPACES, name: str = "arrays"):
        super().__init__(name, spaces)
        self._episodes = episodes

    def episodes(self) -> Iterator[Episode | Unreadable]:
        yield from self._episodes


def without_final_observation(
    id: str, observations: Nest, actions: Nest, rewards: np.ndarray, terminated: np.ndarray, truncated: np.ndarray
) -> Episode:
    """Returns an episode from arrays `[T, ...]`, which lack the final observation.

    If the episode terminated, the last observation is repeated, because the value of the final observation is not
    needed. Otherwise the value is needed: the last transition is dropped, and its observation becomes the final
    observation. Note that goals of `HindsightReplay` and rewards of `ICM` read the final observation even of a
    terminated episode, and so read the repeated observation.
    """
    if len(terminated) and terminated[-1]:
        repeated = nest.map(lambda leaf: np.concatenate([leaf, leaf[-1:]]), observations)
        return Episode(id, repeated, actions, rewards, terminated, truncated)
    truncated = np.array(truncated[:-1])
    if len(truncated):
        truncated[-1] = True
    actions = nest.map(lambda leaf: leaf[:-1], actions)
    return Episode(id, observations, actions, rewards[:-1], terminated[:-1], truncated)


def ends(length: int, terminated: Any, truncated: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns the flags `terminated` and `truncated`, `[T]` bool each, of an episode of T = `length` transitions.

    Args:
      length: number of transitions.
      terminated, truncated: flags of the last transition; the flags of all other transitions are False.
    """
    flags = np.zeros((2, length), bool)
    if length:
        flags[:, -1] = bool(terminated), bool(truncated)
    return flags[0], flags[1]


class EpisodeEncoder:
    """Converts episodes to rows.

    Args:
      spaces: spaces of the environment; neither may be None.
      action_limit: largest magnitude of a trained Box action, in (0, 1]; larger actions are clipped, because a tanh
        policy has infinite log-probability at +-1. `prev_action` is the executed action without clipping.
    """

    def __init__(self, spaces: Spaces, action_limit: float):
        assert spaces.observation is not None and spaces.action is not None
        self._read = specs.ObservationUnits(spaces.observation).from_environment
        self._units = specs.ActionUnits(spaces.action)
        self._action_spec = specs.action_spec(spaces.action)
        self._limit = action_limit

    def rows(self, episode: Episode) -> Experience:
        """Returns an episode's rows: numpy arrays `[T+1, ...]` without the dimension B; `env_id` is 0."""
        length = episode.length
        step_type = np.full(length + 1, StepType.MID, np.int32)
        step_type[0], step_type[-1] = StepType.FIRST, StepType.LAST
        discount = np.ones(length + 1, np.float32)
        discount[-1] = not episode.terminated[-1]
        taken = self._units.executed(self._units.from_environment(episode.actions))
        taken = nest.map(lambda leaf, spec: np.asarray(leaf, spec.dtype), taken, self._action_spec)
        fields: tuple[Any, ...] = (  # the fields are arrays here, although their declared types are tensors
            step_type,
            _shifted(np.asarray(episode.rewards, np.float32)),
            discount,
            self._read(episode.observations),
            nest.map(_shifted, taken),
            np.zeros(length + 1, np.int32),
        )
        time_step = TimeStep(*fields)
        return Experience(time_step, nest.map(self._trained, taken, self._action_spec), None, None)

    def _trained(self, taken: np.ndarray, spec: Any) -> np.ndarray:
        if isinstance(spec, spaces.Box) and specs.is_bounded(spec):
            taken = np.clip(taken, -np.float32(self._limit), np.float32(self._limit))
        return np.concatenate([taken, np.zeros_like(taken[:1])])


def episodes_of_rows(
    name: str, step_type: np.ndarray, reward: np.ndarray, discount: np.ndarray, observation: Nest, actions: Nest
) -> Iterator[Episode]:
    """Yields the episodes in consecutive rows of one environment.

    If the beginning of the first episode was overwritten, the episode starts with its oldest row. An episode without a
    LAST row was still running, or its environment was rebuilt; it counts as truncated at its newest row.

    Args:
      name: name of the environment; ids of episodes begin with it.
      step_type, reward, discount: fields of the rows, `[N]` (reward also `[N, R]`).
      observation: observations `[N, ...]`.
      actions: actions `[N, ...]` taken at each row.

    Raises:
      UsageError: a step type or a discount is invalid.
    """
    for what, wrong in (
        ("step type", step_type[~np.isin(step_type, (StepType.FIRST, StepType.MID, StepType.LAST))]),
        ("discount", discount[~np.isfinite(discount)]),
    ):
        if len(wrong):
            raise UsageError(
                f"environment {name}: a {what} is {wrong[0]:g}, which no environment returns; write the file again"
            )
    begins = np.flatnonzero((step_type == StepType.FIRST) | _after_last(step_type))
    for number, (start, stop) in enumerate(zip(begins, [*begins[1:], len(step_type)])):
        terminated, truncated = ends(
            stop - start - 1,
            step_type[stop - 1] == StepType.LAST and discount[stop - 1] == 0,
            step_type[stop - 1] != StepType.LAST or discount[stop - 1] != 0,
        )
        seen, taken = slice(start, stop), slice(start, stop - 1)
        arrived = reward[start + 1 : stop]
        yield Episode(
            f"{name}.{number}", nest.at(observation, seen), nest.at(actions, taken), arrived, terminated, truncated
        )


def _after_last(step_type: np.ndarray) -> np.ndarray:
    """Returns a mask `[N]` of rows that follow a LAST row, and of the first row."""
    return np.concatenate([[True], step_type[:-1] == StepType.LAST])


def _shifted(values: np.ndarray) -> np.ndarray:
    """Shifts values `[T, ...]` by one row to `[T+1, ...]`; row 0 is zero."""
    return np.concatenate([np.zeros_like(values[:1]), values])
