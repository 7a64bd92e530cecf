"""Torsos, which map time steps to features for heads."""

from collections.abc import Callable
from typing import Any

import gin
import torch
from torch import nn

from alfish.data import TimeStep
from alfish.nest import Nest
from alfish.networks.encoders import Encoder
from alfish.networks.layers import MLP
from alfish.parameters import checked
from alfish.parameters.parts import build_memory, build_network


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
        self.encoder: Any = build_network(encoder, "Torso.encoder", observation_spec)
        self.mlp: Any = build_network(mlp, "Torso.mlp", self.encoder.output_size)
        self.memory: Any = memory and build_memory(memory, "Torso.memory", self.mlp.output_size)
        self.output_size: int = (self.memory or self.mlp).output_size

    def initial_state(self, batch_size: int) -> Nest:
        """Returns the memory's initial state; None without memory."""
        return None if self.memory is None else self.memory.initial_state(batch_size)

    def forward(self, time_step: TimeStep, state: Nest) -> tuple[torch.Tensor, Nest]:
        """Returns features `[..., output_size]`, and the next state."""
        features = self.mlp(self.encoder(time_step.observation))
        return (features, state) if self.memory is None else self.memory(features, state, time_step.step_type)
