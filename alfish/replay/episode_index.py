"""Which episode each row of a ring belongs to: where it begins and ends, and what it still earns.

Where an episode ends is known when it does, and is then written to all of its rows that are left. A row ends its
episode where it is LAST, or where a FIRST row follows it: the episode broke off.
"""

from collections.abc import Callable

import numpy as np
import torch

from alfish.data import StepType
from alfish.errors import UsageError
from alfish.returns import reverse_scan

# Rewards and discounts, `[n]` each, of the rows stored at positions (`[n]`) of a column.
StepRecords = Callable[[int, np.ndarray], tuple[np.ndarray, np.ndarray]]

NONE = -1  # no position: an episode that has not ended, a column in which none goes on


class EpisodeBook:
    """Keeps episodes by position, in a ring of `length` rows a column. What it is asked for must be in the ring.

    A row is written once when it is stored, and once when its episode ends, in arrays: a row's share of the work does
    not grow with the episode, but for the return, which `reverse_scan` solves in log2(rows) passes.

    Args:
      length: rows a column.
      num_envs: columns.
      gamma: discount per environment step of the returns, in [0, 1]; None: keep none.
    """

    def __init__(self, length: int, num_envs: int, gamma: float | None = None):
        if gamma is not None and not 0 <= gamma <= 1:
            raise UsageError(f"the return_gamma of a replay is {gamma}; a discount is in [0, 1]")
        self._length, self._gamma = length, gamma
        self._columns = np.arange(num_envs)
        # Pages that no row has touched cost no memory.
        self._start = np.empty((length, num_envs), np.int64)
        self._end = np.empty((length, num_envs), np.int64)
        self._return_to_go = np.empty((0 if gamma is None else length, num_envs), np.float32)
        self._under_way = np.full(num_envs, NONE)  # where the episode of each column's newest row began

    @property
    def keeps_returns(self) -> bool:
        return self._gamma is not None

    def push(self, columns: slice, pos: int, step_type: np.ndarray, arrivals: StepRecords) -> None:
        """Takes in the rows that follow the newest of some columns; they are in the ring already.

        Args:
          columns: C of them, all of which stand at `pos`.
          pos: position of the first row.
          step_type: `[T, C]`, no more rows than a column keeps, and none of them PAD.
          arrivals: reads the ring.
        """
        num_rows = len(step_type)
        position = np.arange(pos, pos + num_rows)
        slot, under_way = position % self._length, self._under_way[columns]
        is_last = step_type == StepType.LAST
        begins = step_type == StepType.FIRST  # [T, C]
        begins[0] |= under_way == NONE
        begins[1:] |= is_last[:-1]
        start = np.maximum.accumulate(np.where(begins, position[:, None], under_way))
        self._start[slot, columns], self._end[slot, columns] = start, NONE
        if self._gamma is not None:
            self._return_to_go[slot, columns] = np.nan
        # Row t - 1 ends where row t begins: from the row before these ones to the newest.
        ends = np.concatenate([begins, is_last[-1:]])  # [T + 1, C]
        ends[0] &= under_way != NONE
        oldest = pos + num_rows - self._length
        for c in np.flatnonzero(ends.any(0)):
            first = pos if under_way[c] == NONE else under_way[c]
            self._close(self._columns[columns][c], max(first, oldest), pos - 1 + np.flatnonzero(ends[:, c]), arrivals)
        self._under_way[columns] = np.where(is_last[-1], NONE, start[-1])

    def clear(self) -> None:
        """No episode goes on."""
        self._under_way[:] = NONE

    def start(self, column: np.ndarray, position: np.ndarray) -> np.ndarray:
        """Position of the first row of a row's episode, which may be overwritten by now, or was never there."""
        return self._start[position % self._length, column]

    def end(self, column: np.ndarray, position: np.ndarray) -> np.ndarray:
        """Position of the last row of a row's episode; NONE: it goes on."""
        return self._end[position % self._length, column]

    def return_to_go(self, column: np.ndarray, position: np.ndarray) -> np.ndarray:
        """float32 return from a row to the end of its episode; nan: it goes on."""
        return self._return_to_go[position % self._length, column]

    def check_valid(self, column: int, oldest: int, step_type: np.ndarray, arrivals: StepRecords) -> None:
        """Raises AssertionError where the books differ from the rows of a column, gone through one by one.

        Args:
          oldest: position of the column's oldest row.
          step_type: `[n]` of all of its rows.
        """
        position = np.arange(oldest, oldest + len(step_type))
        start, end, return_to_go = oldest, NONE, np.nan
        for k, here in enumerate(step_type):
            if here == StepType.FIRST or (k and step_type[k - 1] == StepType.LAST):
                start = position[k]
            assert max(self._start[position[k] % self._length, column], oldest) == start, "an episode begins elsewhere"
        under_way = self._under_way[column]
        if len(step_type) == 0 or step_type[-1] == StepType.LAST:
            assert under_way == NONE, "an episode goes on that has ended"
        else:
            assert under_way != NONE and max(under_way, oldest) == start, "the episode under way is another"
        reward, discount = arrivals(column, position)
        for k in reversed(range(len(step_type))):
            if step_type[k] == StepType.LAST or StepType.FIRST in step_type[k + 1 : k + 2]:
                end, return_to_go = position[k], 0.0
            elif end != NONE and self._gamma is not None:
                return_to_go = reward[k + 1] + self._gamma * discount[k + 1] * return_to_go
            slot = position[k] % self._length
            assert self._end[slot, column] == end, "an episode ends elsewhere"
            if self._gamma is not None:
                kept = self._return_to_go[slot, column]
                assert np.isclose(kept, return_to_go, 1e-4, 1e-4, equal_nan=True), "a return is not that of the rows"

    def _close(self, column: int, first: int, ends: np.ndarray, arrivals: StepRecords) -> None:
        """Writes to the rows from position `first` on, up to the last of `ends` (ascending), what ended there."""
        position = np.arange(first, ends[-1] + 1)
        slot = position % self._length
        end = ends[np.searchsorted(ends, position)]
        self._end[slot, column] = end
        if self._gamma is None:
            return
        reward, discount = arrivals(column, position)
        goes_on = position[:-1] < end[:-1]
        decay, increment = np.zeros(len(position)), np.zeros(len(position))
        decay[:-1] = np.where(goes_on, self._gamma * discount[1:].astype(np.float64), 0)
        increment[:-1] = np.where(goes_on, reward[1:], 0)
        self._return_to_go[slot, column] = reverse_scan(torch.from_numpy(decay), torch.from_numpy(increment)).numpy()
