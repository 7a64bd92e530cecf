"""Models of the environment's steps: the intrinsic curiosity module, and a representation learned in the same way.

Pathak et al., 2017, https://arxiv.org/abs/1705.05363. Features phi(s) are learned by an inverse model, which predicts
the action of a step from phi(s) and phi(s'). The features therefore describe what actions change, and leave out
everything else. A forward model predicts phi(s') from phi(s) and the action; its error is the reward of the curiosity
module.

Differences from the paper: the forward loss does not train phi(s) and phi(s'), as in ALF; features are normalized
(layer norm), so that errors have one scale.
"""

from collections.abc import Callable, Sequence
from typing import Any

import gin
import torch
from torch import nn

from alfish.algorithms.composition.part import Representation, RewardPart, Transitions
from alfish.data import LossInfo
from alfish.functional import losses
from alfish.nest import Nest
from alfish.networks import MLP, Encoder, PolicyHead
from alfish.networks.layers import orthogonal
from alfish.parameters import FiniteFloat, LayerSize, UnitInterval, checked
from alfish.parameters.parts import build_network
from alfish.parameters.schedules import Schedule


class DynamicsModel(nn.Module):
    """Features of observations, an inverse model of actions, and a forward model of features.

    Args:
      observation_spec: nest of spaces.
      action_spec: canonical spec of the actions, see `alfish.specs`.
      encoder: class or factory of the observation encoder; called with the observation spec.
      layers: sizes of the hidden layers between encoder and features, and of the hidden layers of both models.
      num_features: number of features in phi.
    """

    def __init__(
        self,
        observation_spec: Nest,
        action_spec: Nest,
        encoder: Callable[[Nest], Any],
        layers: Sequence[int],
        num_features: int,
    ):
        super().__init__()
        encoded = build_network(encoder, "the encoder of a dynamics model", observation_spec)
        self.features = nn.Sequential(
            encoded, _mlp(encoded.output_size, layers, num_features), nn.LayerNorm(num_features)
        )
        self._action_code = Encoder(action_spec, image=None, vector=None, discrete=None, leaves=None, sees_mask=False)
        self.forward_model = _mlp(num_features + self._action_code.output_size, layers, num_features)
        inverse = MLP(2 * num_features, layers=layers, activation="relu", norm=None)
        # Box entries have a standard deviation of 1, so their negative log-density is half the squared error plus a
        # constant.
        head = PolicyHead(
            inverse.output_size, action_spec, gain=0.01, initial_log_std=0.0, min_log_std=None, learn_std=False
        )
        self.inverse_model = nn.Sequential(inverse, head)

    def loss(self, transitions: Transitions, forward_fraction: float, trains_features: bool) -> LossInfo:
        """Returns the weighted mean `[...]` of the losses of the forward model and the inverse model.

        Args:
          transitions: steps of the environment.
          forward_fraction: weight f of the forward model's loss, in [0, 1]; the inverse loss has weight 1 - f.
          trains_features: whether the forward model's loss also trains phi(s), the input of the forward model.
        """
        now, later = map(self.features, (transitions.observation, transitions.next_observation))
        inverse = self.inverse_loss(now, later, transitions.action)
        forward = self.forward_error(now if trains_features else now.detach(), later.detach(), transitions.action)
        loss = forward_fraction * forward + (1 - forward_fraction) * inverse
        return LossInfo(loss, extra={"inverse_loss": inverse, "forward_error": forward})

    def inverse_loss(self, features: torch.Tensor, next_features: torch.Tensor, action: Nest) -> torch.Tensor:
        """Returns -log p(action | features, next_features), `[...]`."""
        return -self.inverse_model(torch.cat([features, next_features], -1)).log_prob(action)

    def forward_error(self, features: torch.Tensor, next_features: torch.Tensor, action: Nest) -> torch.Tensor:
        """Returns half the mean squared error of the predicted features, `[...]`."""
        predicted = self.forward_model(torch.cat([features, self._action_code(action)], -1))
        return losses.half_squared(predicted - next_features).mean(-1)


@gin.configurable(module="alfish.composition")
@checked
class ICM(RewardPart):
    """Intrinsic curiosity: the error of predicting the features of the next observation.

        loss = forward_fraction * forward error + (1 - forward_fraction) * inverse loss

    See the module's docstring for the paper and the differences from it.

    Args:
      observation_spec, action_spec: specs of the transformed observations and of the actions, see `Part`.
      coef: weight of the reward, a number or a schedule of progress; the reward is half the mean squared error per
        feature.
      episodic: whether returns of this reward end with the episode, see `RewardPart`.
      encoder: class or factory of the observation encoder; called with the observation spec.
      layers: sizes of the hidden layers of the features and of both models.
      num_features: number of features of an observation.
      forward_fraction: weight f of the forward model's loss, in [0, 1]; the inverse model's loss has the weight 1 - f.
    """

    def __init__(
        self,
        observation_spec: Nest,
        action_spec: Nest,
        *,
        coef: FiniteFloat | Schedule = 1.0,
        episodic: bool = True,
        encoder: Callable[[Nest], Any] = Encoder,
        layers: Sequence[LayerSize] = (64,),
        num_features: LayerSize = 32,
        forward_fraction: UnitInterval = 0.2,
    ):
        super().__init__(observation_spec, action_spec, coef, episodic)
        self.model = DynamicsModel(observation_spec, action_spec, encoder, layers, num_features)
        self._forward_fraction = forward_fraction

    def reward(self, transitions: Transitions) -> torch.Tensor:
        now, later = map(self.model.features, (transitions.observation, transitions.next_observation))
        return self.model.forward_error(now, later, transitions.action)

    def loss(self, transitions: Transitions) -> LossInfo:
        return self.model.loss(transitions, self._forward_fraction, trains_features=False)


@gin.configurable(module="alfish.composition")
@checked
class DynamicsFeatures(Representation):
    """Features that are trained by an inverse model and a forward model.

    The forward model's target has no gradient, and the inverse model prevents constant features. See the module's
    docstring for the paper.

    Args:
      observation_spec, action_spec: specs of the transformed observations and of the actions, see `Part`.
      encoder: class or factory of the observation encoder; called with the observation spec.
      layers: sizes of the hidden layers of the features and of both models.
      num_features: number of features of an observation.
      forward_fraction: weight f of the forward model's loss, in [0, 1]; the inverse model's loss has the weight 1 - f.
    """

    def __init__(
        self,
        observation_spec: Nest,
        action_spec: Nest,
        *,
        encoder: Callable[[Nest], Any] = Encoder,
        layers: Sequence[LayerSize] = (64,),
        num_features: LayerSize = 32,
        forward_fraction: UnitInterval = 0.5,
    ):
        super().__init__(observation_spec, action_spec)
        self.model = DynamicsModel(observation_spec, action_spec, encoder, layers, num_features)
        self.output_size, self._forward_fraction = num_features, forward_fraction

    def forward(self, observation: Nest) -> torch.Tensor:
        return self.model.features(observation)

    def loss(self, transitions: Transitions) -> LossInfo:
        return self.model.loss(transitions, self._forward_fraction, trains_features=True)


def _mlp(input_size: int, layers: Sequence[int], output_size: int) -> nn.Sequential:
    mlp = MLP(input_size, layers=layers, activation="relu", norm=None)
    return nn.Sequential(mlp, orthogonal(nn.Linear(mlp.output_size, output_size), 1.0))
