"""A memory whose gates do not depend on its state, so that a parallel scan computes consecutive rows."""

from typing import Annotated

import gin
import torch
import torch.nn.functional as F
from torch import nn

from alfish.data import StepType
from alfish.functional.returns import reverse_scan
from alfish.networks.memory import Memory
from alfish.parameters import PositiveInt, Range, checked


@gin.configurable(module="alfish.networks")
@checked
class MinGRU(Memory):
    """A gated recurrent unit that is linear in its state, `[B, H]`.

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
