"""Layers of E networks computed by batched products, and residual bodies of such layers.

A block of a residual body has an inverted bottleneck and batch norm, and its output is added to its input.
"""

from collections.abc import Callable
from typing import Any

import gin
import torch
import torch.nn.functional as F
from torch import nn

from alfish.networks.bodies.batch_norm import BatchNorm, Moments
from alfish.networks.layers import RMSNorm, UnitRows, UnitScale, linear, orthogonal
from alfish.parameters import LayerSize, NonNegativeInt, PositiveInt, checked
from alfish.parameters.parts import build_network


class EnsembleLinear(nn.Module):
    """Applies E linear layers at once, to inputs `[E, N, in]` or shared inputs `[N, in]`; returns `[E, N, out]`."""

    def __init__(
        self, ensemble_size: int, input_size: int, output_size: int, gain: float = 2**0.5, has_bias: bool = True
    ):
        super().__init__()
        layers: list[Any] = [orthogonal(nn.Linear(input_size, output_size), gain) for _ in range(ensemble_size)]
        self.weight = nn.Parameter(torch.stack([layer.weight.detach().T for layer in layers]))  # [E, in, out]
        self.bias = nn.Parameter(torch.zeros(ensemble_size, 1, output_size)) if has_bias else None

    def forward(self, x: torch.Tensor, num_members: int | None = None) -> torch.Tensor:
        """Returns the outputs of the first `num_members` layers; None means all."""
        weight, all_biases = self.weight[:num_members], self.bias
        bias = None if all_biases is None else all_biases[:num_members]
        if x.ndim == 2:
            x = x.expand(len(weight), *x.shape)
        if bias is None:
            return torch.bmm(x, weight)
        if weight.shape[-1] == 1:  # a batched product with a vector takes five times as long as this sum
            return (x * weight.mT).sum(-1, keepdim=True) + bias
        return torch.baddbmm(bias, x, weight)


class UnitEnsembleLinear(UnitRows, EnsembleLinear):
    """`EnsembleLinear` whose weights have norm 1 for each output."""

    input_dim = 1

    def __init__(self, *arguments: Any, **settings: Any):
        super().__init__(*arguments, **settings)
        self.project()


class EnsembleLayerNorm(nn.Module):
    """E layer norms with separate scales and offsets, for `[E, N, size]`."""

    def __init__(self, size: int, ensemble_size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(ensemble_size, 1, size))
        self.bias = nn.Parameter(torch.zeros(ensemble_size, 1, size))

    def forward(self, x: torch.Tensor, num_members: int | None = None) -> torch.Tensor:
        return torch.addcmul(self.bias[:num_members], F.layer_norm(x, x.shape[-1:]), self.weight[:num_members])


class UnitBatchNorm(UnitScale, BatchNorm):
    """`BatchNorm` whose scales and offsets together have norm sqrt(d)."""


class EnsembleRMSNorm(RMSNorm):
    """RMS norms of E networks with separate scales, for `[E, N, size]`.

    With `ensemble_size` None, there is one norm, for `[..., size]`.
    """

    def __init__(self, size: int, ensemble_size: int | None):
        super().__init__(size)
        if ensemble_size is not None:
            self.weight = nn.Parameter(torch.ones(ensemble_size, 1, size))

    def forward(self, x: torch.Tensor, num_members: int | None = None) -> torch.Tensor:
        root = ((x * x).mean(-1, keepdim=True) + self._epsilon).sqrt()
        return x / root * (self.weight if num_members is None else self.weight[:num_members])


class UnitRMSNorm(UnitScale, EnsembleRMSNorm):
    """`EnsembleRMSNorm` whose scales have norm sqrt(d)."""


@gin.configurable(module="alfish.networks", denylist=["input_size", "ensemble_size"])
@checked
class Residual(nn.Module):
    """A residual body with batch norm: the output of each block is added to its input.

        x = W0 BN(x)
        x = x + relu(BN(W2 relu(BN(W1 x))))                             for each block
        y = weight x / root mean square of x

    Linear layers have no bias. Only CrossQ, XQC and FlashSAC train this body, see `check_batch_norms`.

    Args:
      input_size: number of input features.
      ensemble_size: number of networks E, for inputs `[E, N, size]`, or shared inputs `[N, size]`; None means one
        network, for inputs `[..., size]`.
      width: number of features between blocks and of the output, d.
      blocks: number of blocks.
      expansion: number of features within a block, in units of the width.
      unit_rows: whether the weights of each output have norm 1 (`UnitRows`), and the scales and offsets of each norm
        layer together have norm sqrt(d) (`UnitScale`).

    Source: Kim et al., 2026, https://arxiv.org/abs/2604.04539.
    """

    def __init__(
        self,
        input_size: PositiveInt,
        ensemble_size: PositiveInt | None = None,
        width: LayerSize = 256,
        blocks: NonNegativeInt = 2,
        expansion: PositiveInt = 4,
        unit_rows: bool = True,
    ):
        super().__init__()
        norm = UnitBatchNorm if unit_rows else BatchNorm

        def linear_of(input_size: int, output_size: int) -> nn.Module:
            if ensemble_size is None:
                return linear(input_size, output_size, 1.0, bias=False, unit=unit_rows)
            of_members = UnitEnsembleLinear if unit_rows else EnsembleLinear
            return of_members(ensemble_size, input_size, output_size, 1.0, has_bias=False)

        def layers_of(input_size: int, output_size: int) -> list[nn.Module]:
            return [linear_of(input_size, output_size), norm(output_size, ensemble_size), nn.ReLU()]

        self.input_norm = norm(input_size, ensemble_size)
        self.embedding = linear_of(input_size, width)
        inner = expansion * width
        made = [layers_of(width, inner) + layers_of(inner, width) for _ in range(blocks)]
        self.blocks: Any = nn.ModuleList(nn.ModuleList(layers) for layers in made)
        self.output_norm = (UnitRMSNorm if unit_rows else EnsembleRMSNorm)(width, ensemble_size)
        self.output_size = width
        self._is_ensemble = ensemble_size is not None

    def forward(self, x: torch.Tensor, moments: Moments | None = None, num_members: int | None = None) -> torch.Tensor:
        """Returns features `[..., width]`; `moments` and `num_members` are arguments of `BatchNorm`."""
        members = (num_members,) if self._is_ensemble else ()
        x = self.embedding(self.input_norm(x, moments, num_members), *members)
        for first, first_norm, active, second, second_norm, second_active in self.blocks:
            inner = active(first_norm(first(x, *members), moments, num_members))
            x = x + second_active(second_norm(second(inner, *members), moments, num_members))
        return self.output_norm(x, *members)


def made_body(body: Callable[[int, int], Any], input_size: int, ensemble_size: int) -> tuple[list[nn.Module], int]:
    """Returns a body of E networks as a list of layers, and its output size."""
    made = build_network(body, "CriticEnsemble.body", input_size, ensemble_size)
    return [made], made.output_size


WITH_MOMENTS = BatchNorm, Residual  # layers that take `moments`
OF_MEMBERS = EnsembleLinear, EnsembleLayerNorm, *WITH_MOMENTS  # layers that take `num_members`
