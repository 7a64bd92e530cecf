"""Storage for states of a policy's memory, one state per stretch. A stretch is a block of consecutive positions."""

from typing import Any

import numpy as np
import torch

from alfish import nest
from alfish.nest import Nest
from alfish.replay.row_store import RowStore, copy_entries


class StateStore:
    """Stores the state of one row in each stretch of `period` consecutive positions of a column.

    Slot k % num_slots holds the state of stretch k. num_slots is the largest number of stretches that the stored rows
    of a column can span.

    Args:
      store: store of the rows to which the states belong; states are stored on the same device.
      period: number of positions in a stretch.
    """

    def __init__(self, store: RowStore, period: int):
        self._store, self.period = store, period
        self._num_slots = -(-(store.length - 1) // period) + 1
        self._position = np.full((self._num_slots, store.num_envs), -1)  # -1 without a state
        self._columns = np.arange(store.num_envs)
        self._states: Nest = None  # leaves [slots * B, ...], state slot * B + column
        self._knows_structure = False  # whether NamedTuples within states are known; checkpoints do not store them

    def push(self, state: Nest, has_row: np.ndarray) -> None:
        """Stores the state of each column's next row if its stretch has no state. Call this before appending the row.

        Args:
          state: states `[B, ...]`, arrays or tensors.
          has_row: mask of columns to which a row is appended, `[B]` bool.
        """
        position, device = self._store.end, self._store.device
        state = nest.tensors(state, device)
        self._prepare(state)
        stretch = position // self.period
        slot = stretch % self._num_slots
        due = np.flatnonzero(has_row & (self._position[slot, self._columns] // self.period != stretch))
        self._position[slot[due], due] = position[due]
        index, column = map(self._store.tensor, (slot[due] * self._store.num_envs + due, due))
        for kept, leaf in zip(nest.leaves(self._states), nest.leaves(state), strict=True):
            kept[index] = leaf[column]

    def position(self, column: np.ndarray, stretch: np.ndarray) -> np.ndarray:
        """Returns the position of the row whose state is in the slot of `stretch` (`[N]`) of `column` (`[N]`).

        The result is -1 if the slot is empty. The row may belong to an older stretch whose rows are overwritten.
        """
        return self._position[stretch % self._num_slots, column]

    def has(self, column: np.ndarray, position: np.ndarray) -> np.ndarray:
        """Returns whether the states of the rows at `column` and `position` are stored, `[N]` bool."""
        return self._position[position // self.period % self._num_slots, column] == position

    def take(self, column: np.ndarray, position: np.ndarray) -> Nest:
        """Returns copies of the stored states of the rows at `column` and `position`, leaves `[N, ...]`."""
        assert self.has(column, position).all(), "a window starts where no state is stored"
        slot = position // self.period % self._num_slots
        return nest.at(self._states, self._store.tensor(slot * self._store.num_envs + column))

    def clear(self) -> None:
        """Removes all states."""
        self._position[:] = -1

    def state_dict(self) -> dict[str, Any]:
        return {"state_position": torch.from_numpy(self._position.copy()), "states": nest.plain(self._states)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores `state`; the rows must be loaded first."""
        store, num_envs = self._store, self._store.num_envs
        stretches = store.oldest() // self.period, (store.end - 1) // self.period + 1  # stretches of the stored rows

        def restored(leaf: torch.Tensor) -> torch.Tensor:
            kept = torch.zeros(self._num_slots * num_envs, *leaf.shape[1:], dtype=leaf.dtype, device=store.device)
            copy_entries(leaf.unflatten(0, (-1, num_envs)), kept.unflatten(0, (-1, num_envs)), *stretches)
            return kept

        self.clear()
        copy_entries(state["state_position"], torch.from_numpy(self._position), *stretches)
        in_place = self._position // self.period % self._num_slots == np.arange(self._num_slots)[:, None]
        # Marks a slot as empty if it has no state of these stretches, or the state of a row before `store.start`.
        self._position[~in_place | (self._position < store.start)] = -1
        self._states = nest.map(restored, state["states"])
        self._knows_structure = False

    def check_valid(self) -> None:
        """Raises AssertionError if a state is in a wrong slot, or its position is not in [start, end) of the store."""
        slot, column = np.nonzero(self._position >= 0)
        position = self._position[slot, column]
        assert (position < self._store.end[column]).all() and (position >= self._store.start[column]).all()
        assert (position // self.period % self._num_slots == slot).all(), "a state is in the wrong slot"
        if self._states is not None:
            assert all(len(leaf) == self._num_slots * self._store.num_envs for leaf in nest.leaves(self._states))

    def _prepare(self, state: Nest) -> None:
        """Allocates memory for states like `state`, leaves `[B, ...]`; after a load, restores NamedTuples in states."""
        if self._knows_structure:
            return
        if self._states is None:
            count, device = self._num_slots * self._store.num_envs, self._store.device
            self._states = nest.map(
                lambda leaf: torch.zeros(count, *leaf.shape[1:], dtype=leaf.dtype, device=device), state
            )
        self._states = nest.like(state, self._states)
        self._knows_structure = True
