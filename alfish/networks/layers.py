"""Layers: orthogonal weights, activations, and multilayer perceptrons."""

from collections.abc import Callable, Sequence
from typing import Literal

import gin
import torch
from torch import nn

from alfish.parameters import LayerSize, PositiveInt, checked


def orthogonal(layer: nn.Linear | nn.Conv2d, gain: float = 2**0.5) -> nn.Module:
    """Orthogonal weights scaled by `gain`, zero bias. Returns the layer. Source: Saxe et al., 2014."""
    with torch.no_grad():
        nn.init.orthogonal_(layer.weight, gain)
        if layer.bias is not None:
            layer.bias.zero_()
    return layer


class Tanh(nn.Module):
    """Hyperbolic tangent. For many x on a CPU, 2 sigmoid(2x) - 1 takes a third of the time, with an error < 2e-7."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.is_cuda or x.numel() < 4096:
            return torch.tanh(x)
        return (2 * torch.sigmoid(x + x)).sub_(1)


ACTIVATIONS = {"tanh": Tanh, "relu": nn.ReLU, "elu": nn.ELU, "silu": nn.SiLU, "gelu": nn.GELU}


@gin.configurable(module="alfish.networks")
@checked
class MLP(nn.Sequential):
    """Linear layers, each followed by its activation.

    Args:
      input_size: features in.
      layers: features of each layer; empty for none.
      activation: a name of `ACTIVATIONS`, or a module class.
      layer_norm: normalize before each activation.
    """

    def __init__(
        self,
        input_size: PositiveInt,
        layers: Sequence[LayerSize] = (64, 64),
        activation: Literal["tanh", "relu", "elu", "silu", "gelu"] | Callable[[], nn.Module] = "tanh",
        layer_norm: bool = False,
    ):
        make_activation = ACTIVATIONS[activation] if isinstance(activation, str) else activation
        modules: list[nn.Module] = []
        for size in layers:
            modules.append(orthogonal(nn.Linear(input_size, size)))
            modules += [nn.LayerNorm(size)] if layer_norm else []
            modules.append(make_activation())
            input_size = size
        super().__init__(*modules)
        self.output_size = input_size
