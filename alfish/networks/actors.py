"""Actors that return one action instead of a distribution."""

from collections.abc import Callable
from typing import Any

import gin
import torch
from torch import nn

from alfish.nest import Nest
from alfish.networks.encoders import Encoder
from alfish.networks.layers import MLP, orthogonal
from alfish.parameters import NonNegativeFloat, PositiveInt, checked
from alfish.parameters.parts import build_network


@gin.configurable(module="alfish.networks")
@checked
class DeterministicActor(nn.Module):
    """Maps observations to actions `[..., A]` in (-1, 1).

    Args:
      observation_spec: nest of spaces.
      action_size: A.
      encoder: takes the observation spec.
      mlp: takes the encoder's output size.
      gain: of the final layer's orthogonal weights. The first steps of Adam change each weight by the learning rate,
        whatever the gradient. They outweigh much smaller initial weights: all observations then get the same action,
        and tanh saturates before the critic has learned.
    """

    def __init__(
        self,
        observation_spec: Nest,
        action_size: PositiveInt,
        encoder: Callable[[Nest], Any] = Encoder,
        mlp: Callable[[int], Any] = MLP,
        gain: NonNegativeFloat = 1.0,
    ):
        super().__init__()
        self.encoder: Any = build_network(encoder, "DeterministicActor.encoder", observation_spec)
        self.mlp: Any = build_network(mlp, "DeterministicActor.mlp", self.encoder.output_size)
        self.linear = orthogonal(nn.Linear(self.mlp.output_size, action_size), gain)

    def forward(self, observation: Nest) -> torch.Tensor:
        return torch.tanh(self.linear(self.mlp(self.encoder(observation))))
