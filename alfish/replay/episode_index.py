"""Which episode each row of a ring belongs to: where it begins and ends, and its return to go.

Where an episode ends is known when it does, and is then written to all of its rows that are left. A row ends its
episode where it is LAST, or where a FIRST row follows it: the episode broke off.
"""

import numpy as np
import torch

from alfish.data import StepType
from alfish.errors import UsageError
from alfish.replay.row_store import RowStore
from alfish.returns import reverse_scan

NONE = -1  # no position: an episode that has not ended, a column in which none is open


class EpisodeIndex:
    """Keeps the episode of each row, by position.

    The return to go of a row is

        G_t = r_{t+1} + gamma d_{t+1} G_{t+1},   with G = 0 at the episode's last row

    where d is the environment's discount. Of a truncated episode, and of one that broke off, it is the sum of what
    there was: nothing is bootstrapped.

    A row is written once when it is stored, and once when its episode ends, in arrays: the work for a row does not
    grow with the episode, except for the return, which `reverse_scan` solves in log2(rows) passes.

    Args:
      store: the rows.
      gamma: discount per environment step of the returns, in [0, 1]; None: store no returns.
    """

    def __init__(self, store: RowStore, gamma: float | None = None):
        if gamma is not None and not 0 <= gamma <= 1:
            raise UsageError(f"the return_gamma of a replay is {gamma}; a discount is in [0, 1]")
        self._store, self._gamma = store, gamma
        self._length, self._columns = store.length, np.arange(store.num_envs)
        # Pages that no row has touched cost no memory.
        self._start = np.empty((store.length, store.num_envs), np.int64)
        self._end = np.empty((store.length, store.num_envs), np.int64)
        self._return_to_go = np.empty((0 if gamma is None else store.length, store.num_envs), np.float32)
        self._open = np.full(store.num_envs, NONE)  # first position of the episode that each column's newest row is in

    @property
    def keeps_returns(self) -> bool:
        return self._gamma is not None

    def check_rewards(self, shape: tuple[int, ...]) -> None:
        """Checks the shape of a row's reward.

        Raises:
          UsageError: returns are stored, and the reward is a vector.
        """
        if self.keeps_returns and shape:
            raise UsageError(
                f"a replay with a return_gamma keeps returns of scalar rewards, and these are vectors of {shape[0]}; "
                "leave return_gamma out"
            )

    def push(self, columns: slice, position: int, step_type: np.ndarray) -> None:
        """Adds rows that follow the newest of some columns; the store has them already.

        Args:
          columns: C of them.
          position: of the first row, in all of these columns.
          step_type: `[T, C]`, no more rows than a column keeps, and none of them PAD.
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
        # Row t - 1 ends where row t begins: from the row before these ones to the newest.
        ends = np.concatenate([begins, is_last[-1:]])  # [T + 1, C]
        ends[0] &= open_since != NONE
        oldest = position + num_rows - self._length
        for c in np.flatnonzero(ends.any(0)):
            first = position if open_since[c] == NONE else open_since[c]
            self._close(self._columns[columns][c], max(first, oldest), position - 1 + np.flatnonzero(ends[:, c]))
        self._open[columns] = np.where(is_last[-1], NONE, start[-1])

    def rebuild(self) -> None:
        """Indexes all rows of the store, which were loaded."""
        self.clear()
        if self._store.rows is not None:
            self.check_rewards(self._store.rows.reward.shape[1:])
        for column, (oldest, step_type) in enumerate(self._store.step_types()):
            if len(step_type):
                self.push(slice(column, column + 1), oldest, step_type[:, None])

    def clear(self) -> None:
        """Forgets the open episodes."""
        self._open[:] = NONE

    def start(self, column: np.ndarray, position: np.ndarray) -> np.ndarray:
        """Returns the position of the oldest row that is left of a row's episode."""
        return np.maximum(self._start[position % self._length, column], self._store.oldest()[column])

    def end(self, column: np.ndarray, position: np.ndarray) -> np.ndarray:
        """Returns the position of the last row of a row's episode; of an open one, the column's newest row."""
        end = self._end[position % self._length, column]
        return np.where(end == NONE, self._store.end[column] - 1, end)

    def return_to_go(self, column: np.ndarray, position: np.ndarray) -> np.ndarray:
        """Returns float32 returns to go; nan where the episode is open.

        Raises:
          UsageError: none are stored.
        """
        if not self.keeps_returns:
            raise UsageError("this replay keeps no returns; give it a return_gamma")
        return self._return_to_go[position % self._length, column]

    def check_valid(self) -> None:
        """Raises AssertionError where the index does not agree with the rows, which are gone through one by one."""
        for column, (oldest, step_type) in enumerate(self._store.step_types()):
            self._check_column(column, oldest, step_type)

    def _check_column(self, column: int, oldest: int, step_type: np.ndarray) -> None:
        position = np.arange(oldest, oldest + len(step_type))
        start, end, return_to_go = oldest, NONE, np.nan
        for k, here in enumerate(step_type):
            if here == StepType.FIRST or (k and step_type[k - 1] == StepType.LAST):
                start = position[k]
            assert max(self._start[position[k] % self._length, column], oldest) == start, "an episode begins elsewhere"
        open_since = self._open[column]
        if len(step_type) == 0 or step_type[-1] == StepType.LAST:
            assert open_since == NONE, "an episode is open that has ended"
        else:
            assert open_since != NONE and max(open_since, oldest) == start, "the open episode is another"
        if len(step_type) == 0:
            return
        reward, discount = self._store.rewards(column, position)
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

    def _close(self, column: int, first: int, ends: np.ndarray) -> None:
        """Writes to the rows from position `first` on, up to the last of `ends` (ascending), what ended there."""
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
