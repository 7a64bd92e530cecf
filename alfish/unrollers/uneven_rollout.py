"""Rows of environments that make two in the step in which they end, LAST and FIRST, while their neighbours make one.

Each column is written at its own pace, and the shorter ones are filled up with PAD rows at the end: an extra row where
it happens would split the neighbours' transitions.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from alfish import nest
from alfish.data import StepType, TimeStep
from alfish.nest import Array, Nest, as_array
from alfish.unrollers.unroller import SHOWN_FIELDS, StepRecords


class UnevenRollout:
    """The rows of one unroll, and what arrived in it; storage is laid out from the first rows.

    All leaves are arrays, or all are tensors on one device.

    Args:
      num_rows: of a column, at most.
      env_id: `[B]`, a leaf like all others.
    """

    def __init__(self, num_rows: int, env_id: Array):
        self._rows, self._columns = nest.arange(num_rows, env_id), nest.arange(len(env_id), env_id)
        self._cursor = self._columns * 0  # where each column's next row goes
        self._targets: list[Array] = []  # leaves `[num_rows, B, ...]`
        self._arrived: list[tuple[TimeStep, Array | None]] = []
        self._infos: list[tuple[int, dict[str, Any]]] = []

    @property
    def room(self) -> int:
        """How many rows the fullest column still takes."""
        return len(self._rows) - int(self._cursor.max())

    def append(self, rows: tuple[TimeStep, Nest, Nest], which: Array | None = None) -> None:
        """Writes the next row of each column.

        Args:
          rows: time step, action and info, leaves `[B, ...]`.
          which: `[B]` bool, the columns that get one; None: all.
        """
        if which is None:
            self._write(self._cursor, self._columns, rows)
            self._cursor += 1
        else:
            self._write(self._cursor[which], self._columns[which], nest.at(rows, which))
            self._cursor += which

    def arrive(self, time_step: TimeStep, which: Array | None = None, info: dict[str, Any] | None = None) -> None:
        """Notes rows for `records`.

        Args:
          time_step: leaves `[B, ...]`.
          which: `[B]` bool, the columns in which they arrived; None: all.
          info: gymnasium's info of their step.
        """
        if info:
            self._infos.append((len(self._arrived), info))
        self._arrived.append((time_step, which))

    def records(self, shown: Sequence[str] = ()) -> StepRecords:
        """What was noted, in its order; `shown` are those of `SHOWN_FIELDS` that it holds."""

        def arrived(field: str) -> Nest:
            rows = [getattr(time_step, field) for time_step, _ in self._arrived]
            return nest.map(lambda *leaves: np.stack([as_array(leaf) for leaf in leaves]), *rows)

        step_type = arrived("step_type")
        for kinds, (_, which) in zip(step_type, self._arrived):
            if which is not None:
                kinds[~as_array(which)] = StepType.PAD
        fields = {name: arrived(SHOWN_FIELDS[name]) for name in shown}
        return StepRecords(step_type, arrived("reward"), self._infos, **fields)

    def filled_up(self) -> tuple[TimeStep, Nest, Nest]:
        """The rows that were appended, `[num_rows, B, ...]`; PAD where a column has fewer."""
        time_step, action, info = nest.unflatten(self._structure, self._targets)
        time_step.step_type[self._rows[:, None] >= self._cursor] = StepType.PAD
        return time_step, action, info

    def _write(self, row: Array, column: Array, rows: Nest) -> None:
        """Puts leaves `[n, ...]` at these rows of these columns (`[n]` both)."""
        leaves, self._structure = nest.flatten(rows)
        if not self._targets:
            self._targets = [_zeros(len(self._rows), leaf) for leaf in leaves]
        for target, leaf in zip(self._targets, leaves):
            target[row, column] = leaf


def _zeros(num_rows: int, leaf: Array) -> Array:
    """`[num_rows, B, ...]`, for rows like this one."""
    shape = (num_rows, *leaf.shape)
    return np.zeros(shape, leaf.dtype) if type(leaf) is np.ndarray else leaf.new_zeros(shape)
