"""A ring of rows for each environment, from which windows are sampled.

Each column is one environment. The position of a row is the number of earlier rows of its column, including overwritten
rows, so a window of consecutive positions holds consecutive steps of one environment. A window may start at any row
that trains (`data.trainable`), and may end at any row of the column. It never wraps from the newest to the oldest row.

For policies with memory, the ring also stores the policy's state at row 0 of a push, at most once in `state_period`
positions of a column. Windows then start at rows with a stored state, even if such a row does not train.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from alfish import host, nest
from alfish.data import Batch, Experience, StepType, trainable
from alfish.errors import UsageError
from alfish.nest import Nest
from alfish.replay.episode_index import EpisodeIndex
from alfish.replay.row_store import RowStore
from alfish.replay.start_index import RingView, SequenceIndex, StartIndex
from alfish.replay.state_store import StateStore


class RingBuffer:
    """Stores the newest rows of B environments.

    Args:
      capacity: number of rows in all columns; each column stores `capacity // num_envs`.
      num_envs: number of environments, B.
      device: device of the rows and of the windows.
      directory: directory for memory-mapped files that hold the rows of this ring only, on the CPU; None keeps the rows
        in memory.
      num_ignored: number of oldest rows of a column at which no window may start, such as the look-back of a frame
        stack. They are ignored only if earlier rows were overwritten, or if the column began within an episode.
      state_period: number of consecutive positions for which one state is stored: the state at the first push that
        begins within them. Windows start at rows with a state. None stores no states.
      keeps_episodes: whether the ring indexes the start and the end of each row's episode, for `HindsightReplay`.
      return_gamma: discount per environment step of `return_to_go`, in [0, 1]; requires scalar rewards, and also
        indexes episodes. None stores no returns.

    Attributes:
      length: maximum number of rows of a column.
      num_envs, device: the constructor's arguments.
    """

    has_newest = True  # rows are stored in the order of collection
    knows_starts = True  # the host knows which rows may start a window

    def __init__(
        self,
        capacity: int,
        num_envs: int,
        device: torch.device | str = "cpu",
        directory: str | Path | None = None,
        num_ignored: int = 0,
        state_period: int | None = None,
        keeps_episodes: bool = False,
        return_gamma: float | None = None,
    ):
        length = capacity // num_envs
        if length < 2 + num_ignored:
            raise UsageError(
                f"a replay of {capacity} rows keeps {length} rows for each of {num_envs} environments, too few for a "
                "window; raise its capacity"
            )
        self.length, self.num_envs = length, num_envs
        self._store = self._make_store(device, directory)
        self.device = self._store.device
        self._states = None if state_period is None else StateStore(self._store, state_period)
        self._starts = self._make_starts(num_ignored)
        keeps_episodes = keeps_episodes or return_gamma is not None
        self._episodes = EpisodeIndex(self._store, return_gamma) if keeps_episodes else None

    def _make_store(self, device: torch.device | str, directory: str | Path | None) -> RowStore:
        return RowStore(self.length, self.num_envs, device, directory)

    def _make_starts(self, num_ignored: int) -> StartIndex:
        return StartIndex(self._store, self._states, num_ignored)

    @property
    def keeps_episodes(self) -> bool:
        """True if episodes are indexed."""
        return self._episodes is not None

    @property
    def state_period(self) -> int | None:
        """Number of positions for which one state is stored; None without states."""
        return None if self._states is None else self._states.period

    @property
    def num_rows(self) -> int:
        """Number of stored rows in all columns."""
        return int(self._store.sizes().sum())

    @property
    def num_pushed(self) -> int:
        """Number of rows pushed so far."""
        return int(self._store.end.sum())

    def check_unrolls(self, unroll_length: int, uneven: bool) -> None:
        """Checks before training that every unroll can be pushed.

        Args:
          unroll_length: number of vector steps of an unroll.
          uneven: whether a step in which an episode ends makes two rows (`Environment.uneven`).

        Raises:
          UsageError: an unroll may have more rows than a column.
        """
        if uneven and 2 * unroll_length > self.length:
            raise UsageError(
                f"replay keeps {self.length} rows of each environment, but an unroll of {unroll_length} steps has up "
                f"to {2 * unroll_length}, because a step in which an episode ends makes two rows; raise "
                "ReplayBatches.capacity, or lower Trainer.unroll_length"
            )

    def push(self, experience: Experience) -> None:
        """Appends rows to every column, without the PAD rows at the end of shorter columns.

        Args:
          experience: rows `[T, B, ...]`, arrays or tensors; `policy_version` is not stored; `state` is stored at most
            once in `state_period` positions.

        Raises:
          UsageError: the rows do not fit, see `RowStore.accept`; or returns are stored and rewards are vectors.
        """
        store = self._store
        rows, step_type = store.accept(experience)
        if self._episodes is not None:
            self._episodes.check_rewards(rows.reward.shape[2:])
        kinds = self._starts.after_newest(step_type)
        is_quiet = bool((kinds == StepType.MID).all())  # the common case: no episode begins or ends
        if not is_quiet:
            rows = store.end_broken_episodes(rows, kinds)
        if self._states is not None:
            self._states.push(experience.state, step_type[0] != StepType.PAD)
        if store.is_level and (is_quiet or (step_type != StepType.PAD).all()):
            self._index(slice(None), store.append(rows), kinds, is_quiet)
            return
        position, real = store.end.copy(), step_type != StepType.PAD
        store.append_some(rows, real)
        for b in range(self.num_envs):
            own = kinds[np.concatenate([[True], real[:, b]]), b]
            if len(own) > 1:
                self._index(slice(b, b + 1), int(position[b]), own[:, None])

    def num_starts(self) -> int:
        """Returns the number of rows that may start a window of length 2, without regard to stored states."""
        return self._starts.num_trainable()

    def sample(self, num_windows: int, window_length: int = 2) -> Batch:
        """Samples windows uniformly, with replacement, from all windows that may be drawn.

        Args:
          num_windows: number of windows, N.
          window_length: number of rows of a window, L.

        Returns:
          Batch of `[L, N]` rows and a mask `[L-1, N]`. Without stored states, row 0 of the mask is True.

        Raises:
          UsageError: no row may start such a window yet, `num_windows` is below 1, or `window_length` is below 2.
        """
        if num_windows < 1 or window_length < 2:
            raise UsageError(
                f"sample was asked for {num_windows} windows of {window_length} rows; it needs at least 1 window of at "
                "least 2 rows"
            )
        column, position = self._draw(num_windows, window_length)
        return self._windows(column, position, window_length)

    def draw(self, num_windows: int, window_length: int = 2, newest: int | None = None) -> SequenceIndex:
        """Draws the first rows of windows uniformly, with replacement.

        Args:
          num_windows: number of windows, N.
          window_length: number of rows of a window, L.
          newest: number of newest rows of each column to draw from, at least L. If none of them may start a window,
            windows are drawn from all rows. None means all rows.

        Returns:
          Columns and positions of the windows' first rows, `[N]` each, on the host, for `windows`.
        """
        return SequenceIndex(*map(torch.from_numpy, self._draw(num_windows, window_length, newest)))

    def windows(self, start: SequenceIndex, window_length: int) -> Batch:
        """Returns the windows `[L, N]` that begin at `start`, which has their weights and should be on the host."""
        batch = self._windows(start.column.cpu().numpy(), start.position.cpu().numpy(), window_length)
        weight = start.weight
        return batch if weight is None else batch._replace(weight=nest.to(weight, self.device))

    def in_place(self, window_length: int) -> RingView | None:
        """Returns a view of the stored rows from which a compiled graph gathers windows of the given length.

        Returns None before the first push, on a GPU, and if windows have states or returns, which the view lacks.
        """
        rows, keeps_returns = self._store.rows, self._episodes is not None and self._episodes.keeps_returns
        if rows is None or self.device.type != "cpu" or self._states is not None or keeps_returns:
            return None
        return RingView(rows, torch.from_numpy(self._store.env_id), torch.arange(window_length).unsqueeze(1))

    def start_range(self, window_length: int, newest: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Returns the ranges from which windows' first rows are drawn; some rows are then refused, see `may_start`.

        Args:
          window_length: number of rows of a window, L.
          newest: number of newest rows of each column to draw from; None means all rows.

        Returns:
          The first position of each column's range and the number of positions in it, `[B]` int64 each. Once a column
          has rows, the bounds of its range never decrease, not even after `clear`.
        """
        return self._starts.start_range(window_length, newest)

    def may_start(self, column: np.ndarray, position: np.ndarray) -> np.ndarray:
        """Returns whether stored rows may start a window, `[N]` bool; see `StartIndex`."""
        return self._starts.may_start(column, position)

    def read(self, column: torch.Tensor, position: torch.Tensor) -> Experience:
        """Returns the stored rows at `position` (`[L, N]`) of `column` (`[N]`)."""
        return self._read(column.cpu().numpy(), position.cpu().numpy())

    def stream(self, column: int) -> Experience:
        """Returns all rows of a column, `[T, 1, ...]`."""
        position = np.arange(self._store.oldest()[column], self._store.end[column])
        return self._read(np.array([column]), position[:, None])

    def step_type(self, column: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Returns the step types of the rows at `position` (`[K, N]`) of `column` (`[N]`)."""
        return self._store.step_type(column, position)

    def observation(self, column: torch.Tensor, position: torch.Tensor, key: str | None = None) -> Nest:
        """Returns observations, leaves `[K, N, ...]`; with `key`, one part of a dict. Rows as in `step_type`."""
        return self._store.observation(column, position, key)

    def episode_start(self, column: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Returns the position of the oldest stored row of each row's episode; arguments as for `episode_end`."""
        return self._ask(self._known_episodes().start, column, position)

    def episode_end(self, column: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Returns the last position of each row's episode, or the column's newest position if the episode is open.

        Args:
          column: columns `[N]`, int64.
          position: positions `[N]` or `[L, N]` of stored rows, int64.

        Returns:
          int64, in the shape of `position`.

        Raises:
          UsageError: the ring does not index episodes.
        """
        return self._ask(self._known_episodes().end, column, position)

    def return_to_go(self, column: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Returns the discounted sum of rewards from each row to the end of its episode; see `EpisodeIndex`.

        Arguments are as for `episode_end`. The result is float32 in the shape of `position`, nan in open episodes.
        """
        return self._ask(self._known_episodes().return_to_go, column, position)

    def oldest_position(self, column: torch.Tensor) -> torch.Tensor:
        """Returns the position of each column's oldest row, `[N]`."""
        return self._store.tensor(self._store.oldest())[column]

    def newest_position(self, column: torch.Tensor) -> torch.Tensor:
        """Returns the position of each column's newest row, `[N]`."""
        return self._store.tensor(self._store.end - 1)[column]

    def clear(self) -> None:
        """Removes all rows. The next rows continue the count of positions."""
        for part in self._parts():
            part.clear()

    def close(self) -> None:
        """Unlocks the directory for other rings; afterwards, `push` must not be called."""
        self._store.close()

    def state_dict(self) -> dict[str, Any]:
        """Returns all state, including rows. The rows share the ring's memory: save them before the next push."""
        states = {} if self._states is None else self._states.state_dict()
        return {**self._store.state_dict(), **self._starts.state_dict(), "state_period": self.state_period, **states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores `state`. If the replay was saved with another capacity, restores as many of the newest rows as fit.

        Raises:
          UsageError: the state was saved with a different number of environments or state period.
          ValueError: the state's positions do not agree with its rows.
        """
        self._store.check_fits(state)
        if self.knows_starts and "startable" not in state:
            raise UsageError(
                "the saved replay is an AlignedRingBuffer; bind ReplayBatches.buffer = @AlignedRingBuffer, or move the "
                "run's directory replay/ away to collect rows again"
            )
        if state.get("state_period") != self.state_period:
            raise UsageError(
                f"the saved replay has state_period = {state.get('state_period')}, but this replay has state_period = "
                f"{self.state_period}; keep ReplayBatches.state_period, and the policy's memory"
            )
        self._store.load_state_dict(state)
        self._starts.load_state_dict(state)
        if self._states is not None:
            self._states.load_state_dict(state)
        if self._episodes is not None:
            self._episodes.rebuild()

    def check_valid(self) -> None:
        """Raises AssertionError if a part of the ring does not agree with the rows."""
        for part in self._parts():
            part.check_valid()

    def has_start(self, window_length: int) -> bool:
        """Returns whether any stored row may start a window; searches all rows."""
        return self._starts.has_any(*self.start_range(window_length))

    def _draw(self, num_windows: int, window_length: int, newest: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Draws columns and positions, `[N]` int64 each; from all rows if none of the newest may start a window."""
        low, count = self.start_range(window_length, newest)
        drawn = self._starts.draw(num_windows, low, count)
        if drawn is not None:
            return drawn
        if newest is not None:
            return self._draw(num_windows, window_length)
        error = UsageError("no window can start at any row of the replay; check that episodes have at least one action")
        raise error if count.any() else no_window(window_length)

    def _windows(self, column: np.ndarray, position: np.ndarray, window_length: int) -> Batch:
        experience = self._read(column, position + np.arange(window_length)[:, None])
        if self._states is not None:
            experience = experience._replace(state=self._states.take(column, position))
        kinds = experience.time_step.step_type
        mask = trainable(kinds.numpy() if self.device.type == "cpu" else kinds)  # numpy is faster
        return Batch(experience, nest.as_tensor(mask), experience.time_step.env_id[0], self._store.tensor(position))

    def _read(self, column: np.ndarray, position: np.ndarray) -> Experience:
        env_id = self._store.tensor(np.tile(self._store.env_id[column], (len(position), 1)))
        experience = self._store.take(column, position).experience(env_id)
        if self._episodes is not None and self._episodes.keeps_returns:
            return_to_go = self._store.tensor(self._episodes.return_to_go(column, position))
            experience = experience._replace(return_to_go=return_to_go)
        return experience

    def _index(self, columns: slice, position: int, kinds: np.ndarray, is_quiet: bool = False) -> None:
        """Indexes rows that were appended from `position` on; `kinds` is the `step_type` of `StartIndex.push`."""
        self._starts.push(columns, position, kinds, is_quiet)
        if self._episodes is not None:
            self._episodes.push(columns, position, kinds[1:])

    def _parts(self) -> "list[RowStore | StartIndex | StateStore | EpisodeIndex]":
        return [part for part in (self._store, self._starts, self._states, self._episodes) if part is not None]

    def _known_episodes(self) -> EpisodeIndex:
        if self._episodes is None:
            raise UsageError("this replay does not index episodes; construct it with keeps_episodes = True")
        return self._episodes

    def _ask(self, function: Callable[..., np.ndarray], column: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Calls a function of arrays with tensors; waits for the GPU if they are on a GPU."""
        return self._store.tensor(function(*host.read((column, position))))


def no_window(window_length: int) -> UsageError:
    """Returns the error for a replay from which no window can be drawn yet."""
    return UsageError(f"the replay has no window of {window_length} rows yet; collect more before training")
