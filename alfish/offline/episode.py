"""A recorded episode: numpy arrays in the environment's units and structure.

Every source yields episodes, the validator checks and corrects them, and `episode_rows` converts them to rows of the
stream.
"""

import abc
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from alfish import nest
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
