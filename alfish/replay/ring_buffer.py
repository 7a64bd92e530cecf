"""A ring of rows for each environment, sampled as windows.

A row's position grows forever; where it lies, `position % length`, is `RowStore`'s business. Each column is one
environment, so a window of consecutive positions is what that environment did. A window may start at a row that trains
(`data.trainable`), may end anywhere among the column's rows, and never mixes its newest with its oldest.

For policies with memory, the state of a push's row 0 is stored too, once in `state_period` positions of a column.
Windows then start at rows that have one, whether these train or not.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from alfish.data import Batch, Experience, StepType, trainable
from alfish.errors import UsageError
from alfish.nest import Nest
from alfish.replay.episode_index import EpisodeIndex
from alfish.replay.row_store import RowStore
from alfish.replay.sequence_index import RingView, SequenceIndex
from alfish.replay.start_index import StartIndex
from alfish.replay.state_store import StateStore


class RingBuffer:
    """Keeps the newest rows of B environments.

    Args:
      capacity: rows of all columns together; each column keeps `capacity // num_envs`.
      num_envs: B.
      device: where rows are kept, and windows come out.
      directory: keep the rows in memory-mapped files there instead, on the CPU; no other ring may be using it.
      num_ignored: how many of a column's oldest rows no window may start at, once older ones were overwritten or where
        the first row began no episode: as many as a frame stack looks back.
      state_period: keep the state of the first push that begins in each stretch of so many positions, and start windows
        there; None: keep no states.
      keeps_episodes: know where each row's episode begins and ends.
      return_gamma: discount per environment step, in [0, 1], of the `return_to_go` that rows then come with, which also
        keeps episodes; None: keep no returns. Rewards must be scalar.

    Attributes:
      length: rows that a column can keep.
      num_envs: B.
      device: where rows are kept, and windows come out.
    """

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
                f"a replay of {capacity} rows keeps {length} for each of {num_envs} environments, too few for a "
                "window; raise its capacity"
            )
        self._store = RowStore(length, num_envs, device, directory)
        self.length, self.num_envs, self.device = length, num_envs, self._store.device
        self._states = None if state_period is None else StateStore(self._store, state_period)
        self._starts = StartIndex(self._store, self._states, num_ignored)
        self._episodes: EpisodeIndex | None = None
        if keeps_episodes or return_gamma is not None:
            self._episodes = EpisodeIndex(self._store, return_gamma)

    @property
    def keeps_episodes(self) -> bool:
        return self._episodes is not None

    @property
    def state_period(self) -> int | None:
        """Positions of a stretch, which keeps one state; None: no states are kept."""
        return None if self._states is None else self._states.period

    @property
    def num_rows(self) -> int:
        """Rows of all columns at present."""
        return int(self._store.sizes().sum())

    @property
    def num_pushed(self) -> int:
        """Rows ever pushed."""
        return int(self._store.end.sum())

    def push(self, experience: Experience) -> None:
        """Appends rows to every column. PAD rows, at the end of an uneven column, are left out.

        Args:
          experience: leaves `[T, B, ...]`, arrays or tensors; `policy_version` is not kept, `state` once in
            `state_period`.
        """
        store = self._store
        rows, step_type = store.accept(experience)
        if self._episodes is not None:
            self._episodes.check_rewards(rows.reward.shape[2:])
        kinds = self._starts.after_newest(step_type)
        is_quiet = bool((kinds == StepType.MID).all())  # nothing begins or ends: the common case
        if not is_quiet:
            rows = store.end_broken_episodes(rows, kinds)
        if self._states is not None:
            self._states.push(experience.state, step_type[0] != StepType.PAD)
        position = store.end.copy()
        if store.is_level and (is_quiet or (step_type != StepType.PAD).all()):
            store.append(rows)
            self._index(slice(None), int(position[0]), kinds, is_quiet)
            return
        real = step_type != StepType.PAD
        store.append_some(rows, real)
        for b in range(self.num_envs):
            own = kinds[np.concatenate([[True], real[:, b]]), b]
            if len(own) > 1:
                self._index(slice(b, b + 1), int(position[b]), own[:, None])

    def num_starts(self) -> int:
        """How many rows may start a window of length 2."""
        return self._starts.num_trainable()

    def sample(self, num_windows: int, window_length: int = 2) -> Batch:
        """Windows that start uniformly at any row that may start one, or that has a state, with replacement.

        Args:
          num_windows: N.
          window_length: L, rows.

        Returns:
          Batch of `[L, N]` rows; the mask has L - 1 rows, and without states is true in its first.

        Raises:
          UsageError: no row can start such a window yet.
        """
        column, position = self._draw(num_windows, window_length)
        return self._windows(column, position, window_length)

    def draw(self, num_windows: int, window_length: int = 2, newest: int | None = None) -> SequenceIndex:
        """The starts of `sample`.

        Args:
          num_windows: N.
          window_length: L, rows.
          newest: start among so many newest rows of each column, at least L, unless no window may start at any of
            these; None: among all.
        """
        column, position = map(torch.from_numpy, self._draw(num_windows, window_length, newest))
        if self.device.type != "cpu":  # else it would be for nothing, and take as long as drawing some
            column, position = column.to(self.device), position.to(self.device)
        return SequenceIndex(column, position)

    def windows(self, start: SequenceIndex, window_length: int) -> Batch:
        """The rows of windows that start there, and the weights of these."""
        batch = self._windows(start.column.cpu().numpy(), start.position.cpu().numpy(), window_length)
        return batch._replace(weight=start.weight)

    def in_place(self, window_length: int) -> RingView | None:
        """The rows themselves, for windows of so many.

        None where windows are more than rows that lie there: before the first push, on a GPU, with states or returns.
        """
        rows, keeps_returns = self._store.rows, self._episodes is not None and self._episodes.keeps_returns
        if rows is None or self.device.type != "cpu" or self._states is not None or keeps_returns:
            return None
        return RingView(rows, torch.from_numpy(self._store.env_id), torch.arange(window_length).unsqueeze(1))

    def start_range(self, window_length: int, newest: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Where windows may start as far as the rows around them are concerned; `may_start` has the last word.

        Args:
          window_length: L, rows.
          newest: only among so many newest rows of each column; None: among all.

        Returns:
          `[B]` int64 each: per column, the first position that a window may start at, and how many there are from it
          on. Once a column has rows, neither end of its range goes back, at `clear` neither.
        """
        return self._starts.start_range(window_length, newest)

    def may_start(self, column: np.ndarray, position: np.ndarray) -> np.ndarray:
        """`[N]` bool: whether these rows, which must still be there, may start a window; see `StartIndex`."""
        return self._starts.may_start(column, position)

    def read(self, column: torch.Tensor, position: torch.Tensor) -> Experience:
        """The rows at these positions (`[L, N]`) of these columns (`[N]`), which must still be there."""
        return self._read(column.cpu().numpy(), position.cpu().numpy())

    def step_type(self, column: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """`[K, N]` of the rows at `position` (`[K, N]`) of `column` (`[N]`)."""
        return self._store.step_type(column, position)

    def observation(self, column: torch.Tensor, position: torch.Tensor, key: str | None = None) -> Nest:
        """Leaves `[K, N, ...]` of the rows at `position` (`[K, N]`) of `column` (`[N]`); of a dict, those at `key`."""
        return self._store.observation(column, position, key)

    def episode_start(self, column: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Position of the oldest row that is left of each row's episode; otherwise as `episode_end`."""
        return self._ask(self._known_episodes().start, column, position)

    def episode_end(self, column: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Position of the last row of each row's episode; of one that goes on, the newest row of its column.

        Args:
          column: `[N]` int64.
          position: `[N]` or `[L, N]` int64, of rows that are there.

        Returns:
          int64, like `position`.

        Raises:
          UsageError: the ring keeps no episodes.
        """
        return self._ask(self._known_episodes().end, column, position)

    def return_to_go(self, column: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Discounted sum of the rewards from each row to the end of its episode; see `EpisodeIndex`.

        Args and raises: as `episode_end`.

        Returns:
          float32, like `position`; nan where the episode goes on.
        """
        return self._ask(self._known_episodes().return_to_go, column, position)

    def oldest_position(self, column: torch.Tensor) -> torch.Tensor:
        """`[N]` the position of each column's oldest row."""
        return torch.from_numpy(self._store.oldest()).to(self.device)[column]

    def newest_position(self, column: torch.Tensor) -> torch.Tensor:
        """`[N]` the position of each column's newest row."""
        return torch.from_numpy(self._store.end - 1).to(self.device)[column]

    def clear(self) -> None:
        """Forgets all rows; positions go on."""
        for part in self._parts():
            part.clear()

    def close(self) -> None:
        """Leaves its directory to other rings; nothing may be pushed after that."""
        self._store.close()

    def state_dict(self) -> dict[str, Any]:
        """Everything, the rows that are filled included; these share the ring's memory, so save before pushing on."""
        states = {} if self._states is None else self._states.state_dict()
        return {**self._store.state_dict(), **self._starts.state_dict(), "state_period": self.state_period, **states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from `state`.

        Raises:
          UsageError: it was saved with another capacity, number of environments or state period.
          ValueError: its counts do not agree with its rows.
        """
        self._store.check_fits(state)
        if state.get("state_period") != self.state_period:
            raise UsageError(
                f"the saved replay has a state every {state.get('state_period')} rows, this one every "
                f"{self.state_period}; keep ReplayBatches.state_period, and the memory"
            )
        self.clear()
        self._store.load_state_dict(state)
        self._starts.load_state_dict(state)
        if self._states is not None:
            self._states.load_state_dict(state)
        if self._episodes is not None:
            self._episodes.rebuild()

    def check_valid(self) -> None:
        """Raises AssertionError where a part does not agree with the rows."""
        for part in self._parts():
            part.check_valid()

    def _draw(self, num_windows: int, window_length: int, newest: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Columns and positions, `[N]` int64 both, of windows that start among the newest rows, or else at any."""
        low, count = self.start_range(window_length, newest)
        drawn = self._starts.draw(num_windows, low, count)
        if drawn is not None:
            return drawn
        if newest is not None:
            return self._draw(num_windows, window_length)
        if count.any():
            raise UsageError("the replay holds no row to start from: its episodes may all have length 0")
        raise no_window(window_length)

    def _windows(self, column: np.ndarray, position: np.ndarray, window_length: int) -> Batch:
        experience = self._read(column, position + np.arange(window_length)[:, None])
        if self._states is not None:
            experience = experience._replace(state=self._states.take(column, position))
        mask = trainable(experience.time_step.step_type.cpu().numpy())
        return Batch(
            experience,
            torch.from_numpy(mask).to(self.device),
            experience.time_step.env_id[0],
            torch.from_numpy(position).to(self.device),
        )

    def _read(self, column: np.ndarray, position: np.ndarray) -> Experience:
        env_id = torch.from_numpy(np.tile(self._store.env_id[column], (len(position), 1))).to(self.device)
        experience = self._store.take(column, position).experience(env_id)
        if self._episodes is not None and self._episodes.keeps_returns:
            return_to_go = torch.from_numpy(self._episodes.return_to_go(column, position)).to(self.device)
            experience = experience._replace(return_to_go=return_to_go)
        return experience

    def _index(self, columns: slice, position: int, kinds: np.ndarray, is_quiet: bool = False) -> None:
        """Tells the indices of rows that were appended from `position` on; `kinds` begins with the row before."""
        self._starts.push(columns, position, kinds, is_quiet)
        if self._episodes is not None:
            self._episodes.push(columns, position, kinds[1:])

    def _parts(self) -> "list[RowStore | StartIndex | StateStore | EpisodeIndex]":
        return [part for part in (self._store, self._starts, self._states, self._episodes) if part is not None]

    def _known_episodes(self) -> EpisodeIndex:
        if self._episodes is None:
            raise UsageError("this replay does not know its episodes; make it with keeps_episodes = True")
        return self._episodes

    def _ask(self, function: Callable[..., np.ndarray], column: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Calls a function of arrays with tensors."""
        return torch.from_numpy(function(column.cpu().numpy(), position.cpu().numpy())).to(self.device)


def no_window(window_length: int) -> UsageError:
    """What to raise where nothing can be drawn yet."""
    return UsageError(f"the replay has no window of {window_length} rows yet; collect more before training")
