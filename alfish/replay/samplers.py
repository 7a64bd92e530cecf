"""Samplers of windows: uniform, or in passes that draw each window once. `prioritized` has a third sampler.

The ring does not notify its samplers of changes. A sampler finds new and overwritten rows by comparing the ring's
positions with those at the sampler's last draw.
"""

import abc
from typing import Any, ClassVar

import gin
import numpy as np
import torch

from alfish.errors import UsageError
from alfish.parameters import PositiveInt, UnitInterval, checked
from alfish.processes import replicas
from alfish.replay.ring_buffer import RingBuffer, no_window
from alfish.replay.start_index import SequenceIndex, rows_between


class Sampler(abc.ABC):
    """Draws windows from one ring. `bind` sets the ring, and is called only once.

    The sampler's state refers to the ring's rows: save both or neither, and load the rows first.

    Attributes:
      uses_priorities: whether `update` must be called with the priorities of trained windows.
      needs_starts: whether the ring must know on the host which rows may start a window.
      buffer, window_length: the arguments of `bind`.
    """

    uses_priorities: ClassVar[bool] = False
    needs_starts: ClassVar[bool] = True
    buffer: RingBuffer
    window_length: int

    def bind(self, buffer: RingBuffer, window_length: int) -> None:
        """Sets the ring to draw from.

        Args:
          buffer: ring to draw from.
          window_length: number of rows of every window, L.

        Raises:
          UsageError: the sampler is bound already, or needs a ring that knows which rows may start a window.
        """
        name = type(self).__name__
        if self.needs_starts and not buffer.knows_starts:
            raise UsageError(
                f"{name} reads which rows may start a window, which {type(buffer).__name__} does not know; use the "
                "sampler Uniform, or leave ReplayBatches.buffer out"
            )
        if hasattr(self, "buffer"):
            raise UsageError(f"{name} is already used by a replay; make another {name} for this replay")
        self.buffer, self.window_length = buffer, window_length

    @abc.abstractmethod
    def draw(self, num_windows: int, progress: float, num_batches: int = 1) -> SequenceIndex:
        """Draws windows.

        Args:
          num_windows: total number of windows of all minibatches, N.
          progress: progress of the run, in [0, 1].
          num_batches: number of minibatches into which the windows are split, in order.

        Returns:
          First rows of the windows, `[N]` each, on the host. Each minibatch has the same distribution as the whole
          draw.

        Raises:
          UsageError: no row may start a window yet.
        """

    def update(self, window: SequenceIndex, priority: torch.Tensor) -> None:
        """Sets the priorities of windows that this sampler drew.

        Args:
          window: windows `[N]`, on any device.
          priority: priorities `[N]`, finite and at least 0, on any device.

        Raises:
          TypeError: the sampler does not use priorities.
        """
        raise TypeError(f"{type(self).__name__} does not use priorities; see Sampler.uses_priorities")

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Returns all state that later draws depend on. Default: none."""
        return {}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Restores `state`; the ring's rows must be loaded first. Default: nothing to restore."""

    def check_valid(self) -> None:
        """Raises AssertionError if the state is inconsistent or does not agree with the ring. Default: no check."""


def check_drawn(start: Any, num_windows: int, buffer: RingBuffer, window_length: int, name: str) -> None:
    """Checks what the `draw` of a user's sampler has returned.

    Args:
      start: result of `draw`.
      num_windows: number of windows that were asked for, N.
      buffer: ring of the windows.
      window_length: number of rows of a window, L.
      name: name of the method in messages, such as 'MySampler.draw'.

    Raises:
      UsageError: the result is not a `SequenceIndex` of N windows, or a window cannot start at its row.
    """
    if not isinstance(start, SequenceIndex):
        raise UsageError(f"{name} returned a {type(start).__name__}; it must return a SequenceIndex")
    for field, dtype in (("column", torch.int64), ("position", torch.int64), ("weight", torch.float32)):
        value = getattr(start, field)
        if value is None and field == "weight":
            continue
        found = (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else type(value).__name__
        if found != ((num_windows,), dtype):
            raise UsageError(
                f"{name} returned {found} as {field}; it must be a tensor of shape ({num_windows},) and dtype {dtype}"
            )
    column, position = (value.cpu().numpy() for value in (start.column, start.position))
    low, count = buffer.start_range(window_length)
    fits = (column >= 0) & (column < len(low))
    if fits.all():
        fits = (position >= low[column]) & (position < (low + count)[column])
    if fits.all() and buffer.knows_starts:
        fits = buffer.may_start(column, position)
    if not fits.all():
        wrong = int(np.flatnonzero(~fits)[0])
        raise UsageError(
            f"{name} returned position {position[wrong]} of column {column[wrong]}, where no window of {window_length} "
            "rows may start; see RingBuffer.start_range and RingBuffer.may_start"
        )


@gin.configurable(module="alfish.replay")
@checked
class Uniform(Sampler):
    """Draws windows uniformly with replacement; optionally, a fraction from the newest rows only.

    Args:
      recent_fraction: fraction of the windows, in [0, 1], that start among the newest rows. Over any part of a run, the
        number of such windows is exact to within one. These windows are drawn from all rows if none of the newest rows
        may start a window, and in an `OfflineBuffer`, which has no newest rows.
      recent_rows: number of rows that count as the newest, in total over all environments, with equal shares. None is
        allowed only if `recent_fraction` is 0.
    """

    needs_starts = False

    def __init__(self, recent_fraction: UnitInterval = 0.0, recent_rows: PositiveInt | None = None):
        if recent_fraction > 0 and recent_rows is None:
            raise UsageError(
                f"Uniform.recent_fraction is {recent_fraction}, so set Uniform.recent_rows to the number of newest rows"
            )
        self._recent_fraction, self._recent_rows = recent_fraction, recent_rows
        self._num_drawn = 0  # number of windows drawn so far

    def bind(self, buffer: RingBuffer, window_length: int) -> None:
        super().bind(buffer, window_length)
        if not buffer.has_newest:
            self._recent_fraction = 0.0
        if self._recent_fraction == 0:
            return
        assert self._recent_rows is not None
        num_envs = buffer.num_envs * replicas.size()
        self._newest = self._recent_rows // num_envs
        # Two consecutive states may be almost two state periods apart.
        needed = window_length + 2 * (buffer.state_period or 0)
        if self._newest < needed:
            raise UsageError(
                f"Uniform.recent_rows is {self._recent_rows}, which means {self._newest} rows of each of {num_envs} "
                f"environments, but windows need {needed} rows; raise recent_rows to {needed * num_envs}"
            )

    def draw(self, num_windows: int, progress: float, num_batches: int = 1) -> SequenceIndex:
        if self._recent_fraction == 0:
            return self.buffer.draw(num_windows, self.window_length)
        # Window k of the run is recent if floor(fraction * (k + 1)) > floor(fraction * k).
        due = np.floor(self._recent_fraction * np.arange(self._num_drawn, self._num_drawn + num_windows + 1) + 1e-9)
        recent = torch.from_numpy(np.diff(due) > 0)
        column, position = (torch.empty(num_windows, dtype=torch.int64) for _ in range(2))
        for chosen, newest in ((recent, self._newest), (~recent, None)):
            count = int(chosen.sum())
            if count:
                column[chosen], position[chosen], _ = self.buffer.draw(count, self.window_length, newest)
        self._num_drawn += num_windows
        return SequenceIndex(column, position)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"num_drawn": torch.tensor(self._num_drawn)}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self._num_drawn = int(state["num_drawn"])


@gin.configurable(module="alfish.replay")
@checked
class Epochs(Sampler):
    """Draws every window once per pass, in random order, for example for imitation.

    A pass consists of the rows that may start a window when the pass begins. It skips rows that are overwritten before
    they are drawn. Rows that are added during the pass belong to the next pass. A draw that reaches the end of a pass
    continues in the next pass.
    """

    def bind(self, buffer: RingBuffer, window_length: int) -> None:
        super().bind(buffer, window_length)
        self._column = self._position = np.zeros(0, np.int64)  # remaining windows of the pass

    def draw(self, num_windows: int, progress: float, num_batches: int = 1) -> SequenceIndex:
        low, count = self.buffer.start_range(self.window_length)
        columns, positions, missing = [], [], num_windows
        while missing:
            if not len(self._column):
                self._begin(low, low + count)
            column, position = self._column[:missing], self._position[:missing]
            self._column, self._position = self._column[missing:], self._position[missing:]
            there = position >= low[column]
            columns.append(column[there])
            positions.append(position[there])
            missing -= len(columns[-1])
        start = np.concatenate(columns), np.concatenate(positions)
        return SequenceIndex(*map(torch.from_numpy, start))

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"column": torch.from_numpy(self._column.copy()), "position": torch.from_numpy(self._position.copy())}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Restores `state`; the ring's rows must be loaded first.

        Raises:
          UsageError: the ring lacks the rows of the state.
        """
        column, position = state["column"].numpy().copy(), state["position"].numpy().copy()
        high = np.zeros(max(self.buffer.num_envs, column.max(initial=-1) + 1), np.int64)
        np.maximum.at(high, column, position + 1)
        check_held(self.buffer, self.window_length, high)
        self._column, self._position = column, position

    def check_valid(self) -> None:
        low, count = self.buffer.start_range(self.window_length)
        there = self._position >= low[self._column]
        column, position = self._column[there], self._position[there]
        assert (position < (low + count)[column]).all() and self.buffer.may_start(column, position).all()
        assert len(set(zip(column.tolist(), position.tolist()))) == len(column), "a window is drawn twice in one pass"

    def _begin(self, low: np.ndarray, high: np.ndarray) -> None:
        """Begins a pass over the rows that may start a window now."""
        column, position = rows_between(low, high)
        may_start = np.flatnonzero(self.buffer.may_start(column, position))
        if not len(may_start):
            raise no_window(self.window_length)
        order = may_start[torch.randperm(len(may_start)).numpy()]
        self._column, self._position = column[order], position[order]


def check_held(buffer: RingBuffer, window_length: int, high: np.ndarray) -> None:
    """Raises UsageError if a saved sampler refers to rows below `high` (`[B]`) that a ring does not hold yet."""
    low, count = buffer.start_range(window_length)
    if len(high) != len(low) or (high > low + count).any():
        raise UsageError(
            "the saved state of the sampler refers to rows that this replay does not hold; first load the rows that "
            "were saved with it, or load neither"
        )
