"""Generative adversarial imitation: the reward comes from a discriminator between steps of expert and policy.

Ho & Ermon, 2016, https://arxiv.org/abs/1606.03476. The discriminator's logit L(s, a) is trained on the labels 1 for the
expert's steps and 0 for the policy's, so it is high for steps that the expert is likely to make.

Differences from the paper: any algorithm may train the policy; the discriminator makes one gradient step in each update
of the algorithm, on the minibatch and an equal number of the expert's steps; inputs and rewards are normalized.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import gin
import torch
import torch.nn.functional as F
from absl import logging
from gymnasium import spaces
from torch import nn

from alfish import nest, specs
from alfish.algorithms.composition.demonstrations import Demonstrations
from alfish.algorithms.composition.part import RewardPart, Transitions
from alfish.data import Experience, LossInfo, StepType, TimeStep
from alfish.nest import Nest
from alfish.networks import MLP, Encoder
from alfish.networks.layers import orthogonal
from alfish.offline import OfflineBuffer
from alfish.parameters import FiniteFloat, LayerSize, NonNegativeFloat, PositiveFloat, UnitInterval, checked
from alfish.parameters.parts import build_network
from alfish.parameters.schedules import Schedule
from alfish.processes import replicas
from alfish.transforms import ObservationNormalizer, RewardNormalizer

REWARDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softplus": F.softplus,  # -log(1 - D), positive
    "log_ratio": lambda logit: logit,  # log D - log(1 - D), of either sign
    "negative": F.logsigmoid,  # log D, negative
}


@gin.configurable(module="alfish.composition")
@checked
class GAIL(RewardPart):
    """Generative adversarial imitation; the module's docstring has the paper and the differences from it.

    `Composed.extrinsic_coef = 0` leaves the environment's reward out; metrics and evaluations keep it.

    Args:
      observation_spec, action_spec: specs of observations and actions, see `Part`. Observations must have the format of
        the data, so no transform may change them.
      demonstrations: class or factory of the expert's episodes, an `OfflineBuffer`.
      coef: weight of the reward; a number or a schedule of progress.
      reward: function of D, the probability that a step is the expert's: 'softplus', -log(1 - D), is positive and
        favours long episodes; 'negative', log D, favours short episodes; 'log_ratio', the sum of both, is the logit.
      encoder: class or factory of the encoder, takes the spec of the normalized {'action', 'observation'}.
      layers: sizes of the discriminator's hidden layers.
      gradient_penalty: weight of (|gradient of L| - 1)^2 at random mixtures of inputs of expert and policy; 0 means no
        penalty.
      normalize_reward: whether rewards are divided by the standard deviation of their discounted returns.
      gamma: discount per environment step of the returns that `normalize_reward` uses.
      clip: largest absolute entry of a normalized input, and of a normalized reward.
    """

    def __init__(
        self,
        observation_spec: Nest,
        action_spec: Nest,
        *,
        demonstrations: Callable[..., OfflineBuffer] = OfflineBuffer,
        coef: FiniteFloat | Schedule = 1.0,
        reward: Literal["softplus", "log_ratio", "negative"] = "softplus",
        encoder: Callable[[Nest], Any] = Encoder,
        layers: Sequence[LayerSize] = (32, 32),
        gradient_penalty: NonNegativeFloat = 0.0,
        normalize_reward: bool = True,
        gamma: UnitInterval = 0.99,
        clip: PositiveFloat = 10.0,
    ):
        super().__init__(observation_spec, action_spec, coef)
        self._reward, self._gradient_penalty = REWARDS[reward], gradient_penalty
        self.demonstrations = Demonstrations(demonstrations, "GAIL.demonstrations", observation_spec, action_spec)
        sees = {"action": action_spec, "observation": observation_spec}
        scalar = specs.reward_spec()
        self.normalizer = None
        if any(map(specs.is_float, nest.leaves(sees))):
            self.normalizer = ObservationNormalizer(sees, scalar, leaves=("*",), clip=clip, epsilon=1e-8)
            sees = self.normalizer.observation_spec
        self.scale = RewardNormalizer(sees, scalar, gamma=gamma, clip=clip, epsilon=1e-8) if normalize_reward else None
        self.encoder: Any = build_network(encoder, "GAIL.encoder", sees)
        mlp = MLP(self.encoder.output_size, layers=layers, activation="relu", norm=None)
        self.discriminator = nn.Sequential(mlp, orthogonal(nn.Linear(mlp.output_size, 1), 1.0))
        if self.demonstrations.lengths:
            self._begin(reward)

    def reward(self, transitions: Transitions) -> torch.Tensor:
        reward = self._reward(self._logit(self._features(transitions.observation, transitions.action)))
        return reward if self.scale is None else self.scale.normalize(reward)

    def loss(self, transitions: Transitions) -> LossInfo:
        expert = self.demonstrations(transitions.next_discount.shape)
        features = [self._features(each.observation, each.action) for each in (transitions, expert)]
        of_policy, of_expert = map(self._logit, features)
        loss = 0.5 * (F.softplus(of_policy) + F.softplus(-of_expert))
        with torch.no_grad():
            accuracy = 0.5 * ((of_policy < 0).float() + (of_expert > 0).float())
        extra = {"accuracy": accuracy, "policy_logit": of_policy, "expert_logit": of_expert}
        if self._gradient_penalty:
            extra["gradient_penalty"] = penalty = self._penalty(*features)
            loss = loss + self._gradient_penalty * penalty
        return LossInfo(loss, extra=extra)

    def after_iteration(self, experience: Experience, num_seen: int) -> None:
        # In an on-policy unroll, the last row of each column, before any PAD rows, occurs again as an acting row of the
        # next unroll. Each acting row holds its observation and action, so a step does not need the next row.
        time_step, action = nest.at(
            (experience.time_step, experience.action), slice(0, len(experience.time_step.reward) - num_seen)
        )
        kind = time_step.step_type
        if num_seen:
            kind = torch.where(experience.time_step.step_type[num_seen:] == StepType.PAD, StepType.PAD, kind)
        acts = kind <= StepType.MID
        rows = time_step._replace(step_type=torch.where(acts, kind, StepType.PAD))
        action = nest.map(_bounded, self.action_spec, action)
        if self.scale is not None:
            reward = self._reward(self._logit(self._features(time_step.observation, action)))
            # Returns begin with the second step of an episode. A LAST row ends a return, and its reward is not read.
            kind = torch.where(kind == StepType.LAST, StepType.FIRST, kind)
            self.scale.observe(time_step._replace(reward=reward, step_type=kind))
        if self.normalizer is not None:
            self.normalizer.observe(rows._replace(observation=_inputs(time_step.observation, action)))
            expert = self.demonstrations(acts.shape)
            self.normalizer.observe(rows._replace(observation=_inputs(expert.observation, expert.action)))

    def _begin(self, reward: str) -> None:
        """Initializes the moments from the demonstrations, and warns if their episodes differ in length."""
        lengths = self.demonstrations.lengths
        if self.normalizer is not None:
            kinds = torch.full((1, sum(lengths)), StepType.MID, dtype=torch.int32)
            steps = nest.map(lambda leaf: leaf.unsqueeze(0), self.demonstrations.steps)
            rows = TimeStep(kinds, None, None, _inputs(steps.observation, steps.action), None, None)
            with replicas.apart(), torch.no_grad():  # no sums over learners, because all have the same data
                self.normalizer.observe(rows)
        if min(lengths) != max(lengths) and reward != "log_ratio":
            longer = "longer" if reward == "softplus" else "shorter"
            logging.warning(
                "The episodes of %s have %d to %d steps, but GAIL.reward = %r favours %s episodes whatever the expert "
                "does; set it to 'log_ratio', or use an environment whose episodes all have the same length",
                self.demonstrations.name, min(lengths), max(lengths), reward, longer,
            )  # fmt: skip

    def _features(self, observation: Nest, action: Nest) -> torch.Tensor:
        inputs = _inputs(observation, action)
        return self.encoder(inputs if self.normalizer is None else self.normalizer.normalize(inputs))

    def _logit(self, features: torch.Tensor) -> torch.Tensor:
        return self.discriminator(features).squeeze(-1)

    def _penalty(self, policy: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
        """Returns (|gradient of the logit| - 1)^2 at a random mixture of each pair of features."""
        share = torch.rand_like(policy[..., :1])
        mixed = (share * policy + (1 - share) * expert).detach().requires_grad_()
        (slope,) = torch.autograd.grad(self._logit(mixed).sum(), mixed, create_graph=True)
        return (slope.square().sum(-1) + 1e-12).sqrt().sub(1).square()


def _inputs(observation: Nest, action: Nest) -> Nest:
    return {"action": action, "observation": observation}


def _bounded(spec: spaces.Space, action: torch.Tensor) -> torch.Tensor:
    """Returns an action clipped to the bounds of a Box, as it is executed."""
    if not isinstance(spec, spaces.Box):
        return action
    low, high = (torch.as_tensor(bound, device=action.device) for bound in (spec.low, spec.high))
    return torch.minimum(torch.maximum(action, low), high)
