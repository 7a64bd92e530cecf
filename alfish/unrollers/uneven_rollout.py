"""Rows of environments that make two in the step in which they end, LAST and FIRST, while their neighbours make one.

Each column is written at its own pace, and the shorter ones are filled up with PAD rows at the end: an extra row where
it happens would split the neighbours' transitions.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from alfish import nest
from alfish.data import StepType, TimeStep
from alfish.nest import Nest
from alfish.unrollers.policy_runner import as_array, as_tensor
from alfish.unrollers.unroller import SHOWN_FIELDS, StepRecords


class UnevenRollout:
    """The rows of one unroll, and what arrived in it; storage is laid out from the first rows.

    Args:
      num_rows: of a column, at most.
      num_envs: B.
      device: of time steps.
    """

    def __init__(self, num_rows: int, num_envs: int, device: torch.device):
        self._num_rows = num_rows
        self._columns = torch.arange(num_envs, device=device)
        self._cursor = torch.zeros_like(self._columns)  # where each column's next row goes
        self._targets: list[Any] = []  # leaves `[num_rows, B, ...]`, each on its own device
        self._arrived: list[TimeStep] = []
        self._infos: list[tuple[int, dict[str, Any]]] = []

    @property
    def room(self) -> int:
        """How many rows the fullest column still takes."""
        return self._num_rows - int(self._cursor.max())

    def append(self, rows: tuple[TimeStep, Nest, Nest], which: torch.Tensor | None = None) -> None:
        """Writes the next row of each column.

        Args:
          rows: time step, action and info, leaves `[B, ...]`.
          which: `[B]` bool, the columns that get one; None: all.
        """
        if which is None:
            self._write(self._cursor, self._columns, rows)
            self._cursor += 1
        else:
            self._write(self._cursor[which], self._columns[which], _select(rows, which))
            self._cursor += which

    def arrive(self, time_step: TimeStep, info: dict[str, Any] | None = None) -> None:
        """Notes rows `[B]` for `records`, PAD where none arrived, and gymnasium's info of their step."""
        if info:
            self._infos.append((len(self._arrived), info))
        self._arrived.append(time_step)

    def records(self, shown: Sequence[str] = ()) -> StepRecords:
        """What was noted, in its order; `shown` are those of `SHOWN_FIELDS` that it holds."""

        def arrived(field: str) -> Nest:
            rows = [getattr(row, field) for row in self._arrived]
            return nest.map(lambda *leaves: np.stack([as_array(leaf) for leaf in leaves]), *rows)

        fields = {name: arrived(SHOWN_FIELDS[name]) for name in shown}
        return StepRecords(arrived("step_type"), arrived("reward"), self._infos, **fields)

    def filled_up(self) -> tuple[TimeStep, Nest, Nest]:
        """The rows that were appended, tensors `[num_rows, B, ...]`; PAD where a column has fewer."""
        time_step, action, info = nest.unflatten(self._structure, [as_tensor(target) for target in self._targets])
        filler = torch.arange(self._num_rows, device=self._cursor.device)[:, None] >= self._cursor
        time_step.step_type.masked_fill_(filler, StepType.PAD)
        return time_step, action, info

    def _write(self, row: torch.Tensor, column: torch.Tensor, rows: Nest) -> None:
        """Puts leaves `[n, ...]` at these rows of these columns (`[n]` both)."""
        leaves, self._structure = nest.flatten(rows)
        if not self._targets:
            self._targets = [self._allocate(leaf) for leaf in leaves]
        host_at = row.cpu().numpy(), column.cpu().numpy()  # numpy would take a tensor of one element for a number
        for target, leaf in zip(self._targets, leaves):
            if type(target) is np.ndarray:
                target[host_at] = as_array(leaf)
            else:
                target[row, column] = as_tensor(leaf)

    def _allocate(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return nest.host_view(leaf.new_zeros(self._num_rows, *leaf.shape))
        return np.zeros((self._num_rows, *leaf.shape), leaf.dtype)


def _select(rows: Nest, which: torch.Tensor) -> Nest:
    """The columns `which` (`[B]` bool) of leaves `[B, ...]`."""
    on_host = which.cpu().numpy()  # numpy would take a tensor of one element for a number

    def select(leaf: Any) -> Any:
        return leaf[on_host] if type(leaf) is np.ndarray else leaf[which.to(leaf.device)]

    return nest.map(select, rows)
