"""The base of on-policy algorithms with a policy and a value: acting, advantages, and the sum of the losses."""

from collections.abc import Callable
from typing import Any

import torch
from gymnasium import spaces

from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.data import AlgStep, Experience, LossInfo, TimeStep, trainable
from alfish.functional import returns
from alfish.functional.distributions import Distribution
from alfish.functional.values import Discount, RewardWeights, values_of
from alfish.nest import Nest
from alfish.networks import PolicyValue
from alfish.parameters.parts import build_policy_value
from alfish.parameters.schedules import Schedule, as_schedule


class ActorCriticAlgorithm(RLAlgorithm):
    """An on-policy algorithm with one network; a subclass adds `preprocess_experience` and `calc_loss`.

    Subclasses set the defaults, and describe the arguments.
    """

    on_policy = True
    feature_module = "network.actor_torso"

    def __init__(
        self,
        observation_spec: Nest,
        action_spec: Nest,
        reward_spec: spaces.Box,
        *,
        network: Callable[..., Any],
        gamma: Discount,
        lambda_: float,
        value_coef: float,
        entropy_coef: float | Schedule,
        normalize_advantage: bool,
        reward_weights: RewardWeights | None,
    ):
        super().__init__(observation_spec, action_spec, reward_spec)
        self.network: Any = build_policy_value(
            network, f"{type(self).__name__}.network", observation_spec, action_spec, reward_spec
        )
        self.values = values_of(self, reward_spec, gamma, reward_weights)
        self._lambda, self._normalize_advantage = lambda_, normalize_advantage
        self._value_coef = value_coef
        self._entropy_coef = None if entropy_coef == 0 else as_schedule(entropy_coef)

    def initial_state(self, batch_size: int) -> Nest:
        return self.network.initial_state(batch_size)

    def rollout_step(self, time_step: TimeStep, state: Nest) -> AlgStep:
        policy, state = self.network.policy(time_step, state)
        return AlgStep(policy.sample(), state)

    def predict_step(self, time_step: TimeStep, state: Nest) -> AlgStep:
        policy, state = self.network.policy(time_step, state)
        return AlgStep(policy.mode(), state)

    def state_value(self, time_step: TimeStep, state: Nest) -> torch.Tensor:
        """Returns the values `[B]` of rows `[B]`."""
        return self.values.scalarized(self.network.value(time_step, state))

    def log_prob(self, time_step: TimeStep, action: Nest) -> torch.Tensor:
        return self.network.policy(time_step, None)[0].log_prob(action)

    def train_step(self, experience: Experience, state: Nest) -> AlgStep:
        info, _ = self.network(experience.time_step, state)
        return AlgStep(info=PolicyValue(*info))

    def advantage_and_value(self, experience: Experience) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns generalised advantages `[T, B]`, and values `[T+1, B]`; `[..., R]` for vector rewards."""
        step = experience.time_step  # [T+1, B]
        value = self.network.value(step, experience.state)
        reward, discount = self.values.reward_and_discount(step)  # the discount includes gamma
        advantage = returns.gae(reward, discount, value, step.step_type, self._lambda)
        return advantage, value

    def policy_advantage(self, advantage: torch.Tensor, step_type: torch.Tensor) -> torch.Tensor:
        """Returns the `[T, B]` advantages of the policy loss: scalarized, and normalized if `normalize_advantage`."""
        advantage = self.values.scalarized(advantage)
        if self._normalize_advantage:
            advantage = returns.standardize(advantage, trainable(step_type))
        return advantage

    def total_loss(self, policy_loss: torch.Tensor, value_loss: torch.Tensor, policy: Distribution) -> LossInfo:
        """Returns the weighted sum of the losses, minus the entropy bonus; `value_loss` is `[T, N]` or `[T, N, R]`."""
        value_loss = self.values.total(value_loss)
        entropy = policy.entropy()
        loss = policy_loss + self._value_coef * value_loss
        if self._entropy_coef is not None:
            loss = loss - self._entropy_coef(self.progress) * entropy
        return LossInfo(loss, extra={"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy})
