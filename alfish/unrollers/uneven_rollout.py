"""Unrolls of environments that make two rows, LAST and FIRST, in the step in which an episode ends.

Each column is written at its own pace, and PAD rows at the end complete the shorter ones. An extra row for all columns
would split the neighbours' transitions.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from alfish import nest
from alfish.data import StepType, TimeStep
from alfish.nest import Array, Nest, as_array
from alfish.unrollers.unroller import SHOWN_FIELDS, StepRecords


class UnevenRollout:
    """The rows and the records of one unroll. The first rows decide the layout.

    All leaves are arrays, or all are tensors on one device.

    Args:
      num_rows: most rows of a column.
      env_id: `[B]`, a leaf of the same kind as all others.
      has_gaps: whether rows may be PAD, which are not written.
    """

    def __init__(self, num_rows: int, env_id: Array, has_gaps: bool = False):
        self._rows, self._columns = nest.arange(num_rows, env_id), nest.arange(len(env_id), env_id)
        self._cursor = self._columns * 0  # index of each column's next row
        self._has_gaps, self._num_steps = has_gaps, 0
        self._targets: list[Array] = []  # leaves `[num_rows, B, ...]`
        self._arrived: list[tuple[TimeStep, Array | None]] = []
        self._infos: list[tuple[int, dict[str, Any]]] = []

    @property
    def room(self) -> int:
        """Number of rows that the fullest column still takes. A step counts as a row even where columns have gaps."""
        return len(self._rows) - max(int(self._cursor.max()), self._num_steps)

    def append(self, rows: tuple[TimeStep, Nest, Nest], which: Array | None = None) -> None:
        """Writes the next row of each column.

        Args:
          rows: time step, action and info, leaves `[B, ...]`.
          which: `[B]` bool, the columns that receive a row; None: all.
        """
        leaves, self._structure = nest.flatten(rows)
        if not self._targets:
            self._targets = [zero_rows(len(self._rows), leaf) for leaf in leaves]
        self._num_steps += which is None
        if self._has_gaps:
            present = rows[0].step_type != StepType.PAD
            which = present if which is None else which & present
        row, column = self._cursor, self._columns
        if which is not None:
            row, column, leaves = row[which], column[which], [leaf[which] for leaf in leaves]
        for target, leaf in zip(self._targets, leaves):
            target[row, column] = leaf
        self._cursor += 1 if which is None else which

    def arrive(self, time_step: TimeStep, which: Array | None = None, info: dict[str, Any] | None = None) -> None:
        """Adds rows to `records`.

        Args:
          time_step: leaves `[B, ...]`.
          which: `[B]` bool, the columns in which a row arrived; None: all.
          info: gymnasium's info of the step.
        """
        if info:
            self._infos.append((len(self._arrived), info))
        self._arrived.append((time_step, which))

    def records(self, shown: Sequence[str] = ()) -> StepRecords:
        """Returns the rows given to `arrive`, in their order, with the fields `shown` of `SHOWN_FIELDS`."""

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
        """Returns the rows given to `append`, `[num_rows, B, ...]`, with PAD rows behind shorter columns."""
        time_step, action, info = nest.unflatten(self._structure, self._targets)
        time_step.step_type[self._rows[:, None] >= self._cursor] = StepType.PAD
        return time_step, action, info


def zero_rows(num_rows: int, leaf: Array) -> Array:
    """Returns zeros `[num_rows, B, ...]` for rows like this leaf."""
    shape = (num_rows, *leaf.shape)
    return np.zeros(shape, leaf.dtype) if type(leaf) is np.ndarray else leaf.new_zeros(shape)
