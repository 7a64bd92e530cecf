"""Random network distillation: a reward for observations that differ from earlier observations.

Burda et al., 2019, https://arxiv.org/abs/1810.12894. A network is trained to predict the output of a fixed random
network. The reward is the prediction error, which is large at new observations.

Differences from the paper: statistics are updated after the gradient steps of an iteration, with the errors at that
time; statistics start from the first rows of training instead of random steps; all frames of a stack are normalized,
not only the last.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import gin
import numpy as np
import torch
from gymnasium import spaces
from torch import nn

from alfish import nest
from alfish.algorithms.composition.part import RewardPart, Transitions
from alfish.data import Experience, LossInfo, StepType, TimeStep
from alfish.errors import UsageError
from alfish.functional import losses
from alfish.nest import Nest
from alfish.networks import MLP, Encoder
from alfish.networks.layers import orthogonal
from alfish.parameters import FiniteFloat, LayerSize, PositiveFloat, Rate, UnitInterval, checked
from alfish.parameters.parts import build_network
from alfish.parameters.schedules import Schedule
from alfish.transforms import ObservationNormalizer, RewardNormalizer

UNBOUNDED = 1e30  # a limit so large that a normalizer clips nothing


@gin.configurable(module="alfish.composition")
@checked
class RND(RewardPart):
    """Random network distillation; see the module's docstring for the paper and the differences from it.

        r = 1/2 |f(s') - g(s')|^2 / standard deviation of the discounted returns of r,   f fixed, g trained

    Args:
      observation_spec, action_spec: specs of the transformed observations and of the actions, see `Part`.
      coef: weight of the reward; a number or a schedule of progress.
      episodic: whether returns of this reward end with the episode, see `RewardPart`.
      encoder: class or factory of both networks' encoders; called with the spec of normalized observations.
      layers: sizes of the fixed network's hidden layers; the trained network has two more layers of the last size.
      output_size: number of outputs of both networks.
      gamma: discount per environment step, for the returns whose standard deviation scales the reward.
      clip: largest absolute entry of a normalized observation.
      trained_fraction: fraction of each minibatch's rows, drawn at random, that train the predictor, in (0, 1].
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
        output_size: LayerSize = 64,
        gamma: UnitInterval = 0.99,
        clip: PositiveFloat = 5.0,
        trained_fraction: Rate = 0.25,
    ):
        super().__init__(observation_spec, action_spec, coef, episodic)
        seen = self._float_specs = nest.map(_float_spec, observation_spec)
        reward_spec = spaces.Box(-np.inf, np.inf, (), np.float32)
        self.normalizer = None
        if any(isinstance(leaf, spaces.Box) for leaf in nest.leaves(seen)):
            self.normalizer = ObservationNormalizer(seen, reward_spec, leaves=("*",), clip=clip, epsilon=1e-8)
            seen = self.normalizer.observation_spec
        self.scale = RewardNormalizer(seen, reward_spec, gamma=gamma, clip=UNBOUNDED, epsilon=1e-8)
        if not layers:
            raise UsageError("RND.layers is empty; give the networks a hidden layer, for example (64,)")
        make = functools.partial(build_network, encoder, "RND.encoder", seen)
        self.target = _network(make(), layers, output_size).requires_grad_(False)
        self.predictor = _network(make(), [*layers, layers[-1], layers[-1]], output_size)
        self._trained_fraction = trained_fraction

    def reward(self, transitions: Transitions) -> torch.Tensor:
        return self.scale.normalize(self._error(transitions.next_observation))

    def loss(self, transitions: Transitions) -> LossInfo:
        error = self._error(transitions.next_observation)
        trains = torch.rand_like(error) < self._trained_fraction
        return LossInfo(torch.where(trains, error, 0) / self._trained_fraction, extra={"error": error})

    def after_iteration(self, experience: Experience, num_seen: int) -> None:
        time_step: TimeStep = nest.at(experience.time_step, slice(num_seen, None))
        error, step_type = self._error(time_step.observation), time_step.step_type
        if not self.episodic:  # returns continue across episodes, so every row counts
            step_type = torch.where(step_type == StepType.PAD, step_type, StepType.MID)
        self.scale.observe(time_step._replace(reward=error, step_type=step_type))
        if self.normalizer is not None:
            self.normalizer.observe(time_step._replace(observation=self._floats(time_step.observation)))

    def _error(self, observation: Nest) -> torch.Tensor:
        """Returns half the squared distance of the two networks' outputs, `[...]`."""
        seen = self._floats(observation)
        if self.normalizer is not None:
            seen = self.normalizer.normalize(seen)
        return losses.half_squared(self.predictor(seen) - self.target(seen)).sum(-1)

    def _floats(self, observation: Nest) -> Nest:
        """Returns the observation with integer Boxes converted to float32."""
        return nest.map(
            lambda spec, leaf: leaf.float() if isinstance(spec, spaces.Box) else leaf, self._float_specs, observation
        )


def _float_spec(spec: spaces.Space) -> spaces.Space:
    return spaces.Box(-np.inf, np.inf, spec.shape, np.float32) if isinstance(spec, spaces.Box) else spec


def _network(encoder: Any, layers: Sequence[int], output_size: int) -> nn.Sequential:
    mlp = MLP(encoder.output_size, layers=layers, activation="relu", norm=None)
    return nn.Sequential(encoder, mlp, orthogonal(nn.Linear(mlp.output_size, output_size)))
