"""Ensembles of critics: action values of Box actions, of Discrete ones, or of both together."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import gin
import torch
from torch import nn

from alfish.data import TimeStep
from alfish.nest import Nest
from alfish.networks.bodies.batch_norm import BatchNorm, Moments
from alfish.networks.bodies.ensembles import EnsembleLayerNorm, EnsembleLinear, UnitEnsembleLinear
from alfish.networks.bodies.residual import OF_MEMBERS, WITH_MOMENTS, made_body
from alfish.networks.encoders import Encoder
from alfish.networks.layers import ACTIVATIONS
from alfish.parameters import LayerSize, NonNegativeInt, PositiveInt, Range, checked
from alfish.parameters.parts import build_memory, build_network


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
      norm: normalize at each activation, by the 'layer' (as RLPD and DroQ do) or by the 'batch', see `MLP`; each critic
        has statistics of its own.
      norm_after: normalize after each activation, not before.
      bias: whether hidden linear layers have one.
      unit_rows: the weights of each output, those of the last layer too, have norm 1, see `UnitRows`.
      body: takes its input size and E (`@Residual`), in place of `layers` and all that is said of them; None: none.
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
        norm: Literal["layer", "batch"] | None = None,
        norm_after: bool = False,
        bias: bool = True,
        unit_rows: bool = False,
        body: Callable[[int, int], Any] | None = None,
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
        modules: list[nn.Module] = [BatchNorm(size, ensemble_size)] if norm == "batch" else []
        make_norm = {"layer": EnsembleLayerNorm, "batch": BatchNorm}.get(norm or "")
        linear = UnitEnsembleLinear if unit_rows else EnsembleLinear
        if body is not None:
            modules, size, layers = *made_body(body, size, ensemble_size), ()
        for width in layers:
            modules.append(linear(ensemble_size, size, width, has_bias=bias))
            modules += [nn.Dropout(dropout)] if dropout else []
            norms = [] if make_norm is None else [make_norm(width, ensemble_size)]
            active = ACTIVATIONS[activation]()
            modules += [active, *norms] if norm_after else [*norms, active]
            size = width
        self.body = nn.Sequential(*modules, linear(ensemble_size, size, math.prod(self._outputs), 1.0))

    def initial_state(self, batch_size: int) -> Nest:
        """Returns the memory's initial state; None without memory."""
        return None if self.memory is None else self.memory.initial_state(batch_size)

    def features(self, time_step: TimeStep, state: Nest) -> tuple[torch.Tensor, Nest]:
        """Returns the critics' inputs, `[..., feature_size]`, and the next state."""
        features = self.encoder(time_step.observation)
        return (features, state) if self.memory is None else self.memory(features, state, time_step.step_type)

    def forward(
        self,
        features: torch.Tensor,
        action: torch.Tensor | None = None,
        num_members: int | None = None,
        moments: Moments | None = None,
    ) -> torch.Tensor:
        """Returns action values `[E, ..., num_outputs, K]`, without num_outputs if it is 1, and K if it is None.

        Args:
          features: `[..., feature_size]`.
          action: `[..., action_size]`.
          num_members: number of critics to evaluate, from the first; None: all E.
          moments: batch norms use the statistics of this batch; None: their running ones.
        """
        x = features if action is None else torch.cat([features, action], -1)
        leading, x = x.shape[:-1], x.reshape(-1, x.shape[-1])
        for module in self.body:
            if moments is not None and isinstance(module, WITH_MOMENTS):
                x = module(x, moments)
            else:
                x = module(x, num_members=num_members) if isinstance(module, OF_MEMBERS) else module(x)
        return x.reshape(len(x), *leading, *self._outputs)


ONE_CRITIC = functools.partial(CriticEnsemble, ensemble_size=1)
