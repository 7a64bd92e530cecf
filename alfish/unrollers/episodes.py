"""Whole episodes from the rows of environments that step together."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from alfish import nest
from alfish.data import StepType
from alfish.nest import Nest, as_tensor


class EpisodeAccumulator:
    """Stores the rows of each environment until they are taken.

    Args:
      num_envs: B.
    """

    def __init__(self, num_envs: int):
        self._rows: list[list[list[Any]]] = [[] for _ in range(num_envs)]  # the leaves of each row of each column

    def add(self, rows: Nest, columns: Iterable[int]) -> None:
        """Stores copies of the rows of some environments.

        Args:
          rows: leaves `[B, ...]`, arrays or tensors.
          columns: indices of the environments.
        """
        leaves, self._structure = nest.flatten(rows)
        for column in columns:
            # A view would keep the rows of all environments in memory.
            self._rows[column].append([_copied(leaf[column : column + 1]) for leaf in leaves])

    def take(self, column: int) -> Nest:
        """Removes and returns an environment's rows, tensors `[T, 1, ...]`."""
        rows, self._rows[column] = self._rows[column], []
        leaves = [torch.stack([as_tensor(row) for row in leaf]) for leaf in zip(*rows, strict=True)]
        return nest.unflatten(self._structure, leaves)


class StartedEpisodes:
    """The first episodes that start in environments that step together.

    The first episodes to end would be the short ones: of lengths 10 and 500, equally likely, the first 10 to end in 8
    environments have a mean of 138, not 255.

    Args:
      num_envs: B; each environment begins with a FIRST row.
      num_episodes: number of episodes to store.

    Attributes:
      whole: the finished episodes by their number in the order of starts: `start`, leaves `[1, ...]`, and rows,
        `[T+1, 1, ...]`.
    """

    def __init__(self, num_envs: int, num_episodes: int):
        self._num_episodes, self._num_started = num_episodes, min(num_envs, num_episodes)
        self._episode = np.where(np.arange(num_envs) < num_episodes, np.arange(num_envs), -1)  # -1: not stored
        self._rows = EpisodeAccumulator(num_envs)
        self._starts: dict[int, Nest] = {}
        self.whole: dict[int, tuple[Nest, Nest]] = {}

    @property
    def complete(self) -> bool:
        """True if all stored episodes have ended."""
        return len(self.whole) == self._num_episodes

    def add(self, step_type: np.ndarray, rows: Nest, start: Nest) -> None:
        """Stores rows of the episodes.

        Args:
          step_type: `[B]`; PAD where there is no row.
          rows: leaves `[B, ...]`.
          start: leaves `[B, ...]`, stored for FIRST rows.
        """
        there = (self._episode >= 0) & (step_type != StepType.PAD)
        self._rows.add(rows, np.flatnonzero(there).tolist())
        for column in np.flatnonzero(there & (step_type == StepType.FIRST)).tolist():
            self._starts[column] = nest.map(lambda leaf, i=column: _copied(leaf[i : i + 1]), start)
        for column in np.flatnonzero(there & (step_type == StepType.LAST)).tolist():
            self.whole[int(self._episode[column])] = self._starts.pop(column), self._rows.take(column)
            starts = self._num_started < self._num_episodes  # the environment's next row is FIRST
            self._episode[column] = self._num_started if starts else -1
            self._num_started += starts


def _copied(leaf: Any) -> Any:
    return leaf.copy() if type(leaf) is np.ndarray else leaf.clone()
