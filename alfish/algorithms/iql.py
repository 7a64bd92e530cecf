"""Implicit Q-learning from recorded data: the critics evaluate recorded actions only.

Kostrikov et al., 2022, https://arxiv.org/abs/2110.06169. V is an upper expectile of Q over recorded actions. Q is
regressed to r + gamma V. The policy clones recorded actions, weighted by the exponential of their advantage. The action
space may be any space with bounds. A run may also act, and add its rows to the data. Windows of L rows give (L-1)-step
returns, without off-policy correction.

Differences from the paper: all losses are computed before any parameter is updated, where the authors' code updates V
first; the mean of a normal policy is not squashed, but clipped when it acts; a truncated episode bootstraps from its
true final observation.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import gin
import torch
from gymnasium import spaces
from torch import nn

from alfish import nest, specs
from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.data import AlgStep, Experience, LossInfo, TimeStep
from alfish.functional import losses
from alfish.functional.distributions import Distribution
from alfish.functional.targets import NextValues
from alfish.functional.values import Scalar
from alfish.nest import Nest
from alfish.networks import (
    FLOORED_HEAD,
    MLP,
    ONE_CRITIC,
    CriticEnsemble,
    Encoder,
    TargetNetwork,
    first_and_bootstrap_rows,
    head_masks,
    policy_of,
)
from alfish.networks.encoders import Flat, OneHot
from alfish.parameters import NonNegativeFloat, OpenUnitInterval, PositiveFloat, Rate, UnitInterval, checked
from alfish.parameters.parts import build_network


class IQLTrain(NamedTuple):
    """Outputs at row 0 of a window, and V at later rows."""

    q: torch.Tensor  # [E, 1, N] values of the taken action
    target_q: torch.Tensor  # [1, N] minimum of the target critics' values of the taken action
    value: torch.Tensor  # [1, N] V at row 0
    next_value: torch.Tensor  # [L-1, N] V at rows 1 to L-1, or at the bootstrap row only
    log_prob: torch.Tensor  # [1, N] log-probability of the taken action


@gin.configurable(module="alfish.algorithms")
@checked
class IQL(RLAlgorithm):
    """Implicit Q-learning; see the module's docstring for the paper and the differences from it.

    Args:
      actor_encoder: class or factory of the actor's encoder; called with the observation spec.
      actor_mlp: class or factory of the actor's MLP; called with the encoder's output size.
      policy_head: class or factory of the head; called with the MLP's output size and the action spec.
      critic: class or factory of the critic ensemble; called with (observation_spec, action_size); Discrete leaves are
        one-hot inputs.
      value: class or factory of V, an ensemble with one member; called with (observation_spec, 0): no action inputs.
      gamma: discount per environment step.
      lambda_: mixing factor of the return within a window, in [0, 1]; 1 bootstraps only at the last row, and 0 gives
        the one-step return.
      target_rate: step size of the target critics' updates, in (0, 1]; they are updated after each gradient step.
      expectile: which expectile of Q over recorded actions V estimates, in (0, 1); near 1, V estimates the maximum.
      beta: factor of the advantage in the exponential weight, in 1 / units of return; 0 means behavioural cloning.
      max_weight: upper limit of the exponential weight.
    """

    on_policy = False
    weighted_losses = None  # None weighs the losses of all groups, because each depends on how often replay draws a row

    def __init__(
        self,
        observation_spec: Nest,
        action_spec: Nest,
        reward_spec: spaces.Box,
        *,
        actor_encoder: Callable[[Nest], Any] = Encoder,
        actor_mlp: Callable[[int], Any] = MLP,
        policy_head: Callable[[int, Nest], Any] = FLOORED_HEAD,
        critic: Callable[..., Any] = CriticEnsemble,
        value: Callable[..., Any] = ONE_CRITIC,
        gamma: UnitInterval = 0.99,
        lambda_: UnitInterval = 1.0,
        target_rate: Rate = 0.005,
        expectile: OpenUnitInterval = 0.7,
        beta: NonNegativeFloat = 3.0,
        max_weight: PositiveFloat = 100.0,
    ):
        super().__init__(observation_spec, action_spec, reward_spec)
        name = type(self).__name__
        self.action_codes = nn.ModuleList(_code(leaf) for leaf in nest.leaves(action_spec))
        self.actor_encoder: Any = build_network(actor_encoder, f"{name}.actor_encoder", observation_spec)
        self.actor_mlp: Any = build_network(actor_mlp, f"{name}.actor_mlp", self.actor_encoder.output_size)
        num_features = self.actor_mlp.output_size
        self.policy_head: Any = build_network(policy_head, f"{name}.policy_head", num_features, action_spec, has=())
        self.action_masks = head_masks(self.policy_head, observation_spec, action_spec)
        action_size: Any = sum(code.output_size for code in self.action_codes)
        sizes, has = (observation_spec, action_size), ("features",)
        self.critic: Any = build_network(critic, f"{name}.critic", *sizes, has=has, takes=2)
        self.value: Any = build_network(value, f"{name}.value", observation_spec, 0, has=has)
        self.target_critic = TargetNetwork(self.critic, target_rate)
        self.values, self._lambda = Scalar(gamma), lambda_
        self._expectile, self._beta, self._max_weight = expectile, beta, max_weight

    @classmethod
    def check_specs(cls, observation_spec: Nest, action_spec: Nest, reward_spec: spaces.Box) -> None:
        for name, leaf in nest.named_leaves(action_spec, "action"):
            specs.check_bounded(f"the critics of {cls.__name__} take actions in [-1, 1]", name, leaf, "BC")
        specs.check_scalar_reward(cls.__name__, reward_spec)

    def parameter_groups(self) -> dict:
        actor = [self.actor_encoder, self.actor_mlp, self.policy_head]
        return {
            "critic": self.critic.parameters(),
            "value": self.value.parameters(),
            "actor": [p for module in actor for p in module.parameters()],
        }

    def rollout_step(self, time_step: TimeStep, state: Nest) -> AlgStep:
        return AlgStep(self._within_bounds(self.policy(time_step).sample()), state)

    def predict_step(self, time_step: TimeStep, state: Nest) -> AlgStep:
        return AlgStep(self._within_bounds(self.policy(time_step).mode()), state)

    def policy(self, time_step: TimeStep) -> Distribution:
        """Returns the policy at rows `[...]`."""
        features = self.actor_mlp(self.actor_encoder(time_step.observation))
        return policy_of(self.policy_head, features, self.action_masks, time_step.observation)

    def state_value(self, time_step: TimeStep, state: Nest) -> torch.Tensor:
        """Returns the values `[...]` of rows `[...]`."""
        return self.value(self.value.features(time_step, None)[0])[0]

    def action_values(self, critic: nn.Module, time_step: TimeStep, action: Nest) -> torch.Tensor:
        """Returns the values `[E, ...]` of actions at rows `[...]`.

        Args:
          critic: `self.critic` or `self.target_critic.network`, an ensemble of E.
          time_step: rows to evaluate.
          action: actions in the algorithm's units, Box leaves in [-1, 1].
        """
        codes = torch.cat([code(leaf) for code, leaf in zip(self.action_codes, nest.leaves(action))], -1)
        return critic(critic.features(time_step, None)[0], codes)  # type: ignore[operator]

    def train_step(self, experience: Experience, state: Nest) -> AlgStep:
        experience = first_and_bootstrap_rows(experience, self._lambda)
        now, later = nest.split(experience.time_step, 1)
        action = nest.at(experience.action, slice(0, 1))
        q = self.action_values(self.critic, now, action)
        with torch.no_grad():
            target_q = self.values.least(self.action_values(self.target_critic.network, now, action))
            next_value = self.state_value(later, None)
        log_prob = self.policy(now).log_prob(action)
        return AlgStep(info=IQLTrain(q, target_q, self.state_value(now, None), next_value, log_prob))

    def calc_loss(self, experience: Experience, info: IQLTrain) -> LossInfo:
        target = self.values.target(experience, NextValues(info.next_value), self._lambda)[:1]
        critic_loss, error = self.values.loss(info.q, target)  # [E, 1, N]
        advantage = info.target_q - info.value
        weight = (self._beta * advantage.detach()).exp().clamp(max=self._max_weight)
        loss = {
            "critic": critic_loss.sum(0),
            "value": expectile_loss(advantage, self._expectile),
            "actor": -weight * info.log_prob,
        }
        extra = {
            "q": info.q.mean(0),
            "td_error": error.mean(0),
            "value": info.value,
            "advantage": advantage,
            "weight": weight,
            "log_prob": info.log_prob,
        }
        return LossInfo(loss, extra=extra, priority=extra["td_error"])

    def after_update(self) -> None:
        self.target_critic.update(self.critic)

    def _within_bounds(self, action: Nest) -> Nest:
        """Returns the action with Box leaves clipped to [-1, 1], so that critics receive the executed action."""

        def clip(leaf: torch.Tensor, spec: spaces.Space) -> torch.Tensor:
            return leaf.clamp(-1, 1) if isinstance(spec, spaces.Box) else leaf

        return nest.map(clip, action, self.action_spec)


def expectile_loss(error: torch.Tensor, fraction: float) -> torch.Tensor:
    """Returns half the squared error, times `fraction` where the error is positive and times 1 - `fraction` elsewhere.

    With errors `target - value`, the value with the least mean loss is an expectile of the targets. The expectile is
    the mean of the targets if `fraction` is 0.5, and close to their maximum if `fraction` is near 1.

    Args:
      error: errors `[...]`.
      fraction: the expectile, in (0, 1).

    Source: Kostrikov et al., 2022, eq. 3.
    """
    return torch.where(error > 0, fraction, 1 - fraction) * losses.half_squared(error)


def _code(leaf: spaces.Space) -> nn.Module:
    """Returns the module that makes a critic's input from a leaf of the action."""
    return OneHot(leaf) if isinstance(leaf, (spaces.Discrete, spaces.MultiDiscrete)) else Flat(leaf)
