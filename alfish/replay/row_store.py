"""The rows of a ring: where each lies, in memory or in files; appended at the end of columns, taken by position."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from alfish import nest
from alfish.data import Experience, StepType, TimeStep
from alfish.errors import UsageError, first_line
from alfish.nest import Nest
from alfish.runs import files


class Row(NamedTuple):
    """What is stored of a row."""

    step_type: Any
    reward: Any
    discount: Any
    observation: Nest
    prev_action: Nest
    action: Nest
    info: Nest

    @classmethod
    def of(cls, experience: Experience) -> "Row":
        """Returns what is stored of rows."""
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
        """Returns stored rows `[L, N]` as experience; `env_id` is `[L, N]`, too."""
        time_step = TimeStep(self.step_type, self.reward, self.discount, self.observation, self.prev_action, env_id)
        return Experience(time_step, self.action, self.info, None, None)


class RowStore:
    """Keeps the newest rows of B columns.

    The position of a row grows forever; the row lies at `position % length`. Rows are laid out like the first ones
    appended, whatever nest they are. `env_id` is stored once a column.

    Args:
      length: rows a column.
      num_envs: B.
      device: where rows are stored.
      directory: stores the rows in memory-mapped files there instead, on the CPU; no other store may use it.

    Attributes:
      start: `[B]` int64, the first position since the last `clear`.
      end: `[B]` int64, the position of each column's next row.
      env_id: `[B]` int32; 0 until a column has a row.
      rows: leaves `[length * B, ...]`, row `(position % length) * B + column`; None before the first append.
    """

    def __init__(self, length: int, num_envs: int, device: torch.device | str, directory: str | Path | None):
        self.length, self.num_envs = length, num_envs
        self.device = torch.device("cpu" if directory else device)
        self._directory = None if directory is None else Path(directory)
        self.end = np.zeros(num_envs, np.int64)
        self.start = np.zeros(num_envs, np.int64)
        self.env_id = np.zeros(num_envs, np.int32)
        self._has_env_id, self._has_all_env_ids = np.zeros(num_envs, bool), False
        self.rows: Row | None = None
        self._structure: Any = None  # of `rows`
        self._knows_structure = False  # NamedTuples within rows, which a checkpoint does not keep
        self._stores: list[Any] = []  # the leaves of `rows`; on a CPU numpy views, which are faster for small reads
        self._grids: list[Any] = []  # the same as [length, B, ...]
        self._unlock: Callable[[], Any] = lambda: None

    @property
    def is_level(self) -> bool:
        """Whether all columns have the same positions."""
        return self.num_envs == 1 or bool((self.end == self.end[0]).all() and (self.start == self.start[0]).all())

    def sizes(self) -> np.ndarray:
        """Returns the number of rows of each column, `[B]`."""
        return np.minimum(self.end - self.start, self.length)

    def oldest(self) -> np.ndarray:
        """Returns the position of each column's oldest row, `[B]`."""
        return self.end - self.sizes()

    def accept(self, experience: Experience) -> tuple[Row, np.ndarray]:
        """Returns rows as they are stored, and their step types as an array; `append` stores them.

        The first call allocates memory for such rows; one after a load restores their NamedTuples.

        Args:
          experience: leaves `[T, B, ...]`, arrays or tensors.

        Raises:
          UsageError: T is more than `length`, there is not enough memory, or another store uses the directory.
        """
        rows, step_type = Row.of(experience), nest.as_array(experience.time_step.step_type)
        if self.device.type != "cpu" or step_type is not experience.time_step.step_type:
            rows = nest.tensors(rows, self.device)
        if len(step_type) > self.length:
            raise UsageError(
                f"an unroll of {len(step_type)} rows does not fit a replay of {self.length} rows an environment"
            )
        if not self._knows_structure:
            if self.rows is None:
                self._allocate(nest.map(lambda leaf: nest.as_tensor(leaf[0]), rows))
            self._set_rows(nest.like(rows, self.rows))
            self._knows_structure = True
        if not self._has_all_env_ids:
            # PAD stands at the end of a column, or fills it.
            new = (step_type[0] != StepType.PAD) & ~self._has_env_id
            self.env_id[new] = nest.as_array(experience.time_step.env_id[0])[new]
            self._has_env_id |= new
            self._has_all_env_ids = bool(self._has_env_id.all())
        return rows, step_type

    def append(self, rows: Row) -> None:
        """Appends rows to all columns, which are level: whole blocks, in two pieces where the ring wraps.

        Args:
          rows: leaves `[T, B, ...]`, T at most `length`.
        """
        begin, done = int(self.end[0]), 0
        leaves = nest.leaves(rows)
        num_rows = len(leaves[0])
        while done < num_rows:
            at = (begin + done) % self.length
            count = min(num_rows - done, self.length - at)
            target, source = slice(at, at + count), slice(done, done + count)
            for grid, leaf in zip(self._grids, leaves):
                if type(grid) is np.ndarray and type(leaf) is not np.ndarray:
                    leaf = leaf.numpy()
                grid[target] = leaf if count == num_rows else leaf[source]
            done += count
        self.end += num_rows

    def append_some(self, rows: Row, chosen: np.ndarray) -> None:
        """Appends the chosen rows to their columns, which then may have different positions.

        Args:
          rows: leaves `[T, B, ...]`, T at most `length`.
          chosen: `[T, B]` bool, in each column the first rows of it.
        """
        time, column = np.nonzero(chosen)
        index = (self.end[column] + time) % self.length * self.num_envs + column
        source = torch.from_numpy(time * self.num_envs + column).to(self.device)
        for store, leaf in zip(self._stores, nest.leaves(rows)):
            chosen_rows = torch.as_tensor(leaf).flatten(0, 1)[source]
            if isinstance(store, np.ndarray):
                store[index] = chosen_rows.numpy()
            else:
                store[torch.from_numpy(index).to(self.device)] = chosen_rows
        self.end += chosen.sum(0)

    def end_broken_episodes(self, rows: Row, step_type: np.ndarray) -> Row:
        """Makes rows LAST, their discounts unchanged, where the episode was lost and a FIRST row follows.

        Args:
          rows: T new ones, not appended yet.
          step_type: `[T + 1, B]`, of each column's newest row and of the new ones; written in place.

        Returns:
          The new rows.
        """
        lost = (step_type[:-1] == StepType.MID) & (step_type[1:] == StepType.FIRST)
        if not lost.any():
            return rows
        step_type[:-1][lost] = StepType.LAST
        columns = np.flatnonzero(lost[0])
        if len(columns):
            assert self.rows is not None
            index = (self.end[columns] - 1) % self.length * self.num_envs + columns
            self.rows.step_type[torch.from_numpy(index).to(self.device)] = StepType.LAST
        return rows._replace(step_type=torch.from_numpy(step_type[1:]).to(self.device))

    def take(self, column: np.ndarray, position: np.ndarray) -> Row:
        """Returns copies of the rows at `position` (`[L, N]`) of `column` (`[N]`), which must still be there."""
        index = (position % self.length) * self.num_envs + column
        on_device = None if self.device.type == "cpu" else torch.from_numpy(index).to(self.device)
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
        """Returns the observations of these rows, leaves `[K, N, ...]`; of a dict, those at `key`."""
        assert self.rows is not None
        observation = self.rows.observation
        return nest.at(
            observation if key is None else observation[key], (position % self.length) * self.num_envs + column
        )

    def rewards(self, column: int, position: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns rewards and discounts, `[n]` each, of the rows at these positions of a column."""
        assert self.rows is not None
        index = torch.from_numpy(position % self.length * self.num_envs + column).to(self.device)
        return self.rows.reward[index].cpu().numpy(), self.rows.discount[index].cpu().numpy()

    def step_types(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yields, of each column, the position of its oldest row and the step types of all of its rows."""
        if self.rows is None:
            yield from [(0, np.zeros(0, np.int32))] * self.num_envs
            return
        step_type = self.rows.step_type.cpu().numpy().reshape(self.length, self.num_envs)
        for column, (oldest, end) in enumerate(zip(self.oldest().tolist(), self.end.tolist())):
            yield oldest, step_type[np.arange(oldest, end) % self.length, column]

    def clear(self) -> None:
        """Forgets all rows; positions go on."""
        self.start = self.end.copy()

    def close(self) -> None:
        """Leaves the directory to other stores; nothing may be appended after that."""
        self._unlock()

    def state_dict(self) -> dict[str, Any]:
        """Returns positions and the rows that are filled; these share the store's memory."""
        filled = int(min(self.end.max(), self.length)) * self.num_envs
        return {
            "pos": torch.from_numpy(self.end.copy()),
            "start": torch.from_numpy(self.start.copy()),
            "length": self.length,
            "env_id": torch.from_numpy(self.env_id.copy()),
            "rows": nest.plain(nest.map(lambda leaf: _head(leaf, filled), self.rows)),
        }

    def check_fits(self, state: dict[str, Any]) -> None:
        """Checks that `state` is of such a store.

        Raises:
          UsageError: it was saved with another capacity or number of environments.
          ValueError: its counts do not agree with its rows.
        """
        pos, start = state["pos"], state["start"]
        if state["length"] != self.length or len(pos) != self.num_envs:
            raise UsageError(
                f"the saved replay has {len(pos)} columns of {state['length']} rows, this one {self.num_envs} "
                f"of {self.length}; keep the capacity and the number of environments"
            )
        filled = int(pos.clamp(max=self.length).max()) * self.num_envs
        saved = nest.leaves(state["rows"])
        if (start < 0).any() or (start > pos).any() or any(len(leaf) != filled for leaf in saved):
            raise ValueError(f"positions {start.tolist()} to {pos.tolist()} of {[len(leaf) for leaf in saved]} rows")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a `state` that fits."""
        self.end, self.start = state["pos"].numpy().copy(), state["start"].numpy().copy()
        self.env_id[:] = state["env_id"].numpy()
        self._has_env_id, self._has_all_env_ids = self.end > 0, False
        if state["rows"] is None:
            return
        if self.rows is None:
            self._allocate(Row(*state["rows"]))
        for leaf, saved in zip(nest.leaves(self.rows), nest.leaves(state["rows"]), strict=True):
            leaf[: len(saved)] = saved.to(self.device)

    def check_valid(self) -> None:
        """Raises AssertionError where positions, sizes and rows do not agree."""
        sizes = self.sizes()
        assert (sizes >= 0).all() and (sizes <= self.length).all()
        assert self._has_env_id[self.end > 0].all(), "a column has rows and no env_id"
        if self.rows is None:
            assert not self.end.any(), "there are positions and no rows"
            return
        for leaf, grid in zip(nest.leaves(self.rows), self._grids, strict=True):
            assert len(leaf) == self.length * self.num_envs and leaf.data_ptr() == _address(grid)

    def _allocate(self, row: Row) -> None:
        """Allocates memory for rows like this one, leaves `[*, ...]`."""
        count = self.length * self.num_envs
        if self._directory is not None:
            self._directory.mkdir(parents=True, exist_ok=True)
            unlock = files.lock(self._directory, self)
            if unlock is None:
                raise UsageError(
                    f"another replay keeps its rows in {self._directory}, and this one would overwrite them; give each "
                    "run a directory of its own"
                )
            self._unlock = unlock
        number = iter(range(1_000))

        def allocate(leaf: torch.Tensor) -> torch.Tensor:
            if self._directory is None:
                # Untouched pages cost no memory: a large replay grows as it fills.
                try:
                    return torch.empty(count, *leaf.shape[1:], dtype=leaf.dtype, device=self.device)
                except RuntimeError as error:  # torch's word for no memory
                    raise UsageError(
                        f"the capacity of replay is {count:,} rows, more than there is memory for "
                        f"({first_line(error)}); lower it, or keep rows in files (ReplayBatches.directory)"
                    ) from error
            dtype = torch.empty(0, dtype=leaf.dtype).numpy().dtype
            path = self._directory / f"leaf-{next(number):03d}.bin"
            return torch.from_numpy(np.memmap(path, dtype, "w+", shape=(count, *leaf.shape[1:])))

        self._set_rows(nest.map(allocate, row))
        self._stores = [nest.host_view(leaf) for leaf in nest.leaves(self.rows)]
        self._grids = [store.reshape(self.length, self.num_envs, *store.shape[1:]) for store in self._stores]

    def _set_rows(self, rows: Row) -> None:
        self.rows, self._structure = rows, nest.flatten(rows)[1]


def _head(leaf: torch.Tensor, count: int) -> torch.Tensor:
    """Returns the first rows, as a tensor that is saved without the storage behind them; only on a GPU a copy."""
    if count == len(leaf):
        return leaf
    return torch.from_numpy(leaf.numpy()[:count]) if leaf.device.type == "cpu" else leaf[:count].clone()


def _address(grid: Any) -> int:
    return grid.ctypes.data if isinstance(grid, np.ndarray) else grid.data_ptr()
