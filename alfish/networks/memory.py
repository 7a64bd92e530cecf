"""Recurrent networks; their state is reset at the start of each episode.

A memory takes features, a state and step types, and returns features and the next state. Features are `[B, F]` for one
step, or `[T, N, F]` for consecutive rows. For one step, the caller resets the state before the call. For consecutive
rows, the memory resets the state to zeros at each FIRST row.

Gated memories (`GRU`, `LSTM`) have two implementations for consecutive rows, equal up to float error. The first
computes row by row with elementary operations; compiled graphs use it. The second calls torch's fused kernel once for
all pieces between resets, and is used if it is faster. Other memories (`min_gru`, `attention_window`,
`stacked_memory`) have one implementation.
"""

from typing import Any, ClassVar, NamedTuple

import gin
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from alfish import nest
from alfish.data import StepType
from alfish.nest import Nest
from alfish.parameters import PositiveInt, checked

MOST_ROWS_IN_A_GRAPH = 32


class Pieces(NamedTuple):
    """Pieces of columns of T rows, cut before FIRST rows; each field is an array `[P]` with an entry per piece."""

    column: np.ndarray
    row: np.ndarray  # index of the piece's first row in its column
    length: np.ndarray  # number of rows
    begins: np.ndarray  # bool, whether the piece begins with a FIRST row


def cut(step_type: torch.Tensor) -> Pieces:
    """Returns the pieces of `[T, N]` rows."""
    first = (step_type == StepType.FIRST).cpu().numpy().T  # [N, T]
    starts = first.copy()
    starts[:, 0] = True
    start = np.flatnonzero(starts)
    column, row = np.divmod(start, first.shape[1])
    return Pieces(column, row, np.diff(start, append=first.size), first[column, row])


class Memory(nn.Module):
    """Base of memories; subclasses add `step` and `rows`, whose results are equal up to float error.

    Attributes:
      output_size: number of output features, H.
    """

    output_size: int

    def initial_state(self, batch_size: int) -> Nest:
        """Returns the initial state `[B, ...]`, zeros."""
        raise NotImplementedError

    def forward(self, features: torch.Tensor, state: Nest, step_type: torch.Tensor) -> tuple[torch.Tensor, Nest]:
        """Returns features `[B, H]` or `[T, N, H]`, and the state after the last row.

        Args:
          features: features `[B, F]` or `[T, N, F]`.
          state: state before the first row, a nest of `[B, ...]` or `[N, ...]`.
          step_type: step types `[B]` or `[T, N]`, int32.
        """
        return self.step(features, state) if features.ndim == 2 else self.rows(features, state, step_type)

    def step(self, features: torch.Tensor, state: Nest) -> tuple[torch.Tensor, Nest]:
        """Computes `forward` for one step, `[B, F]`."""
        raise NotImplementedError

    def rows(self, features: torch.Tensor, state: Nest, step_type: torch.Tensor) -> tuple[torch.Tensor, Nest]:
        """Computes `forward` for consecutive rows, `[T, N, F]`."""
        raise NotImplementedError


class _Gated(Memory):
    """Base of gated memories; subclasses add the equations.

    Args:
      input_size: number of input features, F.
      size: number of output features, H.
    """

    num_gates: ClassVar[int]
    num_tensors: ClassVar[int]  # number of tensors of the state, `[B, H]` each
    fused: ClassVar[Any]

    def __init__(self, input_size: PositiveInt, size: PositiveInt = 64):
        super().__init__()
        self.output_size = size
        self.input_weight = nn.Parameter(torch.empty(self.num_gates * size, input_size))
        self.hidden_weight = nn.Parameter(torch.empty(self.num_gates * size, size))
        self.input_bias = nn.Parameter(torch.zeros(self.num_gates * size))
        self.hidden_bias = nn.Parameter(torch.zeros(self.num_gates * size))
        for weight in (self.input_weight, self.hidden_weight):
            for gate in weight.detach().chunk(self.num_gates):
                nn.init.orthogonal_(gate)

    def initial_state(self, batch_size: int) -> Nest:
        return self._nested([torch.zeros(batch_size, self.output_size) for _ in range(self.num_tensors)])

    def step(self, features: torch.Tensor, state: Nest) -> tuple[torch.Tensor, Nest]:
        return self.cell(F.linear(features, self.input_weight, self.input_bias), state)

    def rows(self, features: torch.Tensor, state: Nest, step_type: torch.Tensor) -> tuple[torch.Tensor, Nest]:
        if type(features) is torch.Tensor:
            pieces = cut(step_type)
            if features.is_cuda or self.pieces_pay(pieces, len(features)):
                return self.in_pieces(features, state, pieces)
        elif len(features) > MOST_ROWS_IN_A_GRAPH:  # tensors without values: a graph is being traced
            raise RuntimeError(
                f"compiling a memory over {len(features)} rows takes minutes; the limit is {MOST_ROWS_IN_A_GRAPH} rows"
            )
        return self.row_by_row(features, state, step_type)

    def cell(self, projected: torch.Tensor, state: Nest) -> tuple[torch.Tensor, Nest]:
        """Returns the output and the next state; `projected` is features times input weights, `[B, num_gates * H]`."""
        raise NotImplementedError

    def pieces_pay(self, pieces: Pieces, num_rows: int) -> bool:
        """Returns True if `in_pieces` is faster than `row_by_row` on a CPU.

        `in_pieces` makes one step for each row of the longest piece. Such a step takes up to twice as long as a row of
        `row_by_row`, or longer for many features. Times were measured for 8 to 128 rows, 8 to 64 columns and 32 to 256
        features.
        """
        return 2 * int(pieces.length.max()) <= num_rows and self.output_size <= 128

    def row_by_row(self, features: torch.Tensor, state: Nest, step_type: torch.Tensor) -> tuple[torch.Tensor, Nest]:
        """Computes `rows` one row after another."""
        projected = F.linear(features, self.input_weight, self.input_bias)
        first = (step_type == StepType.FIRST).unsqueeze(-1)
        outputs = []
        for row, begins in zip(projected.unbind(), first.unbind()):
            state = nest.map(lambda leaf, begins=begins: torch.where(begins, 0.0, leaf), state)
            output, state = self.cell(row, state)
            outputs.append(output)
        return torch.stack(outputs), state

    def in_pieces(self, features: torch.Tensor, state: Nest, pieces: Pieces) -> tuple[torch.Tensor, Nest]:
        """Computes `rows` as one packed sequence, with the longest piece first."""
        num_rows, num_columns = features.shape[:2]
        order = np.argsort(-pieces.length, kind="stable")
        column, row, length, begins = (field[order] for field in pieces)
        lasts = np.arange(length[0])[:, None] < length  # [longest, P], whether a piece is longer than the index
        step, piece = np.nonzero(lasts)
        source = (row[piece] + step) * num_columns + column[piece]  # index of each packed row in the flattened rows
        # The last state of a column is the last state of its last piece.
        final = np.empty(num_columns, np.int64)
        at_end = row + length == num_rows
        final[column[at_end]] = np.flatnonzero(at_end)

        def index(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array).to(features.device)

        carries, of_column = index((row == 0) & ~begins).unsqueeze(-1), index(column)
        before = [torch.where(carries, leaf[of_column], 0.0).unsqueeze(0) for leaf in nest.leaves(state)]
        weights = [self.input_weight, self.hidden_weight, self.input_bias, self.hidden_bias]
        output, *after = type(self).fused(
            features.flatten(0, 1)[index(source)],
            torch.from_numpy(lasts.sum(1)),
            before[0] if self.num_tensors == 1 else before,
            weights,
            True,  # has biases
            1,  # number of layers
            0.0,  # dropout
            self.training or torch.is_grad_enabled(),  # without dropout, only cuDNN uses this flag, for gradients
            False,  # bidirectional
        )
        place = np.empty_like(source)
        place[source] = np.arange(len(source))
        output = output[index(place)].unflatten(0, (num_rows, num_columns))
        return output, self._nested([leaf[0, index(final)] for leaf in after])

    def _nested(self, tensors: list[torch.Tensor]) -> Nest:
        return tensors[0] if self.num_tensors == 1 else tuple(tensors)


@gin.configurable(module="alfish.networks")
@checked
class GRU(_Gated):
    """A gated recurrent unit; its state is `[B, H]`. Source: Cho et al., 2014, https://arxiv.org/abs/1406.1078.

    Args:
      input_size: number of input features.
      size: number of output features, H.
    """

    num_gates, num_tensors, fused = 3, 1, torch.gru

    def cell(self, projected: torch.Tensor, state: Nest) -> tuple[torch.Tensor, Nest]:
        sizes = [2 * self.output_size, self.output_size]
        gates, new = projected.split(sizes, -1)
        hidden_gates, hidden_new = F.linear(state, self.hidden_weight, self.hidden_bias).split(sizes, -1)
        reset, keep = torch.sigmoid(gates + hidden_gates).chunk(2, -1)
        new = torch.tanh(new + reset * hidden_new)
        state = new + keep * (state - new)
        return state, state


@gin.configurable(module="alfish.networks")
@checked
class LSTM(_Gated):
    """Long short-term memory; its state is (output, cell), `[B, H]` each. Source: Gers et al., 2000.

    Args:
      input_size: number of input features.
      size: number of output features, H.
    """

    num_gates, num_tensors, fused = 4, 2, torch.lstm

    def __init__(self, input_size: PositiveInt, size: PositiveInt = 64):
        super().__init__(input_size, size)
        with torch.no_grad():
            self.input_bias[size : 2 * size] = 1.0  # the forget gate initially keeps the cell (Jozefowicz et al., 2015)

    def cell(self, projected: torch.Tensor, state: Nest) -> tuple[torch.Tensor, Nest]:
        output, cell = state
        gates = projected + F.linear(output, self.hidden_weight, self.hidden_bias)
        gates, new, out = gates.split([2 * self.output_size, self.output_size, self.output_size], -1)
        enter, keep = torch.sigmoid(gates).chunk(2, -1)
        cell = keep * cell + enter * torch.tanh(new)
        output = torch.sigmoid(out) * torch.tanh(cell)
        return output, (output, cell)

    def pieces_pay(self, pieces: Pieces, num_rows: int) -> bool:
        """Also returns True if no column is cut: oneDNN then takes a fifth to a half of the time of `row_by_row`."""
        return int(pieces.length.min()) == num_rows or super().pieces_pay(pieces, num_rows)
