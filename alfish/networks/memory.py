"""Recurrent networks; their state is reset at the start of each episode.

A memory takes features, a state and step types, and returns features and the next state. Features are `[B, F]` for one
step, or `[T, N, F]` for consecutive rows. For one step, the caller resets the state before the call. For consecutive
rows, the memory resets the state to zeros at each FIRST row.

Gated memories (`GRU`, `LSTM`) have two implementations for consecutive rows, equal up to float error. The first
computes row by row with elementary operations; compiled graphs use it. The second calls torch's fused kernel once for
all pieces between resets, and is used if it is faster. Other memories (`MinGRU`, `AttentionWindow`) have one
implementation.
"""

from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar, NamedTuple

import gin
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from alfish import nest
from alfish.data import StepType
from alfish.errors import UsageError
from alfish.functional.returns import reverse_scan
from alfish.nest import Nest
from alfish.parameters import PositiveInt, Range, checked
from alfish.parameters.parts import build_memory

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


@gin.configurable(module="alfish.networks")
@checked
class MinGRU(Memory):
    """A gated recurrent unit that is linear in its state, `[B, H]`; its gates do not depend on the state.

        h_t = (1 - z_t) h_{t-1} + z_t c_t,   z_t = sigmoid(W_z x_t + b_z),   c_t = W_c x_t + b_c

    Consecutive rows are computed by doubling, in log2(T) operations on all rows. At FIRST rows, 1 - z_t is replaced by
    0. This is the paper's form without logarithms. Products in the doubling are in [0, 1], and nothing is
    divided, so logarithms are not needed. They would restrict c_t to positive numbers, and turn the zeros of resets
    into infinities.

    Source: Feng et al., 2024, https://arxiv.org/abs/2410.01201; `timescale`: Tallec & Ollivier, 2018,
    https://arxiv.org/abs/1804.11188.

    Args:
      input_size: number of input features, F.
      size: number of output features, H.
      timescale: number of rows that the slowest unit initially remembers, at least 2. The initial z of a unit is 1 / n,
        with n evenly spaced from 2 to this number over the units. 2 means that all biases start from 0, as in the
        paper.
    """

    def __init__(self, input_size: PositiveInt, size: PositiveInt = 64, timescale: Annotated[float, Range(2)] = 64.0):
        super().__init__()
        self.output_size = size
        self.weight = nn.Parameter(torch.empty(2 * size, input_size))
        self.bias = nn.Parameter(torch.zeros(2 * size))
        for part in self.weight.detach().chunk(2):
            nn.init.orthogonal_(part)
        with torch.no_grad():
            self.bias[:size] = -torch.linspace(1.0, timescale - 1, size).log()

    def initial_state(self, batch_size: int) -> torch.Tensor:
        return torch.zeros(batch_size, self.output_size)

    def step(self, features: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        enter, new = self._gate(features)
        state = state + enter * (new - state)
        return state, state

    def rows(
        self, features: torch.Tensor, state: torch.Tensor, step_type: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        enter, new = self._gate(features)
        keep = torch.where((step_type == StepType.FIRST).unsqueeze(-1), 0.0, 1 - enter)
        increment = enter * new
        increment = torch.cat([(increment[0] + keep[0] * state).unsqueeze(0), increment[1:]])
        output = reverse_scan(keep.flip(0), increment.flip(0)).flip(0)
        return output, output[-1]

    def _gate(self, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns z and c, `[..., H]` each."""
        gate, new = F.linear(features, self.weight, self.bias).chunk(2, -1)
        return torch.sigmoid(gate), new


@gin.configurable(module="alfish.networks")
@checked
class StackedMemory(nn.Module):
    """Memories in sequence; each takes the output of the previous one. The state is the tuple of their states.

    Args:
      input_size: number of input features.
      layers: classes or factories of the memories; each is called with the number of its input features. A scope such
        as `@first/GRU` allows separate settings (`first/GRU.size`).
      residual: whether each layer after the first adds its input to its output, which requires equal sizes. Stacked
        GRUs and LSTMs usually have no residual connections; an `AttentionWindow` already contains one.

    Raises:
      UsageError: there is no layer, or sizes are unequal with residual connections.
    """

    def __init__(
        self, input_size: PositiveInt, layers: Sequence[Callable[[int], Any]] = (GRU, GRU), residual: bool = False
    ):
        super().__init__()
        if not layers:
            raise UsageError("StackedMemory.layers is empty; name at least one memory, such as [@GRU, @GRU]")
        self.output_size: int = input_size
        self._residual = residual
        self.layers = nn.ModuleList()
        for k, layer in enumerate(layers):
            memory = build_memory(layer, f"StackedMemory.layers[{k}]", self.output_size)
            if residual and k > 0 and memory.output_size != self.output_size:
                raise UsageError(
                    f"StackedMemory.residual is True, but StackedMemory.layers[{k}] returns {memory.output_size} "
                    f"features for {self.output_size} inputs; give all layers the same size, or set residual = False"
                )
            self.layers.append(memory)
            self.output_size = memory.output_size

    def initial_state(self, batch_size: int) -> Nest:
        """Returns the initial states of the layers."""
        return tuple(memory.initial_state(batch_size) for memory in self.layers)  # type: ignore[operator]

    def forward(self, features: torch.Tensor, state: Nest, step_type: torch.Tensor) -> tuple[torch.Tensor, Nest]:
        """Returns features `[B, H]` or `[T, N, H]`, and the states after the last row; see `Memory.forward`."""
        after = []
        for k, (memory, before) in enumerate(zip(self.layers, state, strict=True)):
            output, left = memory(features, before, step_type)
            features = features + output if self._residual and k > 0 else output
            after.append(left)
        return features, tuple(after)
