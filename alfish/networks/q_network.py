"""Action values of every Discrete action at once."""

from collections.abc import Callable
from typing import Any

import gin
import torch
from torch import nn

from alfish.data import TimeStep
from alfish.nest import Nest
from alfish.networks.layers import orthogonal
from alfish.networks.torsos import Torso
from alfish.parameters import PositiveInt, checked
from alfish.parameters.parts import build_torso


@gin.configurable(module="alfish.networks", denylist=["num_values"])
@checked
class QNetwork(nn.Module):
    """Maps time steps to Q of each Discrete action, `[..., A]`, or `[..., A, K]` with several numbers a value.

    Args:
      observation_spec: nest of spaces.
      num_actions: A.
      torso: takes the observation spec.
      dueling: Q = V + advantage - mean advantage (Wang et al., 2016, eq. 9), each on its own linear layer.
      num_values: K, numbers of each value (see `alfish.values`); None: one. It is set by the algorithm.
    """

    def __init__(
        self,
        observation_spec: Nest,
        num_actions: PositiveInt,
        torso: Callable[[Nest], Any] = Torso,
        dueling: bool = False,
        num_values: PositiveInt | None = None,
    ):
        super().__init__()
        self._num_values = num_values
        copies = num_values or 1
        self.torso: Any = build_torso(torso, "QNetwork.torso", observation_spec)
        self.advantage = orthogonal(nn.Linear(self.torso.output_size, copies * num_actions), 1.0)
        self.value: Any = orthogonal(nn.Linear(self.torso.output_size, copies), 1.0) if dueling else None

    def initial_state(self, batch_size: int) -> Nest:
        return self.torso.initial_state(batch_size)

    def forward(self, time_step: TimeStep, state: Nest) -> tuple[torch.Tensor, Nest]:
        """Returns Q and the next state."""
        features, state = self.torso(time_step, state)
        q = self.advantage(features)
        if self._num_values is not None:
            q = q.unflatten(-1, (self._num_values, -1))  # [..., K, A]
        if self.value is not None:
            value = self.value(features)
            value = value if self._num_values is None else value.unsqueeze(-1)
            q = value + q - q.mean(-1, keepdim=True)
        return q if self._num_values is None else q.mT, state
