"""Torsos, which map time steps to features for heads."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import gin
import torch
from torch import nn

from alfish.data import TimeStep
from alfish.nest import Nest
from alfish.networks.encoders import Encoder
from alfish.networks.initializers import orthogonal
from alfish.parameters import LayerSize, PositiveInt, checked


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


@gin.configurable(module="alfish.networks")
@checked
class Torso(nn.Module):
    """An encoder, an MLP on its features, and optionally a memory on the MLP's features.

    Args:
      observation_spec: nest of spaces.
      encoder: takes the spec.
      mlp: takes the encoder's output size.
      memory: takes the MLP's output size (`@GRU`, `@LSTM`); None: no memory.
    """

    def __init__(
        self,
        observation_spec: Nest,
        encoder: Callable[[Nest], Any] = Encoder,
        mlp: Callable[[int], Any] = MLP,
        memory: Callable[[int], Any] | None = None,
    ):
        super().__init__()
        self.encoder: Any = encoder(observation_spec)
        self.mlp: Any = mlp(self.encoder.output_size)
        self.memory: Any = None if memory is None else memory(self.mlp.output_size)
        self.output_size: int = (self.memory or self.mlp).output_size

    def initial_state(self, batch_size: int) -> Nest:
        """Returns the memory's initial state; None without memory."""
        return None if self.memory is None else self.memory.initial_state(batch_size)

    def forward(self, time_step: TimeStep, state: Nest) -> tuple[torch.Tensor, Nest]:
        """Returns features `[..., output_size]`, and the next state."""
        features = self.mlp(self.encoder(time_step.observation))
        return (features, state) if self.memory is None else self.memory(features, state, time_step.step_type)
