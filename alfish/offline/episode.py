"""An episode as somebody recorded it: numpy, in the environment's own units and structure.

The one form between files and the stream. Every source yields it, the validator reads and mends it, `rows` makes the
stream's rows of it.
"""

import abc
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from alfish import nest
from alfish.nest import Nest
from alfish.offline.spaces import NO_SPACES, Spaces


class Episode(NamedTuple):
    """T transitions. What sources yield may break any of this; what the validator yields does not."""

    id: str  # names it for people: the source's number or name of it
    observations: Nest  # [T+1, ...] each leaf; row T is the final one
    actions: Nest  # [T, ...]
    rewards: np.ndarray  # [T], or [T, R]
    terminated: np.ndarray  # [T] bool
    truncated: np.ndarray  # [T] bool

    @property
    def length(self) -> int:
        """T, as the rewards say it."""
        return len(self.rewards)


class Unreadable(NamedTuple):
    """Stands in the place of an episode that the file does not give."""

    id: str
    reason: str  # completes "it is not readable: ..."


class EpisodeSource(abc.ABC):
    """Episodes of one file, directory or data set, read when they are asked for.

    Attributes:
      name: as the user gave it.
      spaces: that the source declares; either may be None.
      notes, warnings: what a reader should know about how the data were taken, and what may be wrong with them;
        complete once all episodes were read.
    """

    def __init__(self, name: str, spaces: Spaces = NO_SPACES):
        self.name, self.spaces = name, spaces
        self.notes: list[str] = []
        self.warnings: list[str] = []

    @abc.abstractmethod
    def episodes(self) -> Iterator[Episode | Unreadable]:
        """All of them, in the source's order; may be called again."""

    def note(self, sentence: str) -> None:
        """Adds a sentence to `notes`, once."""
        if sentence not in self.notes:
            self.notes.append(sentence)

    def warn(self, sentence: str) -> None:
        """Adds a sentence to `warnings`, once."""
        if sentence not in self.warnings:
            self.warnings.append(sentence)


class Arrays(EpisodeSource):
    """Episodes that are in memory already.

    Args:
      episodes: in any number.
      spaces: of the environment that they come from.
      name: for messages.
    """

    def __init__(self, episodes: list[Episode], spaces: Spaces = NO_SPACES, name: str = "arrays"):
        super().__init__(name, spaces)
        self._episodes = episodes

    def episodes(self) -> Iterator[Episode | Unreadable]:
        yield from self._episodes


def without_final_observation(
    id: str, observations: Nest, actions: Nest, rewards: np.ndarray, terminated: np.ndarray, truncated: np.ndarray
) -> Episode:
    """An episode of T transitions whose final observation was not recorded: every array is `[T, ...]`.

    Where it terminated, nothing is learned from the final observation, so the last one stands for it. Where it did
    not, its value would be needed: the last transition is given up, and the observation it began with is the final one.
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
    """The flags `[T]` of an episode that ends in its last step."""
    flags = np.zeros((2, length), bool)
    if length:
        flags[:, -1] = bool(terminated), bool(truncated)
    return flags[0], flags[1]
