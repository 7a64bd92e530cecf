"""Linear layers with weights of fixed norm, and with noise on their weights for exploration."""

import abc
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from alfish.errors import UsageError


class Projected(abc.ABC):
    """Base of layers whose weights have a fixed norm.

    The learner calls `project` after each update of the layer. Gradients and the optimizer's moments are not projected.

    Attributes:
      weight: weight of the layer.
    """

    weight: Any

    @abc.abstractmethod
    def project(self) -> None:
        """Scales the weights to their fixed norm, in place."""


class UnitRows(Projected):
    """Base of linear layers whose weights have norm 1 for each output. Biases are not constrained.

    Attributes:
      input_dim: dimension of the inputs in `weight`.
    """

    input_dim: ClassVar[int]

    @torch.no_grad()
    def project(self) -> None:
        self.weight.div_(torch.linalg.vector_norm(self.weight, dim=self.input_dim, keepdim=True))


class UnitLinear(UnitRows, nn.Linear):
    """`nn.Linear` with rows of norm 1; `project` must be called after its weights are initialized."""

    input_dim = 1


class UnitScale(Projected):
    """Base of norm layers of d features; scales and offsets together have norm sqrt(d)."""

    @torch.no_grad()
    def project(self) -> None:
        bias = getattr(self, "bias", None)
        parts = [self.weight] if bias is None else [self.weight, bias]
        square: Any = sum(part.square().sum(-1, keepdim=True) for part in parts)
        factor = (self.weight.shape[-1] / square).sqrt()
        for part in parts:
            part.mul_(factor)


class NoisyLinear(nn.Module):
    """A linear layer with learned noise on its weights, drawn for each pass; no noise in evaluation mode.

        y = (w + s_w (f(e_out) f(e_in)^T)) x + b + s_b f(e_out),   f(e) = sign(e) sqrt(|e|),   e ~ N(0, 1)

    Args:
      input_size: number of input features.
      output_size: number of output features.

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
        """Turns off noise permanently, also in rollouts; called for frozen modules."""
        self.explores = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return F.linear(x, self.weight, self.bias)
        noise = torch.randn(sum(self.weight.shape), device=x.device)
        rows, columns = (noise.sign() * noise.abs().sqrt()).split(self.weight.shape)
        weight = self.weight + self.weight_scale * torch.outer(rows, columns)
        return F.linear(x, weight, self.bias + self.bias_scale * rows)


def noisy_linear(input_size: int, output_size: int, bias: bool, unit: bool) -> NoisyLinear:
    """Returns a `NoisyLinear`; raises UsageError if `bias` is False or `unit` is True."""
    if unit or not bias:
        raise UsageError("noisy layers need bias = True and unit_rows = False")
    return NoisyLinear(input_size, output_size)
