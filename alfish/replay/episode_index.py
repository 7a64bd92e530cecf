"""An index of the episodes in a ring: the first and last row of each row's episode, and its return to go.

The end of an episode is written to all of its stored rows when the episode ends. A row ends its episode if it is LAST,
or if a FIRST row follows it, because the episode broke off.
"""

import numpy as np
import torch

from alfish.data import StepType
from alfish.errors import UsageError
from alfish.functional.returns import reverse_scan
from alfish.replay.row_store import RowStore

NONE = -1  # no position: an open episode has no end, or a column has no open episode


class EpisodeIndex:
    """Stores the start, the end and the return to go of each row's episode.

    The return to go of a row is

        G_t = r_{t+1} + gamma d_{t+1} G_{t+1},   with G = 0 at the episode's last row

    where d is the environment's discount. Returns do not bootstrap: the return of a truncated or broken-off episode
    contains only received rewards.

    The entry of a row is written when the row is appended, and again when its episode ends. The work per row therefore
    does not grow with the length of the episode, except for returns: `reverse_scan` computes them in log2(rows) passes.

    Args:
      store: rows to index.
      gamma: discount per environment step of the returns, in [0, 1]; None stores no returns.
    """

    def __init__(self, store: RowStore, gamma: float | None = None):
        if gamma is not None and not 0 <= gamma <= 1:
            raise UsageError(f"the return_gamma of a replay is {gamma}; it must be a discount in [0, 1]")
        self._store, self._gamma = store, gamma
        self._length, self._columns = store.length, np.arange(store.num_envs)
        # Untouched memory pages take no memory.
        self._start = np.empty((store.length, store.num_envs), np.int64)
        self._end = np.empty((store.length, store.num_envs), np.int64)
        self._return_to_go = np.empty((0 if gamma is None else store.length, store.num_envs), np.float32)
        self._open = np.full(store.num_envs, NONE)  # first position of each column's open episode

    @property
    def keeps_returns(self) -> bool:
        """True if returns are stored."""
        return self._gamma is not None

    def check_rewards(self, shape: tuple[int, ...]) -> None:
        """Checks the shape of the rewards of rows.

        Raises:
          UsageError: returns are stored, but the reward is a vector.
        """
        if self.keeps_returns and shape:
            raise UsageError(
                f"a replay with a return_gamma needs scalar rewards, but the rewards are vectors of {shape[0]} "
                "entries; leave return_gamma out"
            )

    def push(self, columns: slice, position: int, step_type: np.ndarray) -> None:
        """Indexes rows that were appended to the store.

        Args:
          columns: indices of the columns, C of them.
          position: position of the first new row, the same in all C columns.
          step_type: step types `[T, C]` of the new rows, none of them PAD; T is at most the length of a column.
        """
        num_rows = len(step_type)
        at = np.arange(position, position + num_rows)
        slot, open_since = at % self._length, self._open[columns]
        is_last = step_type == StepType.LAST
        begins = step_type == StepType.FIRST  # [T, C]
        begins[0] |= open_since == NONE
        begins[1:] |= is_last[:-1]
        start = np.maximum.accumulate(np.where(begins, at[:, None], open_since))
        self._start[slot, columns], self._end[slot, columns] = start, NONE
        if self._gamma is not None:
            self._return_to_go[slot, columns] = np.nan
        # Row t - 1 ends an episode if row t begins one. Row 0 of `ends` is for the row before the new rows.
        ends = np.concatenate([begins, is_last[-1:]])  # [T + 1, C]
        ends[0] &= open_since != NONE
        oldest = position + num_rows - self._length
        for c in np.flatnonzero(ends.any(0)):
            first = position if open_since[c] == NONE else open_since[c]
            self._close(self._columns[columns][c], max(first, oldest), position - 1 + np.flatnonzero(ends[:, c]))
        self._open[columns] = np.where(is_last[-1], NONE, start[-1])

    def rebuild(self) -> None:
        """Indexes all rows of the store, e.g. after a load."""
        self.clear()
        if self._store.rows is not None:
            self.check_rewards(self._store.rows.reward.shape[1:])
        for column, (oldest, step_type) in enumerate(self._store.step_types()):
            if len(step_type):
                self.push(slice(column, column + 1), oldest, step_type[:, None])

    def clear(self) -> None:
        """Marks all columns as having no open episode."""
        self._open[:] = NONE

    def start(self, column: np.ndarray, position: np.ndarray) -> np.ndarray:
        """Returns the position of the oldest stored row of each row's episode."""
        return np.maximum(self._start[position % self._length, column], self._store.oldest()[column])

    def end(self, column: np.ndarray, position: np.ndarray) -> np.ndarray:
        """Returns the last position of each row's episode; the column's newest position if the episode is open."""
        end = self._end[position % self._length, column]
        return np.where(end == NONE, self._store.end[column] - 1, end)

    def return_to_go(self, column: np.ndarray, position: np.ndarray) -> np.ndarray:
        """Returns the float32 return to go of each row; nan in open episodes.

        Raises:
          UsageError: the index does not store returns.
        """
        if not self.keeps_returns:
            raise UsageError("this replay stores no returns; construct it with a return_gamma")
        return self._return_to_go[position % self._length, column]

    def check_valid(self) -> None:
        """Raises AssertionError if the index differs from an index computed row by row."""
        for column, (oldest, step_type) in enumerate(self._store.step_types()):
            self._check_column(column, oldest, step_type)

    def _check_column(self, column: int, oldest: int, step_type: np.ndarray) -> None:
        position = np.arange(oldest, oldest + len(step_type))
        start, end, return_to_go = oldest, NONE, np.nan
        for k, here in enumerate(step_type):
            if here == StepType.FIRST or (k and step_type[k - 1] == StepType.LAST):
                start = position[k]
            assert max(self._start[position[k] % self._length, column], oldest) == start, (
                "the index has a wrong start of an episode"
            )
        open_since = self._open[column]
        if len(step_type) == 0 or step_type[-1] == StepType.LAST:
            assert open_since == NONE, "an episode that has ended is still open"
        else:
            assert open_since != NONE and max(open_since, oldest) == start, "the open episode is not the right one"
        if len(step_type) == 0:
            return
        reward, discount = self._store.rewards(column, position)
        for k in reversed(range(len(step_type))):
            if step_type[k] == StepType.LAST or StepType.FIRST in step_type[k + 1 : k + 2]:
                end, return_to_go = position[k], 0.0
            elif end != NONE and self._gamma is not None:
                return_to_go = reward[k + 1] + self._gamma * discount[k + 1] * return_to_go
            slot = position[k] % self._length
            assert self._end[slot, column] == end, "the index has a wrong end of an episode"
            if self._gamma is not None:
                kept = self._return_to_go[slot, column]
                assert np.isclose(kept, return_to_go, 1e-4, 1e-4, equal_nan=True), "a return does not match the rows"

    def _close(self, column: int, first: int, ends: np.ndarray) -> None:
        """Writes the ends and the returns of episodes to the rows from position `first` to the last end.

        Args:
          column: column of the episodes.
          first: position of the first row to write.
          ends: positions of the episodes' last rows, ascending.
        """
        position = np.arange(first, ends[-1] + 1)
        slot = position % self._length
        end = ends[np.searchsorted(ends, position)]
        self._end[slot, column] = end
        if self._gamma is None:
            return
        reward, discount = self._store.rewards(column, position)
        goes_on = position[:-1] < end[:-1]
        decay, increment = np.zeros(len(position)), np.zeros(len(position))
        decay[:-1] = np.where(goes_on, self._gamma * discount[1:].astype(np.float64), 0)
        increment[:-1] = np.where(goes_on, reward[1:], 0)
        self._return_to_go[slot, column] = reverse_scan(torch.from_numpy(decay), torch.from_numpy(increment)).numpy()
