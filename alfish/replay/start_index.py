"""Index of the rows that may start a window, and uniform draws of such rows."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from alfish import nest
from alfish.data import Batch, StepType, TimeStep, trainable
from alfish.errors import UsageError
from alfish.replay.row_store import RowStore, StoredRow, copy_entries
from alfish.replay.state_store import StateStore

MAX_ROUNDS = 1000  # maximum number of rounds of rejection sampling in one draw


class StartIndex:
    """Stores which rows may start a window.

    Windows start at rows that train (`data.trainable`); if states are stored, at rows with a state.

    Args:
      store: rows to index.
      states: store of the rows' states; None if no states are stored.
      num_ignored: number of oldest rows of a column at which no window may start, if earlier rows are missing.
    """

    def __init__(self, store: RowStore, states: StateStore | None = None, num_ignored: int = 0):
        self._store, self._states, self._num_ignored = store, states, num_ignored
        self._length, self._num_envs = store.length, store.num_envs
        # The index is on the host, because windows are drawn there. The newest row of a column is False, because it has
        # no successor.
        self._trains = np.zeros((store.length, store.num_envs), bool)
        self._newest = np.full(store.num_envs, StepType.PAD, np.int32)  # step type of the newest rows; PAD if none
        self._tickets = torch.empty(0, dtype=torch.int64)
        self._tickets_view = self._tickets.numpy()

    def after_newest(self, step_type: np.ndarray) -> np.ndarray:
        """Returns step types `[T + 1, B]`: the type of each column's newest row, followed by `step_type`, `[T, B]`."""
        return np.concatenate([self._newest[None], step_type])

    def push(self, columns: slice, position: int, step_type: np.ndarray, is_quiet: bool = False) -> None:
        """Indexes new rows, and the row before the new rows, which now has a successor.

        Args:
          columns: indices of the columns, C of them.
          position: position of the first new row, the same in all C columns.
          step_type: step types `[T + 1, C]` of the previous row and of T new rows.
          is_quiet: whether all step types are MID.
        """
        first, num_rows = (position - 1) % self._length, len(step_type) - 1
        at: Any = slice(first, first + num_rows)
        if first + num_rows >= self._length:
            at = np.arange(first, first + num_rows) % self._length
        self._trains[at, columns] = True if is_quiet else trainable(step_type)
        self._trains[(first + num_rows) % self._length, columns] = False  # the newest row has no successor yet
        self._newest[columns] = step_type[-1]

    def start_range(self, window_length: int, newest: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Returns the ranges from which windows' first rows are drawn; some rows are then refused, see `may_start`.

        Args:
          window_length: number of rows of a window, L.
          newest: number of newest rows of each column to draw from; None means all rows.

        Returns:
          The first position of each column's range and the number of positions in it, `[B]` int64 each.
        """
        end, rows = self._store.end, self._store.rows
        low = oldest = self._store.oldest()
        if self._num_ignored and rows is not None:
            misses = oldest > 0  # whether rows before the oldest stored row are missing
            # If a resumed run has lost its rows, its first new row may be within an episode.
            misses = misses | (rows.step_type[: self._num_envs] != StepType.FIRST).cpu().numpy()
            low = oldest + np.where(misses, self._num_ignored, 0)
        if newest is not None:
            low = np.maximum(low, end - newest)
        return low, np.maximum(end - (window_length - 1) - low, 0)

    def num_trainable(self) -> int:
        """Returns the number of rows that train."""
        return int(self._trains.sum())

    def may_start(self, column: np.ndarray, position: np.ndarray) -> np.ndarray:
        """Returns whether the stored rows at `position` (`[N]`) of `column` (`[N]`) may start a window, `[N]` bool."""
        if self._states is not None:
            return self._states.has(column, position)
        row = position % self._length
        return self._trains.take(row if self._num_envs == 1 else row * self._num_envs + column)

    def draw(self, num_windows: int, low: np.ndarray, count: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        """Draws rows that may start a window uniformly, with replacement.

        Uses rejection sampling: draws rows of the ranges, and draws again for each row that may not start a window. If
        states are stored, draws stretches of `state_period` positions instead of rows.

        Args:
          num_windows: number of windows, N.
          low: first position of each column's range, `[B]` int64.
          count: number of positions in each range, `[B]` int64.

        Returns:
          Columns and positions, `[N]` int64 each; None if no row of the ranges may start a window.

        Raises:
          UsageError: too few rows may start a window.
        """
        lowest, end = low, low + count
        if self._states is not None:
            period = self._states.period
            low = lowest // period
            count = np.where(count > 0, (end - 1) // period - low + 1, 0)
        ends = count if self._num_envs == 1 else np.cumsum(count)
        total = int(ends[-1])
        if total == 0:
            return None
        columns, positions, missing = [], [], num_windows
        for _ in range(MAX_ROUNDS):
            ticket = self._draw_tickets(missing + missing // 8 + 4, total)
            if self._num_envs == 1:
                column, at = np.zeros(len(ticket), np.int64), ticket + low
            else:
                column = np.searchsorted(ends, ticket, side="right")
                at = ticket + (low - ends + count)[column]
            if self._states is None:
                fits = self.may_start(column, at)
            else:
                at = self._states.position(column, at)
                fits = (at >= lowest[column]) & (at < end[column])
            chosen = fits.nonzero()[0][:missing]
            columns.append(column[chosen])
            positions.append(at[chosen])
            missing -= len(chosen)
            if missing == 0:
                break
            if len(chosen) == 0 and not self.has_any(lowest, end - lowest):
                return None
        else:
            raise UsageError(
                "windows can start at almost no row of the replay; check that episodes have at least one action"
            )
        if len(columns) == 1:
            return columns[0], positions[0]
        return np.concatenate(columns), np.concatenate(positions)

    def has_any(self, low: np.ndarray, count: np.ndarray) -> bool:
        """Returns whether any row of the ranges may start a window; arguments as in `draw`."""
        return bool(self.may_start(*rows_between(low, low + count)).any())

    def clear(self) -> None:
        """Removes all rows."""
        self._trains[:] = False
        self._newest[:] = StepType.PAD

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"startable": torch.from_numpy(self._trains.copy())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores `state`; the rows must be loaded first."""
        self.clear()
        copy_entries(state["startable"], torch.from_numpy(self._trains), self._store.oldest(), self._store.end)
        self._newest[:] = self._newest_step_types()

    def check_valid(self) -> None:
        """Raises AssertionError if the index does not agree with the rows."""
        trains = np.zeros_like(self._trains)
        for column, (oldest, step_type) in enumerate(self._store.step_types()):
            if len(step_type) > 1:
                at = np.arange(oldest, oldest + len(step_type)) % self._length
                trains[at[:-1], column] = trainable(step_type)
        assert (trains == self._trains).all(), "the mask of rows that may start a window is outdated"
        assert (self._newest == self._newest_step_types()).all(), "the step type of a newest row is outdated"

    def _newest_step_types(self) -> list[int]:
        return [kinds[-1] if len(kinds) else StepType.PAD for _, kinds in self._store.step_types()]

    def _draw_tickets(self, count: int, total: int) -> np.ndarray:
        """Returns `count` random integers in [0, total) from torch's global generator.

        The trainer seeds and saves torch's generator. The next call overwrites the returned array.
        """
        if len(self._tickets_view) != count:
            self._tickets = torch.empty(count, dtype=torch.int64)  # allocating takes longer than drawing
            self._tickets_view = self._tickets.numpy()
        self._tickets.random_(total)
        return self._tickets_view


def rows_between(low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns columns and positions, `[N]` int64 each, of all rows in `[low, high)`, column by column."""
    count = np.maximum(high - low, 0)
    column = np.repeat(np.arange(len(low)), count)
    return column, np.arange(len(column)) + np.repeat(low - (np.cumsum(count) - count), count)


class SequenceIndex(NamedTuple):
    """First rows of N windows."""

    column: torch.Tensor  # [N] int64
    position: torch.Tensor  # [N] int64
    weight: torch.Tensor | None = None  # [N] float32, importance weights; None if all are 1


class RingView(NamedTuple):
    """View of a ring's stored rows, from which a compiled graph gathers windows. The rows change with the ring."""

    rows: StoredRow  # leaves [length * B, ...], row (position % length) * B + column
    env_id: torch.Tensor  # [B]
    offset: torch.Tensor  # [L, 1] int64, 0 to L - 1: positions relative to a window's first row
    transforms: Callable[[TimeStep], TimeStep] | None = None  # function of windows `[L, N]`; None means no transforms

    def windows(self, start: SequenceIndex) -> Batch:
        """Returns the transformed windows that begin at `start`, see `RingBuffer.windows`."""
        num_envs = len(self.env_id)
        length = len(self.rows.step_type) // num_envs
        index = (start.position + self.offset) % length * num_envs + start.column
        env_id = self.env_id[start.column]
        experience = nest.at(self.rows, index).experience(env_id.expand_as(index))
        if self.transforms is not None:
            experience = experience._replace(time_step=self.transforms(experience.time_step))
        mask = trainable(experience.time_step.step_type)
        return Batch(experience, mask, env_id, start.position, start.weight)
