"""A ring for environments that reset in the same step. Shapes are fixed, and the host does not wait for a GPU.

Columns contain only the rows from which the policy acted, so all columns have the same positions. LAST rows are stored
in a separate ring and numbered; a row that follows a LAST row stores the number of that LAST row. So rows are appended
by the same operations, however many episodes end. A window is gathered from the position of its first row only.
"""

import collections
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import gin
import numpy as np
import torch
from absl import logging

from alfish import host, nest
from alfish.data import Batch, Experience, StepType, TimeStep, trainable
from alfish.errors import UsageError
from alfish.parameters import NonNegativeInt, PositiveInt, Rate, UnitInterval, checked
from alfish.replay.ring_buffer import RingBuffer
from alfish.replay.row_store import RowStore, StoredRow, copy_entries
from alfish.replay.start_index import SequenceIndex, StartIndex

NONE, LOST = -1, -2  # in place of the number of a LAST row: no LAST row precedes, or it was overwritten


@gin.configurable(module="alfish.replay")
@checked
class AlignedRingBuffer(RingBuffer):
    """Stores the newest rows of B environments that reset in the same step.

    Only rows from which the policy acted have positions. Windows also contain LAST rows, so they have the same rows as
    windows of a `RingBuffer`. A window may start at any position, and the mask shows which of its rows train.

    Args:
      capacity, num_envs, device, num_ignored, state_period: settings of `RingBuffer`.
      end_fraction: number of stored LAST rows as a fraction of `capacity`, in (0, 1]; at least `num_envs` are stored.
        If the stored rows have more ends, the oldest LAST rows are lost, the rows before them do not train, and a
        warning is logged.
      directory, keeps_episodes, return_gamma: settings of `RingBuffer` that must have their defaults, because they
        require the step types on the host.

    Raises:
      UsageError: the capacity is too small, or a setting requires the step types on the host.
    """

    knows_starts = False

    def __init__(
        self,
        capacity: PositiveInt,
        num_envs: PositiveInt,
        device: torch.device | str = "cpu",
        directory: str | Path | None = None,
        num_ignored: NonNegativeInt = 0,
        state_period: PositiveInt | None = None,
        keeps_episodes: bool = False,
        return_gamma: UnitInterval | None = None,
        end_fraction: Rate = 1 / 16,
    ):
        self._end_fraction = end_fraction
        settings = {
            "ReplayBatches.directory": directory is not None,
            "HindsightReplay": keeps_episodes,
            "returns of whole episodes": return_gamma is not None,
        }
        for name, is_set in settings.items():
            if is_set:
                raise UsageError(
                    f"AlignedRingBuffer does not support {name}, because it has no step types on the host; leave "
                    "ReplayBatches.buffer out"
                )
        super().__init__(capacity, num_envs, device, None, num_ignored, state_period)
        self._end_before = torch.full((self.length, num_envs), NONE, device=self.device)
        self._num_ends = torch.zeros((), dtype=torch.int64, device=self.device)
        # (position of the next row, number of LAST rows so far) after each recent push; see `_warn_of_lost_ends`.
        self._history: collections.deque[tuple[int, int]] = collections.deque()
        self._newest: tuple[int, Callable[[], np.ndarray]] | None = None
        self._has_warned = False

    def _make_store(self, device: torch.device | str, directory: str | Path | None) -> RowStore:
        self._num_last = max(int(self.length * self.num_envs * self._end_fraction), self.num_envs)
        # The last extra row receives the entries of `last_rows` that are not LAST rows.
        return RowStore(self.length, self.num_envs, device, directory, num_extra=self._num_last + 1)

    def _make_starts(self, num_ignored: int) -> StartIndex:
        return AllRows(self._store, self._states, num_ignored)

    def check_unrolls(self, unroll_length: int, uneven: bool) -> None:
        if not uneven:
            raise UsageError(
                "AlignedRingBuffer stores rows of environments that reset in the same step, such as simulators and "
                "functional environments, but these environments make one row in each step; leave ReplayBatches.buffer "
                "out"
            )

    def push(self, experience: Experience) -> None:
        """Appends rows to every column.

        Args:
          experience: rows `[T, B, ...]` with `ends`, arrays or tensors, without PAD rows; see `RingBuffer.push`.

        Raises:
          UsageError: the rows have no `ends`, or do not fit, see `RowStore.prepare`; on a CPU, also if a row is PAD.
        """
        self.check_unrolls(len(experience.time_step.step_type), experience.ends is not None)
        store = self._store
        rows = nest.tensors(StoredRow.of(experience), self.device)
        ended, last = nest.tensors(experience.ends, self.device)
        last_rows = nest.tensors(StoredRow.of(experience._replace(time_step=last)), self.device)
        if self.device.type == "cpu" and (rows.step_type == StepType.PAD).any():
            raise UsageError(
                "AlignedRingBuffer requires equally many rows of all environments, but some rows are missing; leave "
                "ReplayBatches.buffer out"
            )
        store.prepare(rows)
        if not store.knows_env_ids:
            store.learn_env_ids(np.ones(self.num_envs, bool), nest.as_array(experience.time_step.env_id[0]))
        if not store.end[0]:
            self._note_beginning(rows.step_type[0])
        if self._states is not None:
            self._states.push(experience.state, np.ones(self.num_envs, bool))
        step_type = self._without_breaks(rows.step_type, ended)
        rows = rows._replace(step_type=step_type)
        step = self._num_last // self.num_envs  # `_append` must not overwrite a LAST row of the same call
        for first in range(0, len(ended), step):
            piece = slice(first, first + step)
            self._append(*nest.at((rows, ended, last_rows), piece))
        if not self._has_warned:
            self._warn_of_lost_ends()

    def _note_beginning(self, step_type: torch.Tensor) -> None:
        """Stores whether columns begin with FIRST rows; has no effect if position 0 was overwritten.

        Args:
          step_type: step types `[B]` at index 0 of the ring.
        """
        assert isinstance(self._starts, AllRows)
        self._starts.begins_with_episodes = bool((step_type == StepType.FIRST).all())

    def _warn_of_lost_ends(self) -> None:
        """Logs a warning once if LAST rows of stored episodes were overwritten.

        Reads the number of LAST rows after the previous push, because reading the current number would wait for a GPU.
        """
        before, self._newest = self._newest, (int(self._store.end[0]), host.read_later(self._num_ends))
        if before is None:
            return
        end, num_ends = before[0], int(before[1]())
        self._history.append((end, num_ends))
        while self._history[0][0] < end - self.length:
            self._history.popleft()
        if (found := num_ends - self._history[0][1]) > self._num_last:
            self._has_warned = True
            logging.warning(
                "The %d rows of replay have %d episode ends, but AlignedRingBuffer stores %d LAST rows; rows before "
                "lost LAST rows do not train. Raise AlignedRingBuffer.end_fraction",
                self.num_rows,
                found,
                self._num_last,
            )

    def _without_breaks(self, step_type: torch.Tensor, ended: torch.Tensor) -> torch.Tensor:
        """Returns step types `[T, B]` in which a MID row before a FIRST row is LAST, because its episode broke off.

        The newest stored row is changed in place by the same rule. Discounts do not change.
        """
        broken = (step_type[:-1] == StepType.MID) & (step_type[1:] == StepType.FIRST) & ~ended[:-1]
        end = int(self._store.end[0])
        if end > self._store.start[0]:
            assert self._store.rows is not None
            first = (end - 1) % self.length * self.num_envs
            newest = self._store.rows.step_type[first : first + self.num_envs]
            goes_on = self._end_before[end % self.length] == NONE
            is_broken = (newest == StepType.MID) & (step_type[0] == StepType.FIRST) & goes_on
            newest.masked_fill_(is_broken, StepType.LAST)
        return torch.cat([step_type[:-1].masked_fill(broken, StepType.LAST), step_type[-1:]])

    def _append(self, rows: StoredRow, ended: torch.Tensor, last_rows: StoredRow) -> None:
        """Appends rows `[T, B, ...]`; `last_rows` are LAST rows where `ended` `[T, B]` is True."""
        store, num_ends = self._store, ended.long().flatten().cumsum(0)
        number = torch.where(ended, (self._num_ends + num_ends - 1).view_as(ended), NONE)
        begin = store.append(rows)
        place = torch.where(ended, number % self._num_last, self._num_last).flatten() + self.length * self.num_envs
        assert store.rows is not None
        for stored, leaf in zip(nest.leaves(store.rows), nest.leaves(last_rows), strict=True):
            stored.index_copy_(0, place, leaf.flatten(0, 1))
        # The number of a LAST row is stored at the next row's position, even if that row does not exist yet.
        at = (begin + 1) % self.length
        room = self.length - at
        self._end_before[at : at + len(number)] = number[:room]
        self._end_before[: max(0, len(number) - room)] = number[room:]
        self._num_ends += num_ends[-1]

    def in_place(self, window_length: int) -> "AlignedView | None":  # type: ignore[override]
        return None if self._states is not None else self._view(window_length)

    def stream(self, column: int) -> Experience:
        """Returns all rows of a column, including LAST rows, as `[T, 1, ...]`.

        If a LAST row was overwritten, the MID row before it becomes LAST and keeps its discount of 1.
        """
        oldest, end = int(self._store.oldest()[column]), int(self._store.end[column])
        view = self._view(end - oldest + 1)  # + 1, because a LAST row may follow the newest row
        assert view is not None
        start = SequenceIndex(torch.tensor([column]), torch.tensor([oldest]))
        source = view.sources(nest.to(start, self.device), 2 * (end - oldest))
        num_rows = end - oldest + int((view.ends(start) != NONE).sum())
        experience = nest.at(view.read(source, start.column), slice(num_rows))
        time_step = experience.time_step
        step_type = time_step.step_type.clone()
        is_lost = step_type == StepType.PAD
        step_type[:-1][is_lost[1:] & (step_type[:-1] == StepType.MID)] = StepType.LAST
        whole = experience._replace(time_step=time_step._replace(step_type=step_type))
        return nest.at(whole._replace(policy_version=None), ~is_lost[:, 0])  # type: ignore[arg-type]

    def state_dict(self) -> dict[str, Any]:
        first, count = self.length * self.num_envs, min(self._num_last, int(self._num_ends))
        last = nest.map(lambda leaf: leaf[first : first + count].clone(), self._store.rows)
        ends = {"end_before": self._end_before, "num_ends": self._num_ends, "last": nest.plain(last)}
        return {**super().state_dict(), **ends}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "end_before" not in state:
            raise UsageError(
                "the saved replay is a RingBuffer; leave ReplayBatches.buffer out, or move the run's directory replay/ "
                "away to collect rows again"
            )
        super().load_state_dict(state)
        self._num_ends.copy_(state["num_ends"])
        oldest, end = self._store.oldest(), self._store.end
        copy_entries(state["end_before"], self._end_before, oldest + 1, end + 1)
        if state["rows"] is None:
            return
        assert self._store.rows is not None
        self._note_beginning(self._store.rows.step_type[: self.num_envs])
        count, num_ends = self.length * self.num_envs, np.array([int(state["num_ends"])])
        for stored, leaf in zip(nest.leaves(self._store.rows), nest.leaves(state["last"]), strict=True):
            kept = np.maximum(num_ends - min(len(leaf), self._num_last), 0)
            target = stored[count : count + self._num_last]
            copy_entries(leaf.unsqueeze(1), target.unsqueeze(1), kept, num_ends)
        # If the saved store was smaller, it may lack LAST rows that this store would have kept.
        if (missing := int(num_ends[0]) - len(nest.leaves(state["last"])[0])) > 0:
            self._end_before[(self._end_before >= 0) & (self._end_before < missing)] = LOST

    def check_valid(self) -> None:
        super().check_valid()
        assert self._store.is_level, "the columns have different positions"
        assert (self._end_before < self._num_ends).all(), "a row refers to a LAST row that does not exist yet"
        for column, (oldest, step_type) in enumerate(self._store.step_types()):
            at = np.arange(oldest, oldest + len(step_type)) % self.length
            ends = self._end_before[at, column].cpu().numpy() != NONE
            assert (step_type[1:][ends[1:]] == StepType.FIRST).all(), "an episode goes on after its LAST row"

    def _view(self, window_length: int) -> "AlignedView | None":
        store = self._store
        if store.rows is None:
            return None
        offset = torch.arange(window_length, device=self.device).unsqueeze(1)
        return AlignedView(store.rows, store.tensor(store.env_id), offset, self._end_before, self._num_ends)

    def _windows(self, column: np.ndarray, position: np.ndarray, window_length: int) -> Batch:
        view = self._view(window_length)
        assert view is not None
        batch = view.windows(SequenceIndex(self._store.tensor(column), self._store.tensor(position)))
        if self._states is None:
            return batch
        experience = batch.experience._replace(state=self._states.take(column, position))
        return batch._replace(experience=experience)


class AlignedView(NamedTuple):
    """View of the stored rows, from which a compiled graph gathers windows. The rows change with the ring."""

    rows: StoredRow  # leaves [length * B + K + 1, ...]: rows, K LAST rows, and an unused row
    env_id: torch.Tensor  # [B]
    offset: torch.Tensor  # [L, 1] int64, 0 to L - 1: positions relative to a window's first row
    end_before: torch.Tensor  # [length, B] int64, number of the LAST row directly before each row, or NONE
    num_ends: torch.Tensor  # 0-d int64, number that the next LAST row gets
    transforms: Callable[[TimeStep], TimeStep] | None = None  # function of windows `[L, N]`; None means no transforms

    def windows(self, start: SequenceIndex) -> Batch:
        """Returns the transformed windows that begin at `start`; see `RingBuffer.windows`."""
        experience = self.read(self.sources(start, len(self.offset)), start.column)
        if self.transforms is not None:
            experience = experience._replace(time_step=self.transforms(experience.time_step))
        mask = trainable(experience.time_step.step_type)
        return Batch(experience, mask, self.env_id[start.column], start.position, start.weight)

    def ends(self, start: SequenceIndex) -> torch.Tensor:
        """Returns, for each row of windows, the number of the LAST row directly before it in the window, or NONE."""
        at = (start.position + self.offset) % len(self.end_before)
        return torch.where(self.offset > 0, self.end_before[at, start.column], NONE)

    def sources(self, start: SequenceIndex, num_rows: int) -> torch.Tensor:
        """Returns the indices in `rows` of each window's rows, LAST rows included, cut after `num_rows` rows.

        Returns:
          Indices `[num_rows, N]`; -1 for a LAST row that was overwritten, and at the end of shorter windows.
        """
        length, num_envs = self.end_before.shape
        number_of_last = len(self.rows.step_type) - length * num_envs - 1
        number = self.ends(start)
        follows_end = number != NONE
        is_kept = number >= (self.num_ends - number_of_last).clamp(min=0)
        last = torch.where(is_kept, length * num_envs + number % number_of_last, -1)
        row = (start.position + self.offset) % length * num_envs + start.column
        place = self.offset + follows_end.long().cumsum(0)
        # Indices beyond the window's end are written to an additional row, which is cut off.
        found = torch.full_like(row[:1], -1).repeat(num_rows + 1, 1)
        found = found.scatter(0, place.clamp(max=num_rows), row)
        found = found.scatter(0, torch.where(follows_end, place - 1, num_rows).clamp(max=num_rows), last)
        return found[:num_rows]

    def read(self, source: torch.Tensor, column: torch.Tensor) -> Experience:
        """Returns the rows at `source` `[T, N]` of the columns `[N]`; PAD where the index is -1."""
        index = source.clamp(min=0).flatten()

        def taken(leaf: torch.Tensor) -> torch.Tensor:
            return leaf.index_select(0, index).view(*source.shape, *leaf.shape[1:])  # faster than `leaf[source]`

        experience = nest.map(taken, self.rows).experience(self.env_id[column].expand_as(source))
        step_type = torch.where(source < 0, StepType.PAD, experience.time_step.step_type)
        return experience._replace(time_step=experience.time_step._replace(step_type=step_type))


class AllRows(StartIndex):
    """Draws windows from all rows that have enough later rows; if states are stored, from rows with a state.

    Args:
      store, states, num_ignored: see `StartIndex`. All columns of the store have the same positions.

    Attributes:
      begins_with_episodes: whether the rows at position 0 are FIRST.
    """

    begins_with_episodes = False

    def __init__(self, store: RowStore, states: Any, num_ignored: int):
        self._store, self._states, self._num_ignored = store, states, num_ignored
        self._num_envs = store.num_envs
        self._tickets = torch.empty(0, dtype=torch.int64)
        self._tickets_view = self._tickets.numpy()

    def start_range(self, window_length: int, newest: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        end, low = self._store.end, self._store.oldest()
        if low[0] or not self.begins_with_episodes:
            low = low + self._num_ignored
        if newest is not None:
            low = np.maximum(low, end - newest)
        return low, np.maximum(end - (window_length - 1) - low, 0)

    def num_trainable(self) -> int:
        return int(np.maximum(self._store.sizes() - 1, 0).sum())

    def may_start(self, column: np.ndarray, position: np.ndarray) -> np.ndarray:
        return np.ones(len(position), bool) if self._states is None else self._states.has(column, position)

    def draw(self, num_windows: int, low: np.ndarray, count: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        if self._states is not None:
            return super().draw(num_windows, low, count)
        if count[0] == 0:
            return None
        ticket = self._draw_tickets(num_windows, int(count[0]) * self._num_envs)
        return ticket % self._num_envs, low[0] + ticket // self._num_envs

    def clear(self) -> None:
        pass

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass

    def check_valid(self) -> None:
        pass
