"""A ring of rows for each environment, sampled as windows.

A row's position `pos` grows for ever; where it lies, `pos % length`, is nobody else's business. Each column is one
environment, so a window of consecutive positions is what that environment did. A window may start at a row that trains
(`data.trainable`), may end anywhere among the column's rows, and never mixes its newest with its oldest.

For policies with memory, the state of a push's row 0 is kept too, once in `state_period` positions of a column. Windows
then start at rows that have one, whether these train or not.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from alfish import nest
from alfish.data import Batch, Experience, StepType, TimeStep, trainable
from alfish.errors import UsageError, first_line
from alfish.nest import Nest
from alfish.replay.episode_index import NONE, EpisodeBook
from alfish.replay.sequence_index import RingView, SequenceIndex
from alfish.runs import files


class RingBuffer:
    """Keeps the newest rows of B environments.

    Laid out from the first rows pushed, whatever nest they are. `env_id` is kept once a column, `policy_version` not at
    all.

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
        self._length = capacity // num_envs
        if self._length < 2 + num_ignored:
            raise UsageError(
                f"a replay of {capacity} rows keeps {self._length} for each of {num_envs} environments, too few for a "
                "window; raise its capacity"
            )
        self.num_envs, self._num_ignored = num_envs, num_ignored
        self._device = torch.device("cpu" if directory else device)
        self._directory = None if directory is None else Path(directory)
        self._pos = np.zeros(num_envs, np.int64)  # of the next row of each column
        self._start = np.zeros(num_envs, np.int64)  # the first position since the last `clear`
        self._columns = np.arange(num_envs)
        self._drawn = torch.empty(0, dtype=torch.int64)  # see `_tickets`
        self._drawn_view = self._drawn.numpy()
        self._env_id = np.zeros(num_envs, np.int32)
        self._named = np.zeros(num_envs, bool)  # which columns' env_id is known
        self._all_named = False
        # Rows that may start a window as far as their successor is concerned; the last row of a column has none yet.
        # On the host, where windows are drawn.
        self._startable = np.zeros((self._length, num_envs), bool)
        self._newest = np.full(num_envs, StepType.PAD, np.int32)  # step type of each last row, PAD: none
        # As many stretches as the rows of a column can touch. Stretch k of a column is in slot k % number of slots.
        self._state_period, self._num_slots = state_period, -(-(self._length - 1) // (state_period or 1)) + 1
        self._state_position = np.full((self._num_slots if state_period else 0, num_envs), -1)  # -1: there is none
        self._states: Nest = None  # leaves [slots * B, ...], state slot * B + column
        self._book: EpisodeBook | None = None
        if keeps_episodes or return_gamma is not None:
            self._book = EpisodeBook(self._length, num_envs, return_gamma)
        self._knows_nests = False  # those of rows and states, which a checkpoint does not tell
        self._rows: Nest = None  # leaves [length * B, ...], row (pos % length) * B + column
        self._step_type: Any = None  # of `_rows`
        self._stores: list[Any] = []  # the leaves again, on a CPU as numpy views, which small reads and writes want
        self._unlock: Callable[[], Any] = lambda: None
        self._grids: list[Any] = []  # and again, as [length, B, ...]

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def length(self) -> int:
        """Rows a column can keep."""
        return self._length

    @property
    def keeps_episodes(self) -> bool:
        return self._book is not None

    @property
    def state_period(self) -> int | None:
        """Positions of a stretch, which keeps one state; None: no states are kept."""
        return self._state_period

    @property
    def num_rows(self) -> int:
        """Rows of all columns at present."""
        return int(self._sizes().sum())

    @property
    def num_pushed(self) -> int:
        """Rows ever pushed."""
        return int(self._pos.sum())

    def push(self, experience: Experience) -> None:
        """Appends rows to every column. PAD rows, at the end of a ragged column, are left out.

        Args:
          experience: leaves `[T, B, ...]`, arrays or tensors; `policy_version` is not kept, `state` once in
            `state_period`.
        """
        rows, step_type = _kept(experience), nest.as_array(experience.time_step.step_type)
        if self._device.type != "cpu" or step_type is not experience.time_step.step_type:
            rows = nest.tensors(rows, self._device)
        if not self._knows_nests:
            self._learn_nests(rows, experience.state)
        if len(step_type) > self._length:
            raise UsageError(
                f"an unroll of {len(step_type)} rows does not fit a replay of {self._length} rows an environment"
            )
        if not self._all_named:
            new = (step_type[0] != StepType.PAD) & ~self._named  # PAD stands at the end of a column, or fills it
            self._env_id[new] = nest.as_array(experience.time_step.env_id[0])[new]
            self._named |= new
            self._all_named = bool(self._named.all())
        kinds = np.concatenate([self._newest[None], step_type])
        is_quiet = bool((kinds == StepType.MID).all())  # nothing begins or ends: the common case
        if not is_quiet:
            rows, kinds = self._end_broken(rows, kinds)
        if self._state_period is not None:
            self._push_state(nest.tensors(experience.state, self._device), step_type[0] != StepType.PAD)
        level = self.num_envs == 1 or ((self._pos == self._pos[0]).all() and (self._start == self._start[0]).all())
        if level and (is_quiet or (step_type != StepType.PAD).all()):
            self._push_aligned(rows, kinds, is_quiet)
        else:
            self._push_ragged(rows, kinds, step_type != StepType.PAD)

    def num_starts(self) -> int:
        """How many rows may start a window of length 2."""
        return int(self._startable.sum())

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
        if self._device.type != "cpu":  # else it would be for nothing, and take as long as drawing some
            column, position = column.to(self._device), position.to(self._device)
        return SequenceIndex(column, position)

    def windows(self, start: SequenceIndex, window_length: int) -> Batch:
        """The rows of windows that start there, and the weights of these."""
        batch = self._windows(start.column.cpu().numpy(), start.position.cpu().numpy(), window_length)
        return batch._replace(weight=start.weight)

    def in_place(self, window_length: int) -> RingView | None:
        """The rows themselves, for windows of so many.

        None where windows are more than rows that lie there: before the first push, on a GPU, with states or returns.
        """
        keeps_returns = self._book is not None and self._book.keeps_returns
        if self._rows is None or self._device.type != "cpu" or self._state_period is not None or keeps_returns:
            return None
        return RingView(self._rows, torch.from_numpy(self._env_id), torch.arange(window_length).unsqueeze(1))

    def start_range(self, window_length: int, newest: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Where windows may start as far as the rows around them are concerned; `may_start` has the last word.

        Args:
          window_length: L, rows.
          newest: only among so many newest rows of each column; None: among all.

        Returns:
          `[B]` int64 each: per column, the first position that a window may start at, and how many there are from it
          on. Once a column has rows, neither end of its range goes back, at `clear` neither.
        """
        sizes = self._sizes()
        oldest = self._pos - sizes
        low = oldest
        if self._num_ignored and self._rows is not None:
            misses = oldest > 0  # rows before the oldest one
            # A resumed run whose rows were not saved may begin within an episode.
            misses = misses | (self._step_type[: self.num_envs] != StepType.FIRST).cpu().numpy()
            low = oldest + np.where(misses, self._num_ignored, 0)
        if newest is not None:
            low = np.maximum(low, self._pos - newest)
        return low, np.maximum(self._pos - (window_length - 1) - low, 0)

    def may_start(self, column: np.ndarray, position: np.ndarray) -> np.ndarray:
        """`[N]` bool: whether the rows at these positions of these columns (`[N]` int64 both), which must still be
        there, may start a window: they train or, in a ring that keeps states, have one."""
        if self._state_period is not None:
            return self._state_position[position // self._state_period % self._num_slots, column] == position
        row = position % self._length
        return self._startable.take(row if self.num_envs == 1 else row * self.num_envs + column)

    def read(self, column: torch.Tensor, position: torch.Tensor) -> Experience:
        """The rows at these positions (`[L, N]`) of these columns (`[N]`), which must still be there."""
        return self._read(column.cpu().numpy(), position.cpu().numpy())

    def step_type(self, column: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """`[K, N]` of the rows at `position` (`[K, N]`) of `column` (`[N]`)."""
        return self._step_type[(position % self._length) * self.num_envs + column]

    def observation(self, column: torch.Tensor, position: torch.Tensor, key: str | None = None) -> Nest:
        """Leaves `[K, N, ...]` of the rows at `position` (`[K, N]`) of `column` (`[N]`); of a dict, those at `key`."""
        index = (position % self._length) * self.num_envs + column
        return nest.map(lambda leaf: leaf[index], self._rows[3] if key is None else self._rows[3][key])

    def episode_start(self, column: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Position of the oldest row that is left of each row's episode.

        Args and raises: as `episode_end`.

        Returns:
          int64, like `position`.
        """
        book, c, at = self._asked(column, position)
        return torch.from_numpy(np.maximum(book.start(c, at), (self._pos - self._sizes())[c])).to(self._device)

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
        book, c, at = self._asked(column, position)
        end = book.end(c, at)
        return torch.from_numpy(np.where(end == NONE, self._pos[c] - 1, end)).to(self._device)

    def return_to_go(self, column: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """What follows each row up to the end of its episode.

            G_t = r_{t+1} + gamma d_{t+1} G_{t+1},   with G = 0 at the episode's last row

        where d is the environment's discount. Of a truncated episode, and of one that broke off, it is the sum of what
        there was: nothing is bootstrapped.

        Args: as `episode_end`.

        Returns:
          float32, like `position`; nan where the episode goes on.

        Raises:
          UsageError: the ring keeps no returns.
        """
        book, c, at = self._asked(column, position)
        if not book.keeps_returns:
            raise UsageError("this replay keeps no returns; give it a return_gamma")
        return torch.from_numpy(book.return_to_go(c, at)).to(self._device)

    def oldest_position(self, column: torch.Tensor) -> torch.Tensor:
        """`[N]` the position of each column's oldest row."""
        return torch.from_numpy(self._pos - self._sizes()).to(self._device)[column]

    def newest_position(self, column: torch.Tensor) -> torch.Tensor:
        """`[N]` the position of each column's newest row."""
        return torch.from_numpy(self._pos - 1).to(self._device)[column]

    def clear(self) -> None:
        """Forgets all rows; positions go on."""
        self._start = self._pos.copy()
        self._startable[:] = False
        self._state_position[:] = -1
        self._newest[:] = StepType.PAD
        if self._book is not None:
            self._book.clear()

    def close(self) -> None:
        """Leaves its directory to other rings; nothing may be pushed after that."""
        self._unlock()

    def state_dict(self) -> dict[str, Any]:
        """Everything, the rows that are filled included; these share the ring's memory, so save before pushing on."""
        filled = int(min(self._pos.max(), self._length)) * self.num_envs
        return {
            "pos": torch.from_numpy(self._pos.copy()),
            "start": torch.from_numpy(self._start.copy()),
            "length": self._length,
            "env_id": torch.from_numpy(self._env_id.copy()),
            "startable": torch.from_numpy(self._startable.copy()),
            "rows": nest.plain(nest.map(lambda leaf: _head(leaf, filled), self._rows)),
            "state_period": self._state_period,
            "state_position": torch.from_numpy(self._state_position.copy()),
            "states": nest.plain(self._states),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from `state`.

        Raises:
          UsageError: it was saved with another capacity, number of environments or state period.
          ValueError: its counts do not agree with its rows.
        """
        if state["length"] != self._length or len(state["pos"]) != self.num_envs:
            raise UsageError(
                f"the saved replay has {len(state['pos'])} columns of {state['length']} rows, this one {self.num_envs} "
                f"of {self._length}; keep the capacity and the number of environments"
            )
        if state.get("state_period") != self._state_period:
            raise UsageError(
                f"the saved replay has a state every {state.get('state_period')} rows, this one every "
                f"{self._state_period}; keep ReplayBatches.state_period, and the memory"
            )
        pos, start = state["pos"], state["start"]
        filled = int(pos.clamp(max=self._length).max()) * self.num_envs
        saved = nest.leaves(state["rows"])
        if (start < 0).any() or (start > pos).any() or any(len(leaf) != filled for leaf in saved):
            raise ValueError(f"positions {start.tolist()} to {pos.tolist()} of {[len(leaf) for leaf in saved]} rows")
        self.clear()
        self._pos, self._start = state["pos"].numpy().copy(), state["start"].numpy().copy()
        self._env_id[:] = state["env_id"].numpy()
        self._named, self._all_named = self._pos > 0, False
        self._startable[:] = state["startable"].numpy()
        if state["rows"] is None:
            return
        if self._state_period is not None:
            self._state_position[:] = state["state_position"].numpy()
            self._states = nest.map(lambda leaf: leaf.to(self._device).clone(), state["states"])
        if self._rows is None:
            self._lay_out(state["rows"])
        for leaf, saved in zip(nest.leaves(self._rows), nest.leaves(state["rows"]), strict=True):
            leaf[: len(saved)] = saved.to(self._device)
        newest = self._step_type.cpu().numpy().reshape(self._length, -1)[(self._pos - 1) % self._length, self._columns]
        self._newest = np.where(self._sizes() > 0, newest, StepType.PAD).astype(np.int32)
        if self._book is not None:  # which the rows tell anew
            for column, (oldest, step_type) in enumerate(self._stored_step_types()):
                if len(step_type):
                    self._book.push(slice(column, column + 1), oldest, step_type[:, None], self._arrivals)

    def check_valid(self) -> None:
        """Raises AssertionError where the books do not agree with the rows."""
        sizes = self._sizes()
        assert (sizes >= 0).all() and (sizes <= self._length).all()
        if self._rows is None:
            assert not self._pos.any() and not self._startable.any()
            return
        startable = np.zeros_like(self._startable)
        for column, (oldest, step_type) in enumerate(self._stored_step_types()):
            if len(step_type) > 1:
                at = np.arange(oldest, oldest + len(step_type)) % self._length
                startable[at[:-1], column] = trainable(step_type)
            if self._book is not None:
                self._book.check_valid(column, oldest, step_type, self._arrivals)
        assert (startable == self._startable).all(), "a row's right to start a window is out of date"
        slot, owner = np.nonzero(self._state_position >= 0)
        position = self._state_position[slot, owner]
        assert (position < self._pos[owner]).all() and (position >= self._start[owner]).all()
        assert (position // (self._state_period or 1) % self._num_slots == slot).all(), "a state is in another's slot"

    def _draw(self, num_windows: int, window_length: int, newest: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Columns and positions by rejection: drawn uniformly from all rows, and again where one may not start.

        With states, from all stretches of a column that may have one.
        """
        low, count = self.start_range(window_length, newest)
        lowest, end = low, low + count
        if self._state_period is not None:
            low = lowest // self._state_period
            count = np.where(count > 0, (end - 1) // self._state_period - low + 1, 0)
        ends = count if self.num_envs == 1 else np.cumsum(count)
        total = int(ends[-1])
        if total <= 0:
            raise no_window(window_length)
        columns, positions, missing = [], [], num_windows
        for _ in range(1000):
            ticket = self._tickets(missing + missing // 8 + 4, total)
            if self.num_envs == 1:
                drawn, at = np.zeros(len(ticket), np.int64), ticket + low
            else:
                drawn = np.searchsorted(ends, ticket, side="right")
                at = ticket + (low - ends + count)[drawn]
            if self._state_period is None:
                fits = self.may_start(drawn, at)
            else:
                at = self._state_position[at % self._num_slots, drawn]
                fits = (at >= lowest[drawn]) & (at < end[drawn])
            chosen = fits.nonzero()[0][:missing]
            columns.append(drawn[chosen])
            positions.append(at[chosen])
            missing -= len(chosen)
            if missing == 0:
                break
            if newest is not None and not fits.any() and not self._holds_start(lowest, end):
                return self._draw(num_windows, window_length)
        else:
            raise UsageError("the replay holds hardly a row to start from: its episodes may all have length 0")
        column, position = (parts[0] if len(parts) == 1 else np.concatenate(parts) for parts in (columns, positions))
        return column, position

    def _tickets(self, count: int, total: int) -> np.ndarray:
        """So many of the numbers below the total, in memory of the next call's; by torch's generator, which the trainer
        seeds and saves."""
        if len(self._drawn_view) != count:
            self._drawn = torch.empty(count, dtype=torch.int64)  # a new one takes longer than the numbers
            self._drawn_view = self._drawn.numpy()
        self._drawn.random_(total)
        return self._drawn_view

    def _holds_start(self, low: np.ndarray, high: np.ndarray) -> bool:
        """Whether a window may start at any position of `[low, high)` (`[B]` both)."""
        return bool(self.may_start(*rows_between(low, high)).any())

    def _windows(self, column: np.ndarray, position: np.ndarray, window_length: int) -> Batch:
        experience = self._read(column, position + np.arange(window_length)[:, None])
        if self._state_period is not None:
            slot = position // self._state_period % self._num_slots
            assert (self._state_position[slot, column] == position).all(), "a window starts where no state is kept"
            index = torch.from_numpy(slot * self.num_envs + column).to(self._device)
            experience = experience._replace(state=nest.at(self._states, index))
        mask = trainable(experience.time_step.step_type.cpu().numpy())
        return Batch(
            experience,
            torch.from_numpy(mask).to(self._device),
            experience.time_step.env_id[0],
            torch.from_numpy(position).to(self._device),
        )

    def _read(self, column: np.ndarray, position: np.ndarray) -> Experience:
        index = (position % self._length) * self.num_envs + column
        step_type, reward, discount, observation, prev_action, action, info = self._take(index)
        env_id = torch.from_numpy(np.tile(self._env_id[column], (len(index), 1))).to(self._device)
        time_step = TimeStep(step_type, reward, discount, observation, prev_action, env_id)
        experience = Experience(time_step, action, info, None, None)
        if self._book is not None and self._book.keeps_returns:
            return_to_go = torch.from_numpy(self._book.return_to_go(column, position)).to(self._device)
            experience = experience._replace(return_to_go=return_to_go)
        return experience

    def _learn_nests(self, rows: Nest, state: Nest) -> None:
        """Makes room for such rows; or gives loaded ones back the NamedTuples that they were saved without."""
        self._knows_nests = True
        if self._rows is None:
            self._lay_out(nest.map(lambda leaf: nest.as_tensor(leaf[0]), rows))
            return
        self._rows = nest.like(rows, self._rows)
        if self._states is not None:
            self._states = nest.like(state, self._states)

    def _lay_out(self, row: Nest) -> None:
        """Makes room for rows like this one, leaves `[B, ...]`."""
        if self._book is not None and self._book.keeps_returns and row[1].ndim > 1:
            raise UsageError(
                f"a replay with a return_gamma keeps returns of scalar rewards, and these are vectors of "
                f"{row[1].shape[1]}; leave return_gamma out"
            )
        count = self._length * self.num_envs
        number = iter(range(1_000))
        if self._directory is not None:
            self._directory.mkdir(parents=True, exist_ok=True)
            unlock = files.lock(self._directory, self)
            if unlock is None:
                raise UsageError(
                    f"another replay keeps its rows in {self._directory}, and this one would overwrite them; give each "
                    "run a directory of its own"
                )
            self._unlock = unlock

        def allocate(leaf: torch.Tensor) -> torch.Tensor:
            if self._directory is None:
                # Untouched pages cost no memory: a large replay grows as it fills.
                try:
                    return torch.empty(count, *leaf.shape[1:], dtype=leaf.dtype, device=self._device)
                except RuntimeError as error:  # torch's word for no memory
                    raise UsageError(
                        f"the capacity of replay is {count:,} rows, more than there is memory for "
                        f"({first_line(error)}); lower it, or keep rows in files (ReplayBatches.directory)"
                    ) from error
            dtype = torch.empty(0, dtype=leaf.dtype).numpy().dtype
            path = self._directory / f"leaf-{next(number):03d}.bin"
            return torch.from_numpy(np.memmap(path, dtype, "w+", shape=(count, *leaf.shape[1:])))

        self._rows = nest.map(allocate, row)
        self._step_type = self._rows[0]
        self._stores = [nest.host_view(leaf) for leaf in nest.leaves(self._rows)]
        self._grids = [store.reshape(self._length, self.num_envs, *store.shape[1:]) for store in self._stores]

    def _push_state(self, state: Nest, real: np.ndarray) -> None:
        """Keeps the state `[B, ...]` of each column's next row, where it has one (`real`) and its stretch has none."""
        if self._states is None:
            count = self._num_slots * self.num_envs
            self._states = nest.map(
                lambda leaf: torch.zeros(count, *leaf.shape[1:], dtype=leaf.dtype, device=self._device), state
            )
        assert self._state_period is not None
        stretch = self._pos // self._state_period
        slot = stretch % self._num_slots
        due = np.flatnonzero(real & (self._state_position[slot, self._columns] // self._state_period != stretch))
        self._state_position[slot[due], due] = self._pos[due]
        index, column = (torch.from_numpy(rows) for rows in (slot[due] * self.num_envs + due, due))
        for store, leaf in zip(nest.leaves(self._states), nest.leaves(state), strict=True):
            store[index.to(self._device)] = leaf[column.to(self._device)]

    def _push_aligned(self, rows: Nest, kinds: np.ndarray, is_quiet: bool) -> None:
        """All columns have the same pos and start: whole blocks of rows, in two pieces where the ring wraps."""
        pos, num_rows, done = int(self._pos[0]), len(kinds) - 1, 0
        leaves = nest.leaves(rows)
        while done < num_rows:
            at = (pos + done) % self._length
            count = min(num_rows - done, self._length - at)
            target, source = slice(at, at + count), slice(done, done + count)
            for grid, leaf in zip(self._grids, leaves):
                if type(grid) is np.ndarray and type(leaf) is not np.ndarray:
                    leaf = leaf.numpy()
                grid[target] = leaf if count == num_rows else leaf[source]
            done += count
        self._mark(slice(None), pos, kinds, is_quiet)
        self._pos += num_rows

    def _push_ragged(self, rows: Nest, kinds: np.ndarray, real: np.ndarray) -> None:
        """Columns have their own pos, and get as many rows as are real."""
        time, column = np.nonzero(real)
        index = (self._pos[column] + time) % self._length * self.num_envs + column
        source = torch.from_numpy(time * self.num_envs + column).to(self._device)
        for store, leaf in zip(self._stores, nest.leaves(rows)):
            real_rows = torch.as_tensor(leaf).flatten(0, 1)[source]
            if isinstance(store, np.ndarray):
                store[index] = real_rows.numpy()
            else:
                store[torch.from_numpy(index).to(self._device)] = real_rows
        for b in range(self.num_envs):
            own = kinds[np.concatenate([[True], real[:, b]]), b]
            if len(own) > 1:
                self._mark(slice(b, b + 1), int(self._pos[b]), own[:, None])
        self._pos += real.sum(0)

    def _end_broken(self, rows: Nest, kinds: np.ndarray) -> tuple[Nest, np.ndarray]:
        """Makes rows LAST, their discounts kept, where the episode was lost and a FIRST row follows: the newest ones,
        and those within what is pushed.

        Args:
          rows: T of them.
          kinds: `[T + 1, B]`, the step types of each column's newest row and of these. Both come back.
        """
        lost = (kinds[:-1] == StepType.MID) & (kinds[1:] == StepType.FIRST)
        if lost.any():
            kinds[:-1][lost] = StepType.LAST
            rows = (torch.from_numpy(kinds[1:]).to(self._device), *rows[1:])
            columns = np.flatnonzero(lost[0])
            index = (self._pos[columns] - 1) % self._length * self.num_envs + columns
            self._step_type[torch.from_numpy(index).to(self._device)] = StepType.LAST
        return rows, kinds

    def _mark(self, columns: slice, pos: int, kinds: np.ndarray, is_quiet: bool = False) -> None:
        """Notes which rows may start a window: those written from `pos` on, and the one before them."""
        first, num_rows = (pos - 1) % self._length, len(kinds) - 1
        at: Any = slice(first, first + num_rows)
        if first + num_rows >= self._length:
            at = np.arange(first, first + num_rows) % self._length
        self._startable[at, columns] = True if is_quiet else trainable(kinds)
        self._startable[(first + num_rows) % self._length, columns] = False  # no successor yet
        self._newest[columns] = kinds[-1]
        if self._book is not None:
            self._book.push(columns, pos, kinds[1:], self._arrivals)

    def _asked(self, column: torch.Tensor, position: torch.Tensor) -> tuple[EpisodeBook, np.ndarray, np.ndarray]:
        if self._book is None:
            raise UsageError("this replay does not know its episodes; make it with keeps_episodes = True")
        return self._book, column.cpu().numpy(), position.cpu().numpy()

    def _arrivals(self, column: int, position: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Rewards and discounts (`[n]`) of the rows at these positions of a column."""
        index = torch.from_numpy(position % self._length * self.num_envs + column).to(self._device)
        return self._rows[1][index].cpu().numpy(), self._rows[2][index].cpu().numpy()

    def _stored_step_types(self) -> Iterator[tuple[int, np.ndarray]]:
        """Of each column, the position of its oldest row, and the step types of all of its rows."""
        step_type = self._step_type.cpu().numpy().reshape(self._length, self.num_envs)
        for column, (pos, size) in enumerate(zip(self._pos.tolist(), self._sizes().tolist())):
            yield pos - size, step_type[np.arange(pos - size, pos) % self._length, column]

    def _take(self, index: np.ndarray) -> Nest:
        """The stored rows at `index`, in its shape."""
        on_device = None if self._device.type == "cpu" else torch.from_numpy(index).to(self._device)

        def take(store: Any) -> torch.Tensor:
            if isinstance(store, np.ndarray):
                return torch.from_numpy(store.take(index, axis=0))
            return store[torch.from_numpy(index) if on_device is None else on_device]

        remaining = iter([take(store) for store in self._stores])
        return nest.map(lambda _: next(remaining), self._rows)

    def _sizes(self) -> np.ndarray:
        return np.minimum(self._pos - self._start, self._length)


def rows_between(low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Columns and positions (`[N]` int64 both) of the rows in `[low, high)` (`[B]` both), column by column."""
    count = np.maximum(high - low, 0)
    column = np.repeat(np.arange(len(low)), count)
    return column, np.arange(len(column)) + np.repeat(low - (np.cumsum(count) - count), count)


def no_window(window_length: int) -> UsageError:
    """What to raise where nothing can be drawn yet."""
    return UsageError(f"the replay has no window of {window_length} rows yet; collect more before training")


def _head(leaf: torch.Tensor, count: int) -> torch.Tensor:
    """The first rows, as a tensor that is saved without the storage behind them; a copy on a GPU alone."""
    if count == len(leaf):
        return leaf
    return torch.from_numpy(leaf.numpy()[:count]) if leaf.device.type == "cpu" else leaf[:count].clone()


def _kept(experience: Experience) -> Nest:
    """What of the rows is stored, as a tuple; `read` puts it back."""
    step = experience.time_step
    return (
        step.step_type,
        step.reward,
        step.discount,
        step.observation,
        step.prev_action,
        experience.action,
        experience.info,
    )
