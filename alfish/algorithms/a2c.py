"""Advantage actor-critic: one policy gradient step on each unroll.

Mnih et al., 2016, https://arxiv.org/abs/1602.01783, algorithm S3, with synchronous environments in place of
asynchronous threads, and lambda-returns, of which the paper's n-step return is lambda 1.

Differs from the paper: a truncated episode is bootstrapped from its true final observation.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import gin
import torch
from gymnasium import spaces

from alfish import losses, returns
from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.data import AlgStep, Experience, LossInfo, TimeStep, trainable
from alfish.nest import Nest
from alfish.networks import ActorCritic, PolicyValue
from alfish.parameters import FiniteFloat, NonNegativeFloat, UnitInterval, checked
from alfish.schedules import Schedule, as_schedule


class A2CTarget(NamedTuple):
    advantage: torch.Tensor  # [T, B], summed over R
    target: torch.Tensor  # [T, B], or [T, B, R] for vector rewards


@gin.configurable(module="alfish.algorithms")
@checked
class A2C(RLAlgorithm):
    """Advantage actor-critic; the paper, and how it differs from it, are in the module's docstring.

    Args:
      network: takes the three specs, has `policy`, `value` and both at once, and the `initial_state` of its memory.
      gamma: discount per environment step.
      lambda_: of the return; 1 reaches to the end of the unroll.
      value_coef, entropy_coef: weights of the value loss (half a squared error) and of the entropy bonus (nats); the
        latter may be a schedule.
      normalize_advantage: to mean 0 and standard deviation 1 over the unroll.
    """

    on_policy = True

    def __init__(
        self,
        observation_spec: Nest,
        action_spec: Nest,
        reward_spec: spaces.Box,
        *,
        network: Callable[..., Any] = ActorCritic,
        gamma: UnitInterval = 0.99,
        lambda_: UnitInterval = 1.0,
        value_coef: NonNegativeFloat = 0.5,
        entropy_coef: FiniteFloat | Schedule = 0.01,
        normalize_advantage: bool = False,
    ):
        super().__init__(observation_spec, action_spec, reward_spec)
        self.network: Any = network(observation_spec, action_spec, reward_spec)
        self._gamma, self._lambda = gamma, lambda_
        self._value_coef, self._entropy_coef = value_coef, as_schedule(entropy_coef)
        self._normalize_advantage = normalize_advantage

    def initial_state(self, batch_size: int) -> Nest:
        return self.network.initial_state(batch_size)

    def rollout_step(self, time_step: TimeStep, state: Nest) -> AlgStep:
        policy, state = self.network.policy(time_step, state)
        return AlgStep(policy.sample(), state)

    def predict_step(self, time_step: TimeStep, state: Nest) -> AlgStep:
        policy, state = self.network.policy(time_step, state)
        return AlgStep(policy.mode(), state)

    def preprocess_experience(self, experience: Experience) -> Experience:
        step = experience.time_step  # [T+1, B]
        value = self.network.value(step, experience.state)
        advantage = returns.gae(step.reward, self._gamma * step.discount, value, step.step_type, self._lambda)
        target = advantage + value[:-1]
        if self.reward_spec.shape:
            advantage = advantage.sum(-1)
        if self._normalize_advantage:
            advantage = returns.standardize(advantage, trainable(step.step_type))
        return experience._replace(info=A2CTarget(advantage, target))

    def train_step(self, experience: Experience, state: Nest) -> AlgStep:
        info, state = self.network(experience.time_step, state)
        return AlgStep(state=state, info=PolicyValue(*info))

    def calc_loss(self, experience: Experience, info: PolicyValue) -> LossInfo:
        policy_loss = -info.policy.log_prob(experience.action) * experience.info.advantage
        value_loss = losses.squared(info.value - experience.info.target)
        if self.reward_spec.shape:
            value_loss = value_loss.sum(-1)
        entropy = info.policy.entropy()
        loss = policy_loss + self._value_coef * value_loss - self._entropy_coef(self.progress) * entropy
        extra = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}
        return LossInfo(loss, extra={name: value.detach() for name, value in extra.items()})
