"""A critic whose features also predict the features of the next row."""

from collections.abc import Callable
from typing import Any

import gin
import torch
import torch.nn.functional as F
from torch import nn

from alfish.nest import Nest
from alfish.networks.encoders import Encoder
from alfish.networks.layers import MLP, linear
from alfish.parameters import PositiveInt, checked
from alfish.parameters.parts import build_network

# Weight of the initial distribution in the logits; large, so that first values are close to its mean.
INITIAL_WEIGHT = 40.0


@gin.configurable(module="alfish.networks", denylist=["initial", "predicts"])
@checked
class PredictiveCritic(nn.Module):
    """Maps observations and actions to features, and features to the K logits of a value (see `values.Bins`).

        features   = linear(mlp(observation, action))
        value      = linear(mlp(swish(features))) + 40 initial
        prediction = linear(mlp(swish(features)))            of the features of the next row

    The three MLPs have weights of their own. Prediction trains the features where values give little gradient.

    Args:
      observation_spec: nest of spaces.
      action_size: number of action entries.
      encoder: takes the observation spec.
      mlp: takes its number of inputs; the output size of the first is the number of features.
      initial: `[K]` probabilities of the first values; they are learned. It is set by the algorithm.
      predicts: whether there is a prediction. It is set by the algorithm.

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
