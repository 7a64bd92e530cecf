"""Storage for the rows of a ring, in memory or in memory-mapped files."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from alfish import host, nest
from alfish.data import Experience, StepType, TimeStep
from alfish.errors import UsageError, first_line
from alfish.nest import Nest
from alfish.runs import files


class StoredRow(NamedTuple):
    """The fields of a row that replay stores."""

    step_type: Any
    reward: Any
    discount: Any
    observation: Nest
    prev_action: Nest
    action: Nest
    info: Nest

    @classmethod
    def of(cls, experience: Experience) -> "StoredRow":
        """Returns the stored part of rows."""
        step = experience.time_step
        return cls(
            step.step_type,
            step.reward,
            step.discount,
            step.observation,
            step.prev_action,
            experience.action,
            experience.info,
        )

    def experience(self, env_id: torch.Tensor) -> Experience:
        """Returns stored rows `[L, N]` as experience, with `env_id` `[L, N]`."""
        time_step = TimeStep(self.step_type, self.reward, self.discount, self.observation, self.prev_action, env_id)
        return Experience(time_step, self.action, self.info, None, None)


class RowStore:
    """Stores the newest rows of B columns.

    The row at a position is stored at `position % length`. The first rows determine the structure of all rows.
    `env_id` is stored once per column.

    Args:
      length: maximum number of rows of a column.
      num_envs: number of environments, B.
      device: device of the rows.
      directory: directory for memory-mapped files that hold the rows of this store only, on the CPU; None keeps the
        rows in memory.
      num_extra: number of further rows at the end of `rows`, which belong to the owner of the store.

    Attributes:
      start: first position of each column since the last `clear`, `[B]` int64.
      end: position of each column's next row, `[B]` int64.
      env_id: global id of each column's environment, `[B]` int32; 0 until a column has a row.
      knows_env_ids: whether all columns have an id.
      rows: stored rows `[length * B + num_extra, ...]`, at `(position % length) * B + column`; None before the first
        rows.
    """

    def __init__(
        self,
        length: int,
        num_envs: int,
        device: torch.device | str,
        directory: str | Path | None = None,
        num_extra: int = 0,
    ):
        self.length, self.num_envs, self._num_extra = length, num_envs, num_extra
        self.device = torch.device("cpu" if directory else device)
        self._on_cpu = self.device.type == "cpu"
        self._directory = None if directory is None else Path(directory)
        self.end = np.zeros(num_envs, np.int64)
        self.start = np.zeros(num_envs, np.int64)
        self.env_id = np.zeros(num_envs, np.int32)
        self._has_env_id, self.knows_env_ids = np.zeros(num_envs, bool), False
        self.rows: StoredRow | None = None
        self._structure: Any = None  # structure of `rows`
        self._knows_structure = False  # whether NamedTuples within rows are known; checkpoints do not store them
        self._stores: list[Any] = []  # leaves of `rows`; on a CPU as numpy views, which are faster for small reads
        self._grids: list[Any] = []  # the same leaves as [length, B, ...]
        self._unlock: Callable[[], Any] = lambda: None

    @property
    def is_level(self) -> bool:
        """True if all columns have the same positions."""
        return self.num_envs == 1 or bool((self.end == self.end[0]).all() and (self.start == self.start[0]).all())

    def tensor(self, array: np.ndarray) -> torch.Tensor:
        """Returns an array as a tensor on the rows' device."""
        tensor = torch.from_numpy(array)
        return tensor if self._on_cpu else nest.to(tensor, self.device)

    def sizes(self) -> np.ndarray:
        """Returns the number of rows of each column, `[B]`."""
        return np.minimum(self.end - self.start, self.length)

    def oldest(self) -> np.ndarray:
        """Returns the position of each column's oldest row, `[B]`."""
        return np.maximum(self.start, self.end - self.length)

    def accept(self, experience: Experience) -> tuple[StoredRow, np.ndarray]:
        """Checks new rows, see `prepare`; returns the fields to store, and the rows' step types as an array.

        Args:
          experience: rows `[T, B, ...]`, arrays or tensors.
        """
        rows, step_type = StoredRow.of(experience), nest.as_array(experience.time_step.step_type)
        if not self._on_cpu or step_type is not experience.time_step.step_type:
            rows = nest.tensors(rows, self.device)
        self.prepare(rows)
        if not self.knows_env_ids:
            # Row 0 of a column without new rows is PAD.
            self.learn_env_ids(step_type[0] != StepType.PAD, nest.as_array(experience.time_step.env_id[0]))
        return rows, step_type

    def prepare(self, rows: StoredRow) -> None:
        """Checks new rows `[T, B, ...]`. The first call allocates memory, or restores NamedTuples after a load.

        Raises:
          UsageError: T is more than `length`, there is not enough memory, another store uses the directory, or shapes
            or dtypes differ from those of the loaded rows.
        """
        num_rows, *num_columns = rows.step_type.shape
        if num_columns != [self.num_envs]:
            raise UsageError(
                f"the step types have shape {tuple(rows.step_type.shape)}, but the replay is for {self.num_envs} "
                f"environments; their shape must be (T, {self.num_envs})"
            )
        if num_rows > self.length:
            raise UsageError(
                f"an unroll of {num_rows} rows does not fit into a replay of {self.length} rows per environment; "
                "raise the replay's capacity, or shorten the unroll"
            )
        if not self._knows_structure:
            if self.rows is None:
                self._allocate(nest.map(lambda leaf: nest.as_tensor(leaf[0]), rows))
            own = nest.like(rows, self.rows)
            remedy = "move the run's directory replay/ away to collect rows again"
            _check_like(own, rows, "saved replay", remedy)
            self._set_rows(own)
            self._knows_structure = True

    def learn_env_ids(self, has_row: np.ndarray, env_id: np.ndarray) -> None:
        """Stores the ids `[B]` of the columns' environments, where the mask `has_row` `[B]` is True."""
        new = has_row & ~self._has_env_id
        self.env_id[new] = env_id[new]
        self._has_env_id |= new
        self.knows_env_ids = bool(self._has_env_id.all())

    def append(self, rows: StoredRow) -> int:
        """Appends rows to all columns at the same positions, in one block, or in two blocks if the ring wraps.

        Args:
          rows: rows `[T, B, ...]`, T at most `length`.

        Returns:
          The position of the first appended row.
        """
        begin, leaves = int(self.end[0]), nest.leaves(rows)
        at = begin % self.length
        num_rows, room = len(leaves[0]), self.length - at
        if num_rows <= room:
            self._write(at, leaves)
        else:
            self._write(at, [leaf[:room] for leaf in leaves])
            self._write(0, [leaf[room:] for leaf in leaves])
        self.end += num_rows
        return begin

    def append_some(self, rows: StoredRow, chosen: np.ndarray) -> None:
        """Appends some of the rows to their columns; positions may differ between columns.

        Args:
          rows: rows `[T, B, ...]`, T at most `length`.
          chosen: mask of the rows to append, `[T, B]` bool; a column's False entries follow all of its True entries.
        """
        time, column = np.nonzero(chosen)
        index = (self.end[column] + time) % self.length * self.num_envs + column
        source, target = self.tensor(time * self.num_envs + column), self.tensor(index)
        for store, leaf in zip(self._stores, nest.leaves(rows)):
            chosen_rows = torch.as_tensor(leaf).flatten(0, 1)[source]
            if isinstance(store, np.ndarray):
                store[index] = chosen_rows.numpy()
            else:
                store[target] = chosen_rows
        self.end += chosen.sum(0)

    def end_broken_episodes(self, rows: StoredRow, step_type: np.ndarray) -> StoredRow:
        """Changes a MID row to LAST if a FIRST row follows, because its episode broke off. Discounts do not change.

        Args:
          rows: new rows `[T, B]`, before they are appended.
          step_type: step types `[T + 1, B]` of each column's newest row and of the new rows, changed in place.

        Returns:
          The new rows with changed step types.
        """
        lost = (step_type[:-1] == StepType.MID) & (step_type[1:] == StepType.FIRST)
        if not lost.any():
            return rows
        step_type[:-1][lost] = StepType.LAST
        columns = np.flatnonzero(lost[0])
        if len(columns):
            assert self.rows is not None
            index = (self.end[columns] - 1) % self.length * self.num_envs + columns
            self.rows.step_type[self.tensor(index)] = StepType.LAST
        return rows._replace(step_type=self.tensor(step_type[1:]))

    def take(self, column: np.ndarray, position: np.ndarray) -> StoredRow:
        """Returns copies of the stored rows at `position` (`[L, N]`) of `column` (`[N]`)."""
        index = (position % self.length) * self.num_envs + column
        on_device = None if self._on_cpu else self.tensor(index)
        taken = []
        for store in self._stores:
            if isinstance(store, np.ndarray):
                taken.append(torch.from_numpy(store.take(index, axis=0)))
            else:
                taken.append(store[torch.from_numpy(index) if on_device is None else on_device])
        return nest.unflatten(self._structure, taken)

    def step_type(self, column: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Returns the step types of the rows at `position` (`[K, N]`) of `column` (`[N]`)."""
        assert self.rows is not None
        return self.rows.step_type[(position % self.length) * self.num_envs + column]

    def observation(self, column: torch.Tensor, position: torch.Tensor, key: str | None) -> Nest:
        """Returns observations, leaves `[K, N, ...]`; with `key`, only that entry of a dict. Rows as in `step_type`."""
        assert self.rows is not None
        observation = self.rows.observation
        return nest.at(
            observation if key is None else observation[key], (position % self.length) * self.num_envs + column
        )

    def rewards(self, column: int, position: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns rewards and discounts, `[n]` each, of the rows at `position` (`[n]`) of a column."""
        assert self.rows is not None
        index = self.tensor(position % self.length * self.num_envs + column)
        return host.read((self.rows.reward[index], self.rows.discount[index]))

    def step_types(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yields each column's oldest position and the step types of all of its rows."""
        if self.rows is None:
            yield from [(0, np.zeros(0, np.int32))] * self.num_envs
            return
        step_type = self._grid(self.rows.step_type).cpu().numpy()
        for column, (oldest, end) in enumerate(zip(self.oldest().tolist(), self.end.tolist())):
            yield oldest, step_type[np.arange(oldest, end) % self.length, column]

    def clear(self) -> None:
        """Removes all rows. The next rows continue the count of positions."""
        self.start = self.end.copy()

    def close(self) -> None:
        """Unlocks the directory for other stores; afterwards, rows must not be appended."""
        self._unlock()

    def state_dict(self) -> dict[str, Any]:
        """Returns positions and rows; the rows share the store's memory."""
        filled = int(min(self.end.max(), self.length)) * self.num_envs
        return {
            "pos": torch.from_numpy(self.end.copy()),
            "start": torch.from_numpy(self.start.copy()),
            "length": self.length,
            "env_id": torch.from_numpy(self.env_id.copy()),
            "rows": nest.plain(nest.map(lambda leaf: _head(leaf, filled), self.rows)),
        }

    def check_fits(self, state: dict[str, Any]) -> None:
        """Checks that `state` can be loaded.

        Raises:
          UsageError: the state was saved with a different number of environments.
          ValueError: the state's positions do not agree with its rows.
        """
        pos, start = state["pos"], state["start"]
        if len(pos) != self.num_envs:
            raise UsageError(
                f"the saved replay is for {len(pos)} environments, but this replay is for {self.num_envs}; keep the "
                "number of environments"
            )
        filled = int(pos.clamp(max=state["length"]).max()) * self.num_envs
        saved = nest.leaves(state["rows"])
        agree = all(len(leaf) == filled for leaf in saved) and bool(saved or not filled)
        if not agree or (start < 0).any() or (start > pos).any():
            raise ValueError(
                f"{[len(leaf) for leaf in saved]} rows do not match positions {start.tolist()} to {pos.tolist()}"
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a `state` that passes `check_fits`; if not all rows fit, restores the newest."""
        self.end, self.start = state["pos"].numpy().copy(), state["start"].numpy().copy()
        if state["length"] < self.length:
            self.start = np.maximum(self.start, self.end - state["length"])  # the saved store overwrote earlier rows
        self.env_id[:] = state["env_id"].numpy()
        self._has_env_id, self.knows_env_ids = self.end > 0, False
        if state["rows"] is None:
            return
        if self.rows is None:
            self._allocate(StoredRow(*state["rows"]))
        for leaf, saved in zip(nest.leaves(self.rows), nest.leaves(state["rows"]), strict=True):
            copy_entries(saved.unflatten(0, (-1, self.num_envs)), self._grid(leaf), self.oldest(), self.end)

    def check_valid(self) -> None:
        """Raises AssertionError if positions, sizes and rows do not agree."""
        sizes = self.sizes()
        assert (sizes >= 0).all() and (sizes <= self.length).all()
        assert self._has_env_id[self.end > 0].all(), "an environment has rows but no env_id"
        if self.rows is None:
            assert not self.end.any(), "there are positions but no rows"
            return
        for leaf, grid in zip(nest.leaves(self.rows), self._grids, strict=True):
            assert len(leaf) == self.length * self.num_envs + self._num_extra and leaf.data_ptr() == _address(grid)

    def _allocate(self, row: StoredRow) -> None:
        """Allocates memory for rows like `row`, leaves `[B, ...]`."""
        count = self.length * self.num_envs + self._num_extra
        if self._directory is not None:
            files.make_directory(self._directory)
            unlock = files.lock(self._directory, self)
            if unlock is None:
                raise UsageError(
                    f"another replay stores its rows in {self._directory}, and this replay would overwrite them; use a "
                    "separate directory for each run"
                )
            self._unlock = unlock
        number = iter(range(1_000))

        def allocate(leaf: torch.Tensor) -> torch.Tensor:
            if self._directory is None:
                # Untouched memory pages take no memory, so a large replay grows as it fills.
                try:
                    return torch.empty(count, *leaf.shape[1:], dtype=leaf.dtype, device=self.device)
                except RuntimeError as error:  # torch raises RuntimeError if memory is short
                    raise UsageError(
                        f"the capacity of replay is {count:,} rows, which does not fit into memory "
                        f"({first_line(error)}); lower the capacity, or store rows in files (ReplayBatches.directory)"
                    ) from error
            dtype = torch.empty(0, dtype=leaf.dtype).numpy().dtype
            path = self._directory / f"leaf-{next(number):03d}.bin"
            with files.writing(path):
                files.reserve(path, count * leaf[0].numel() * dtype.itemsize)
                return torch.from_numpy(np.memmap(path, dtype, "r+", shape=(count, *leaf.shape[1:])))

        self._set_rows(nest.map(allocate, row))
        self._stores = [nest.host_view(leaf) for leaf in nest.leaves(self.rows)]
        self._grids = [self._grid(store) for store in self._stores]

    def _write(self, first: int, leaves: list[Any]) -> None:
        """Writes leaves `[T, B, ...]` to all columns, from index `first` on."""
        target = slice(first, first + len(leaves[0]))
        try:
            for grid, leaf in zip(self._grids, leaves):
                if type(leaf) is not np.ndarray and type(grid) is np.ndarray:
                    leaf = leaf.numpy()
                grid[target] = leaf
        except (ValueError, RuntimeError):
            remedy = "push rows of the shapes and dtypes of the first push"
            _check_like(self.rows, nest.unflatten(self._structure, leaves), "replay", remedy)
            raise

    def _grid(self, leaf: Any) -> Any:
        """Returns a leaf's rows as a view `[length, B, ...]`."""
        return leaf[: self.length * self.num_envs].reshape(self.length, self.num_envs, *leaf.shape[1:])

    def _set_rows(self, rows: StoredRow) -> None:
        self.rows, self._structure = rows, nest.flatten(rows)[1]


def _check_like(own: Nest, rows: StoredRow, whose: str, remedy: str) -> None:
    """Raises UsageError if shapes or dtypes of new rows `[T, B, ...]` differ from those of stored rows `[N, ...]`."""
    for (name, like), leaf in zip(nest.named_leaves(own, "row"), nest.leaves(rows)):
        one = nest.as_tensor(leaf)
        if (like.shape[1:], like.dtype) != (one.shape[2:], one.dtype):
            raise UsageError(
                f"the rows of the {whose} do not fit: {name.partition('.')[2]} is {list(like.shape[1:])} "
                f"{like.dtype} there, but {list(one.shape[2:])} {one.dtype} here; {remedy}"
            )


def copy_entries(source: torch.Tensor, target: torch.Tensor, low: np.ndarray, high: np.ndarray) -> None:
    """Copies the entries of each column between rings of different lengths.

    Entry k of a column is at row `k % S` of `source`, and at row `k % L` of `target`.

    Args:
      source: entries `[S, B, ...]` to copy.
      target: entries `[L, B, ...]` that are changed in place; on any device.
      low, high: bounds `[B]` of the entries [low, high) to copy: at most min(S, L) entries in each column.
    """
    is_level = bool((low == low[0]).all() and (high == high[0]).all())
    columns: list[Any] = [slice(None)] if is_level else list(range(len(low)))
    for column, at, end in zip(columns, low.tolist(), high.tolist()):
        while at < end:
            here, there = at % len(source), at % len(target)
            count = min(end - at, len(source) - here, len(target) - there)
            target[there : there + count, column] = source[here : here + count, column]
            at += count


def _head(leaf: torch.Tensor, count: int) -> torch.Tensor:
    """Returns the first `count` rows as a tensor without other rows in its storage; copies only on a GPU."""
    if count == len(leaf):
        return leaf
    return torch.from_numpy(leaf.numpy()[:count]) if leaf.device.type == "cpu" else leaf[:count].clone()


def _address(grid: Any) -> int:
    return grid.ctypes.data if isinstance(grid, np.ndarray) else grid.data_ptr()
