"""Ensembles of critics: action values of Box actions, of Discrete ones, or of both together."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import gin
import torch
import torch.nn.functional as F
from torch import nn

from alfish.data import TimeStep
from alfish.nest import Nest
from alfish.networks.encoders import Encoder
from alfish.networks.layers import ACTIVATIONS, orthogonal
from alfish.parameters import LayerSize, NonNegativeInt, PositiveInt, Range, checked
from alfish.parameters.parts import build_memory, build_network


class EnsembleLinear(nn.Module):
    """Maps `[E, N, in]`, or `[N, in]` for all, to `[E, N, out]` by E linear layers in one product."""

    def __init__(self, ensemble_size: int, input_size: int, output_size: int, gain: float = 2**0.5):
        super().__init__()
        layers: list[Any] = [orthogonal(nn.Linear(input_size, output_size), gain) for _ in range(ensemble_size)]
        self.weight = nn.Parameter(torch.stack([layer.weight.detach().T for layer in layers]))  # [E, in, out]
        self.bias = nn.Parameter(torch.zeros(ensemble_size, 1, output_size))

    def forward(self, x: torch.Tensor, num_members: int | None = None) -> torch.Tensor:
        """Returns the outputs of the first `num_members` layers; None: of all."""
        weight, bias = self.weight[:num_members], self.bias[:num_members]
        if x.ndim == 2:
            x = x.expand(len(weight), *x.shape)
        if weight.shape[-1] == 1:  # a batched product with a vector takes five times as long
            return (x * weight.mT).sum(-1, keepdim=True) + bias
        return torch.baddbmm(bias, x, weight)


class EnsembleLayerNorm(nn.Module):
    """E layer norms of `[E, N, size]`, each with a scale and an offset of its own."""

    def __init__(self, ensemble_size: int, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(ensemble_size, 1, size))
        self.bias = nn.Parameter(torch.zeros(ensemble_size, 1, size))

    def forward(self, x: torch.Tensor, num_members: int | None = None) -> torch.Tensor:
        return torch.addcmul(self.bias[:num_members], F.layer_norm(x, x.shape[-1:]), self.weight[:num_members])


@gin.configurable(module="alfish.networks", denylist=["memory", "num_values"])
@checked
class CriticEnsemble(nn.Module):
    """E critics Q(observation, action), computed as batched products.

    The critics share the encoder and the memory. Each has hidden layers of its own.

    Args:
      observation_spec: nest of spaces.
      action_size: number of action entries that are inputs, 0 or more.
      num_outputs: 1, or one for each Discrete action.
      ensemble_size: E.
      layers: features of each hidden layer.
      activation: a name of `ACTIVATIONS`.
      layer_norm: normalize before each activation (as RLPD and DroQ do).
      dropout: fraction of features dropped after each hidden linear layer (as DroQ does).
      encoder: takes the observation spec.
      memory: takes the encoder's output size; None: no memory. It is set by the algorithm: `RecurrentSAC.memory`.
      num_values: K, numbers of each value (see `alfish.values`); None: one. It is set by the algorithm.
    """

    def __init__(
        self,
        observation_spec: Nest,
        action_size: NonNegativeInt,
        num_outputs: PositiveInt = 1,
        ensemble_size: PositiveInt = 2,
        layers: Sequence[LayerSize] = (256, 256),
        activation: Literal["tanh", "relu", "elu", "silu", "gelu"] = "relu",
        layer_norm: bool = False,
        dropout: Annotated[float, Range(0, 1, below=True)] = 0.0,
        encoder: Callable[[Nest], Any] = Encoder,
        memory: Callable[[int], Any] | None = None,
        num_values: PositiveInt | None = None,
    ):
        super().__init__()
        self.encoder: Any = build_network(encoder, "CriticEnsemble.encoder", observation_spec)
        self.memory: Any = memory and build_memory(memory, "CriticEnsemble.memory", self.encoder.output_size)
        self.feature_size: int = (self.memory or self.encoder).output_size
        self.ensemble_size = ensemble_size
        self._outputs = [num_outputs] * (num_outputs > 1) + ([] if num_values is None else [num_values])
        size = self.feature_size + action_size
        modules: list[nn.Module] = []
        for width in layers:
            modules.append(EnsembleLinear(ensemble_size, size, width))
            modules += [nn.Dropout(dropout)] if dropout else []
            modules += [EnsembleLayerNorm(ensemble_size, width)] if layer_norm else []
            modules.append(ACTIVATIONS[activation]())
            size = width
        self.body = nn.Sequential(*modules, EnsembleLinear(ensemble_size, size, math.prod(self._outputs), 1.0))

    def initial_state(self, batch_size: int) -> Nest:
        """Returns the memory's initial state; None without memory."""
        return None if self.memory is None else self.memory.initial_state(batch_size)

    def features(self, time_step: TimeStep, state: Nest) -> tuple[torch.Tensor, Nest]:
        """Returns the critics' inputs, `[..., feature_size]`, and the next state."""
        features = self.encoder(time_step.observation)
        return (features, state) if self.memory is None else self.memory(features, state, time_step.step_type)

    def forward(
        self, features: torch.Tensor, action: torch.Tensor | None = None, num_members: int | None = None
    ) -> torch.Tensor:
        """Returns action values `[E, ..., num_outputs, K]`, without num_outputs if it is 1, and K if it is None.

        Args:
          features: `[..., feature_size]`.
          action: `[..., action_size]`.
          num_members: number of critics to evaluate, from the first; None: all E.
        """
        x = features if action is None else torch.cat([features, action], -1)
        leading, x = x.shape[:-1], x.reshape(-1, x.shape[-1])
        for module in self.body:
            per_member = isinstance(module, (EnsembleLinear, EnsembleLayerNorm))
            x = module(x, num_members) if per_member else module(x)
        return x.reshape(len(x), *leading, *self._outputs)


ONE_CRITIC = functools.partial(CriticEnsemble, ensemble_size=1)
