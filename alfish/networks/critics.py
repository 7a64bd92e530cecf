"""Ensembles of critics: action values of Box actions, of Discrete actions, or of both together.

A `PredictiveCritic` also predicts the features of the next row.
"""

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
from alfish.networks.bodies.batch_norm import BatchNorm, Moments
from alfish.networks.bodies.residual import (
    OF_MEMBERS,
    WITH_MOMENTS,
    EnsembleLayerNorm,
    EnsembleLinear,
    UnitEnsembleLinear,
    made_body,
)
from alfish.networks.encoders import Encoder
from alfish.networks.layers import ACTIVATIONS, MLP, linear
from alfish.parameters import LayerSize, NonNegativeInt, PositiveInt, Range, checked
from alfish.parameters.parts import build_memory, build_network


@gin.configurable(module="alfish.networks", denylist=["memory", "num_values"])
@checked
class CriticEnsemble(nn.Module):
    """E critics Q(observation, action), computed as batched products.

    The critics share the encoder and the memory. Each critic has separate hidden layers.

    Args:
      observation_spec: nest of spaces.
      action_size: number of action entries in the inputs, 0 or more.
      num_outputs: number of outputs: 1, or one for each Discrete action.
      ensemble_size: number of critics, E.
      layers: number of features of each hidden layer.
      activation: name of the activation, one of `ACTIVATIONS`.
      norm: kind of normalization at each activation, see `MLP`: 'layer' (as in RLPD and DroQ), 'batch' (with separate
        statistics for each critic), or None.
      norm_after: whether to normalize after each activation instead of before.
      bias: whether hidden linear layers have a bias.
      unit_rows: whether the weights of each output, also of the last layer, have norm 1, see `UnitRows`.
      body: class or factory of hidden layers (`@Residual`); called with the input size and E. The body replaces
        `layers` and the settings of these layers; None means that `layers` are used.
      dropout: fraction of features dropped after each hidden linear layer, as in DroQ.
      encoder: class or factory of the encoder; called with the observation spec.
      memory: class or factory of the memory; called with the encoder's output size. None means no memory. It is set by
        the algorithm: `RecurrentSAC.memory`.
      num_values: number of outputs K that represent one value (see `alfish.functional.values`); None means one output.
        It is set by the algorithm.
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
        """Returns action values `[E, ..., num_outputs, K]`; num_outputs is left out if it is 1, and K if it is None.

        Args:
          features: features `[..., feature_size]`.
          action: actions `[..., action_size]`.
          num_members: number of critics to evaluate, from the first; None means all E critics.
          moments: collector of statistics; batch norms then use the statistics of the batch. None means running
            statistics.
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


# Weight of the initial distribution in the logits, so large that initial values are close to its mean.
INITIAL_WEIGHT = 40.0


@gin.configurable(module="alfish.networks", denylist=["initial", "predicts"])
@checked
class PredictiveCritic(nn.Module):
    """Maps observations and actions to features, and features to the K logits of a value (`values.Bins`).

        features   = linear(mlp(observation, action))
        value      = linear(mlp(swish(features))) + 40 initial
        prediction = linear(mlp(swish(features)))            of the features of the next row

    The three MLPs have separate weights. The prediction trains the features where values provide little gradient.

    Args:
      observation_spec: nest of spaces.
      action_size: number of action entries.
      encoder: class or factory of the encoder; called with the observation spec.
      mlp: class or factory of the MLPs; called with the number of inputs. The output size of the first MLP is the
        number of features.
      initial: initial probabilities `[K]` of a value, before learning. It is set by the algorithm.
      predicts: whether the critic makes the prediction. It is set by the algorithm.

    Source: Voelcker et al., 2025, section 4, https://arxiv.org/abs/2507.11019.
    """

    def __init__(
        self,
        observation_spec: Nest,
        action_size: PositiveInt,
        initial: torch.Tensor,
        predicts: bool,
        encoder: Callable[[Nest], Any] = Encoder,
        mlp: Callable[[int], Any] = MLP,
    ):
        super().__init__()
        self.encoder: Any = build_network(encoder, "PredictiveCritic.encoder", observation_spec)
        self.feature_mlp: Any = self._mlp(mlp, self.encoder.output_size + action_size)
        size: int = self.feature_mlp.output_size
        self.feature_layer = linear(size, size, 1.0)
        self.value_mlp = self._mlp(mlp, size)
        self.value_layer = linear(self.value_mlp.output_size, len(initial), 1.0)
        self.initial = nn.Parameter(initial.clone())
        self.predictor = nn.Sequential()
        if predicts:
            predictor_mlp = self._mlp(mlp, size)
            self.predictor = nn.Sequential(predictor_mlp, linear(predictor_mlp.output_size, size, 1.0))

    def features(self, observation: Nest, action: torch.Tensor) -> torch.Tensor:
        """Returns features `[..., F]` of observations and actions `[..., A]`."""
        return self.feature_layer(self.feature_mlp(torch.cat([self.encoder(observation), action], -1)))

    def value(self, features: torch.Tensor) -> torch.Tensor:
        """Returns the logits of values, `[..., K]` from `[..., F]`."""
        return self.value_layer(self.value_mlp(F.silu(features))) + INITIAL_WEIGHT * self.initial

    def prediction(self, features: torch.Tensor) -> torch.Tensor:
        """Returns the predicted features of the next row, `[..., F]` from `[..., F]`."""
        return self.predictor(F.silu(features))

    def forward(self, observation: Nest, action: torch.Tensor) -> torch.Tensor:
        """Returns the logits of values, `[..., K]`."""
        return self.value(self.features(observation, action))

    def _mlp(self, make: Callable[[int], Any], input_size: int) -> Any:
        return build_network(make, "PredictiveCritic.mlp", input_size)
