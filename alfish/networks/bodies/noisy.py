"""Linear layers that explore by noise on their weights."""

import torch
import torch.nn.functional as F
from torch import nn

from alfish.errors import UsageError


class NoisyLinear(nn.Module):
    """A linear layer with learned noise on its weights, drawn for each pass, in rollouts too; none in evaluation.

        y = (w + s_w (f(e_out) f(e_in)^T)) x + b + s_b f(e_out),   f(e) = sign(e) sqrt(|e|),   e ~ N(0, 1)

    Args:
      input_size: features in.
      output_size: features out.

    Source: Fortunato et al., 2018, section 3, with factorised noise, https://arxiv.org/abs/1706.10295.
    """

    explores = True  # see `algorithms.acting.explorers`

    def __init__(self, input_size: int, output_size: int):
        super().__init__()
        bound = input_size**-0.5
        self.weight = nn.Parameter(torch.empty(output_size, input_size).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(output_size).uniform_(-bound, bound))
        self.weight_scale = nn.Parameter(torch.full((output_size, input_size), 0.5 * bound))
        self.bias_scale = nn.Parameter(torch.full((output_size,), 0.5 * bound))

    def freeze(self) -> None:
        """Ends the noise in rollouts too; `Learner.frozen_parts` calls it."""
        self.explores = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return F.linear(x, self.weight, self.bias)
        noise = torch.randn(sum(self.weight.shape), device=x.device)
        rows, columns = (noise.sign() * noise.abs().sqrt()).split(self.weight.shape)
        weight = self.weight + self.weight_scale * torch.outer(rows, columns)
        return F.linear(x, weight, self.bias + self.bias_scale * rows)


def noisy_linear(input_size: int, output_size: int, bias: bool, unit: bool) -> NoisyLinear:
    """Returns the layer; raises UsageError unless it is to have a bias, and no unit rows."""
    if unit or not bias:
        raise UsageError("noisy layers have a bias and no unit rows; set bias to True and unit_rows to False")
    return NoisyLinear(input_size, output_size)
