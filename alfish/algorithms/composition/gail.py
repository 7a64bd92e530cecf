"""Generative adversarial imitation: the reward comes from a discriminator of the expert's and the policy's steps.

Ho & Ermon, 2016, https://arxiv.org/abs/1606.03476. The discriminator's logit L(s, a) is trained with label 1 for the
expert's steps and 0 for the policy's steps. The logit is high for steps that the expert is likely to make.

Differences from the paper: any algorithm may train the policy; the discriminator makes one gradient step in each update
of the algorithm, on the minibatch and an equal number of the expert's steps; inputs and rewards are normalized.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import gin
import torch
import torch.nn.functional as F
from absl import logging

from alfish.algorithms.composition.learned_reward import LearnedReward
from alfish.algorithms.composition.part import Transitions
from alfish.data import LossInfo
from alfish.nest import Nest
from alfish.networks import Encoder
from alfish.offline import OfflineBuffer
from alfish.parameters import FiniteFloat, LayerSize, NonNegativeFloat, PositiveFloat, UnitInterval, checked
from alfish.parameters.schedules import Schedule

REWARDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softplus": F.softplus,  # -log(1 - D), positive
    "log_ratio": torch.positive,  # the logit itself, log D - log(1 - D), of either sign
    "negative": F.logsigmoid,  # log D, negative
}


@gin.configurable(module="alfish.composition")
@checked
class GAIL(LearnedReward):
    """Generative adversarial imitation; see the module's docstring for the paper and the differences from it.

    `Composed.extrinsic_coef = 0` leaves the environment's reward out; metrics and evaluations keep it.

    Args:
      observation_spec, action_spec: specs of observations and actions, see `Part`. Observations must have the format of
        the data, so no transform may change them.
      demonstrations: class or factory of the expert's episodes, an `OfflineBuffer`.
      coef: weight of the reward; a number or a schedule of progress.
      reward: reward as a function of D, the probability that a step is the expert's. 'softplus' is -log(1 - D), which
        is positive and favours long episodes. 'negative' is log D, which favours short episodes. 'log_ratio' is the sum
        of these two, the logit.
      encoder: class or factory of the encoder; called with the spec of the normalized {'action', 'observation'}.
      layers: sizes of the discriminator's hidden layers.
      gradient_penalty: weight of the penalty (|gradient of the logit| - 1)^2, at random interpolations between inputs
        of expert and policy; 0 means no penalty.
      normalize_reward: whether rewards are divided by the standard deviation of their discounted returns.
      gamma: discount per environment step, for the returns of `normalize_reward`.
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
        super().__init__(
            observation_spec, action_spec, demonstrations=demonstrations, coef=coef, encoder=encoder,
            normalize_reward=normalize_reward, gamma=gamma, clip=clip,
        )  # fmt: skip
        self._reward, self._gradient_penalty = REWARDS[reward], gradient_penalty
        self.discriminator = self.make_network(layers)
        if self.demonstrations.lengths:
            self._warn_of_lengths(reward)

    def raw_reward(self, observation: Nest, action: Nest, trains: torch.Tensor | None) -> torch.Tensor:
        return self._reward(self._logit(self._features(observation, action)))

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

    def _warn_of_lengths(self, reward: str) -> None:
        """Warns if the reward favours long or short episodes and the demonstrations' episodes differ in length."""
        lengths = self.demonstrations.lengths
        if min(lengths) != max(lengths) and reward != "log_ratio":
            longer = "longer" if reward == "softplus" else "shorter"
            logging.warning(
                "The episodes of %s have %d to %d steps, but GAIL.reward = %r favours %s episodes whatever the expert "
                "does; set GAIL.reward = 'log_ratio', or use an environment whose episodes all have the same length",
                self.demonstrations.name, min(lengths), max(lengths), reward, longer,
            )  # fmt: skip

    def _logit(self, features: torch.Tensor) -> torch.Tensor:
        return self.discriminator(features).squeeze(-1)

    def _penalty(self, policy: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
        """Returns (|gradient of the logit| - 1)^2 at a random mixture of each pair of features."""
        share = torch.rand_like(policy[..., :1])
        mixed = (share * policy + (1 - share) * expert).detach().requires_grad_()
        (slope,) = torch.autograd.grad(self._logit(mixed).sum(), mixed, create_graph=True)
        return (slope.square().sum(-1) + 1e-12).sqrt().sub(1).square()
