"""Layers of E networks at once, in batched products."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from alfish.networks.bodies.unit_rows import UnitRows
from alfish.networks.layers import orthogonal


class EnsembleLinear(nn.Module):
    """Maps `[E, N, in]`, or `[N, in]` for all, to `[E, N, out]` by E linear layers in one product."""

    def __init__(
        self, ensemble_size: int, input_size: int, output_size: int, gain: float = 2**0.5, has_bias: bool = True
    ):
        super().__init__()
        layers: list[Any] = [orthogonal(nn.Linear(input_size, output_size), gain) for _ in range(ensemble_size)]
        self.weight = nn.Parameter(torch.stack([layer.weight.detach().T for layer in layers]))  # [E, in, out]
        self.bias = nn.Parameter(torch.zeros(ensemble_size, 1, output_size)) if has_bias else None

    def forward(self, x: torch.Tensor, num_members: int | None = None) -> torch.Tensor:
        """Returns the outputs of the first `num_members` layers; None: of all."""
        weight, all_biases = self.weight[:num_members], self.bias
        bias = None if all_biases is None else all_biases[:num_members]
        if x.ndim == 2:
            x = x.expand(len(weight), *x.shape)
        if bias is None:
            return torch.bmm(x, weight)
        if weight.shape[-1] == 1:  # a batched product with a vector takes five times as long
            return (x * weight.mT).sum(-1, keepdim=True) + bias
        return torch.baddbmm(bias, x, weight)


class UnitEnsembleLinear(UnitRows, EnsembleLinear):
    """`EnsembleLinear` whose weights have norm 1 for each output."""

    input_dim = 1

    def __init__(self, *arguments: Any, **settings: Any):
        super().__init__(*arguments, **settings)
        self.project()


class EnsembleLayerNorm(nn.Module):
    """E layer norms of `[E, N, size]`, each with a scale and an offset of its own."""

    def __init__(self, size: int, ensemble_size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(ensemble_size, 1, size))
        self.bias = nn.Parameter(torch.zeros(ensemble_size, 1, size))

    def forward(self, x: torch.Tensor, num_members: int | None = None) -> torch.Tensor:
        return torch.addcmul(self.bias[:num_members], F.layer_norm(x, x.shape[-1:]), self.weight[:num_members])
