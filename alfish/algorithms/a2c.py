"""Advantage actor-critic: one policy gradient step on each unroll.

Mnih et al., 2016, https://arxiv.org/abs/1602.01783, algorithm S3.

Differences from the paper: environments step together instead of in asynchronous threads; returns are lambda-returns,
where lambda 1 is the paper's n-step return; a truncated episode bootstraps from its true final observation.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import gin
import torch
from gymnasium import spaces

from alfish.algorithms.actor_critic import ActorCriticAlgorithm
from alfish.data import Experience, LossInfo
from alfish.functional import losses
from alfish.functional.values import Discount, RewardWeights
from alfish.nest import Nest
from alfish.networks import ActorCritic, PolicyValue
from alfish.parameters import FiniteFloat, NonNegativeFloat, UnitInterval, checked
from alfish.parameters.schedules import Schedule


class A2CTarget(NamedTuple):
    advantage: torch.Tensor  # [T, B], scalarized
    target: torch.Tensor  # [T, B] targets of the value, or [T, B, R] for vector rewards


@gin.configurable(module="alfish.algorithms")
@checked
class A2C(ActorCriticAlgorithm):
    """Advantage actor-critic; see the module's docstring for the paper and the differences from it.

    Args:
      network: class or factory of the networks; called with (observation_spec, action_spec, reward_spec). The
        networks have `policy`, `value`, `forward` for policy and value together, and `initial_state`.
      gamma: discount per environment step, in [0, 1]; a list has one discount for each entry of a vector reward.
      lambda_: weight of longer returns, in [0, 1]; 1 bootstraps at the end of the unroll only.
      value_coef: weight of the value loss, which is half a squared error.
      entropy_coef: weight of the entropy (nats); a number or a schedule of progress.
      normalize_advantage: whether advantages get mean 0 and standard deviation 1 over the unroll.
      reward_weights: initial weight of each reward entry, kept in the buffer `values.weights`; None means 1 for all.
    """

    def __init__(
        self,
        observation_spec: Nest,
        action_spec: Nest,
        reward_spec: spaces.Box,
        *,
        network: Callable[..., Any] = ActorCritic,
        gamma: Discount = 0.99,
        lambda_: UnitInterval = 1.0,
        value_coef: NonNegativeFloat = 0.5,
        entropy_coef: FiniteFloat | Schedule = 0.01,
        normalize_advantage: bool = False,
        reward_weights: RewardWeights | None = None,
    ):
        super().__init__(
            observation_spec, action_spec, reward_spec, network=network, gamma=gamma, lambda_=lambda_,
            value_coef=value_coef, entropy_coef=entropy_coef, normalize_advantage=normalize_advantage,
            reward_weights=reward_weights,
        )  # fmt: skip

    def preprocess_experience(self, experience: Experience) -> Experience:
        advantage, value = self.advantage_and_value(experience)
        for_policy = self.policy_advantage(advantage, experience.time_step.step_type)
        return experience._replace(info=A2CTarget(for_policy, advantage + value[:-1]))

    def calc_loss(self, experience: Experience, info: PolicyValue) -> LossInfo:
        policy_loss = -info.policy.log_prob(experience.action) * experience.info.advantage
        value_loss = losses.half_squared(info.value - experience.info.target)
        return self.total_loss(policy_loss, value_loss, info.policy)
