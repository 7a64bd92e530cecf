"""Values of every Discrete action at once."""

from collections.abc import Callable
from typing import Any

import gin
import torch
from torch import nn

from alfish.data import TimeStep
from alfish.errors import UsageError
from alfish.nest import Nest
from alfish.networks.encoders import Torso
from alfish.networks.layers import MLP, linear
from alfish.parameters import PositiveInt, checked
from alfish.parameters.parts import build_network, build_torso


@gin.configurable(module="alfish.networks", denylist=["num_values"])
@checked
class QNetwork(nn.Module):
    """Maps time steps to Q of each Discrete action, `[..., A]`, or `[..., A, K]` if K outputs represent one value.

    Args:
      observation_spec: nest of spaces.
      num_actions: number of actions, A.
      torso: class or factory of the torso; called with the observation spec.
      dueling: whether Q = V + advantage - mean advantage (Wang et al., 2016, equation 9), with separate linear layers.
      noisy: whether the final layers are `NoisyLinear`; see `MLP.noisy` for the torso.
      num_values: number of outputs K that represent one value (see `alfish.functional.values`); None means one output.
        It is set by the algorithm.
    """

    def __init__(
        self,
        observation_spec: Nest,
        num_actions: PositiveInt,
        torso: Callable[[Nest], Any] = Torso,
        dueling: bool = False,
        noisy: bool = False,
        num_values: PositiveInt | None = None,
    ):
        super().__init__()
        self._num_values = num_values
        copies = num_values or 1
        self.torso: Any = build_torso(torso, "QNetwork.torso", observation_spec)
        self.advantage = linear(self.torso.output_size, copies * num_actions, 1.0, noisy)
        self.value: Any = linear(self.torso.output_size, copies, 1.0, noisy) if dueling else None

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


@gin.configurable(module="alfish.networks", denylist=["num_samples"])
@checked
class ImplicitQNetwork(nn.Module):
    """Maps time steps to quantiles of the return at random probabilities, `[..., A, 2 N]`.

    The last dimension holds N returns, then their N probabilities, which are the same for all actions (see
    `ImplicitQuantiles`). The network embeds the cosines of multiples of each probability. The input of the MLP is the
    product of the features and the embedding.

    Args:
      observation_spec: nest of spaces.
      num_actions: number of actions, A.
      torso: class or factory of the torso; called with the observation spec.
      mlp: class or factory of the MLP; called with the torso's output size.
      num_cosines: number of cosines in the embedding.
      num_samples: number of samples, N. It is set by the algorithm.

    Raises:
      UsageError: the algorithm does not set `num_samples`, because its values are not `ImplicitQuantiles`.

    Source: Dabney et al., 2018, eq. 4, https://arxiv.org/abs/1806.06923.
    """

    multiples: torch.Tensor  # [num_cosines], multiples of pi

    def __init__(
        self,
        observation_spec: Nest,
        num_actions: PositiveInt,
        torso: Callable[[Nest], Any] = Torso,
        mlp: Callable[[int], Any] = MLP,
        num_cosines: PositiveInt = 64,
        num_samples: PositiveInt | None = None,
    ):
        super().__init__()
        if num_samples is None:
            raise UsageError(
                "ImplicitQNetwork predicts only @ImplicitQuantiles; set the algorithm's values to @ImplicitQuantiles, "
                "or its network to @QNetwork"
            )
        self._num_samples = num_samples
        self.torso: Any = build_torso(torso, "ImplicitQNetwork.torso", observation_spec)
        self.embedding = linear(num_cosines, self.torso.output_size)
        self.mlp: Any = build_network(mlp, "ImplicitQNetwork.mlp", self.torso.output_size)
        self.quantiles = linear(self.mlp.output_size, num_actions, 1.0)
        self.register_buffer("multiples", torch.pi * torch.arange(1, num_cosines + 1), persistent=False)

    def initial_state(self, batch_size: int) -> Nest:
        return self.torso.initial_state(batch_size)

    def forward(self, time_step: TimeStep, state: Nest) -> tuple[torch.Tensor, Nest]:
        """Returns quantiles with their probabilities, and the next state."""
        features, state = self.torso(time_step, state)
        leading, count = features.shape[:-1], self._num_samples
        if self.training:
            probability = torch.rand(*leading, count, 1, device=features.device)
        else:
            probability = ((torch.arange(count, device=features.device) + 0.5) / count).unsqueeze(-1)
            probability = probability.expand(*leading, count, 1)
        embedded = self.embedding((probability * self.multiples).cos()).relu()
        quantiles = self.quantiles(self.mlp(features.unsqueeze(-2) * embedded)).mT  # [..., A, N]
        return torch.cat([quantiles, probability.mT.expand_as(quantiles)], -1), state
