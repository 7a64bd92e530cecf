"""Proximal policy optimization: several epochs of a clipped policy gradient on each unroll.

Schulman et al., 2017, https://arxiv.org/abs/1707.06347, with generalised advantages (Schulman et al., 2016).

    policy = -min(r A, clip(r, 1 - epsilon, 1 + epsilon) A),   r = pi(a | s) / pi_old(a | s)
    value  = (V(s) - G)^2 / 2,                                 G = A + V_old(s)
    loss   = policy + value_coef value - entropy_coef entropy

`preprocess_experience` computes the advantages A of a whole unroll without gradient; see `actor_critic` and
`returns.gae`. `EpochBatches` cuts off the unroll's last row, and draws minibatches of single rows (`[1, N]`), or of
sequences (`[T, N]`) with a memory. The learner takes the mean of the loss that `calc_loss` returns for each row.

Differences from the paper: a truncated episode bootstraps from its true final observation; advantages are normalized
over all trainable rows of an unroll (OpenAI Baselines normalizes over each minibatch); the value loss has a factor 1/2.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import gin
import torch
from gymnasium import spaces

from alfish import specs
from alfish.algorithms.actor_critic import ActorCriticAlgorithm
from alfish.algorithms.rl_algorithm import UnrollUse
from alfish.data import AlgStep, Experience, LossInfo, TimeStep
from alfish.functional import losses
from alfish.functional.distributions import Distribution, uniform_kl
from alfish.functional.values import Discount, RewardWeights
from alfish.nest import Nest
from alfish.networks import ActorCritic, PolicyValue
from alfish.parameters import FiniteFloat, NonNegativeFloat, PositiveFloat, UnitInterval, checked
from alfish.parameters.schedules import Schedule, as_schedule


class PPORollout(NamedTuple):
    policy: Distribution  # [B] policy that drew the action


class PPOTarget(NamedTuple):
    """Inputs of the loss for T rows; `EpochBatches` removes the last row from fields with T + 1 rows."""

    log_prob: torch.Tensor  # [T + 1, B] log-probability of the action under the policy that drew it
    advantage: torch.Tensor  # [T, B], scalarized, and normalized if `normalize_advantage`
    target: torch.Tensor  # [T, B] target of the value, or [T, B, R] for vector rewards
    value: torch.Tensor | None  # like `target` with T + 1 rows: V_old; None without value_clip_range
    policy: Distribution | None  # [T + 1, B] policy that drew the action; None unless `measures_kl`
    extra: dict[str, torch.Tensor]  # numbers for summaries


@gin.configurable(module="alfish.algorithms")
@checked
class PPO(ActorCriticAlgorithm):
    """Proximal policy optimization; see the module's docstring for the paper and the differences from it.

    Args:
      network: class or factory of the networks; called with (observation_spec, action_spec, reward_spec). The
        networks have `policy`, `value`, `forward` for policy and value together, and `initial_state`.
      gamma: discount per environment step, in [0, 1]; a list has one discount for each entry of a vector reward.
      lambda_: weight of longer returns in the generalised advantage, in [0, 1]; 1 bootstraps only at the end of
        the unroll.
      clip_range: distance of an action's probability ratio from 1 beyond which the loss does not fall further.
      reciprocal_clip: whether the ratio is clipped below at 1 / (1 + clip_range), as in Sample Factory, instead of
        1 - clip_range.
      value_clip_range: largest change of a value that lowers the value's loss, in units of return; None means no limit.
      value_coef: weight of the value loss, which is half a squared error.
      entropy_coef: weight of the entropy (nats).
      uniform_kl_coef: weight of the symmetric KL between policy and uniform distribution (nats); only for actions
        without Box leaves. This loss maintains exploration where the entropy's gradient vanishes.
      target_kl: target of KL(rollout policy, policy) in nats; the iteration ends when the KL exceeds 1.5 times this
        target. None means that the iteration does not end early.
      normalize_advantage: whether advantages get mean 0 and standard deviation 1 over the unroll.
      recompute_advantage: whether each epoch recomputes advantages (Andrychowicz et al., 2021, section 3.5).
      reward_weights: initial weight of each reward entry, kept in the buffer `values.weights`; None means 1 for all.

    clip_range, value_clip_range, entropy_coef and uniform_kl_coef may be schedules of progress.
    """

    def __init__(
        self,
        observation_spec: Nest,
        action_spec: Nest,
        reward_spec: spaces.Box,
        *,
        network: Callable[..., Any] = ActorCritic,
        gamma: Discount = 0.99,
        lambda_: UnitInterval = 0.95,
        clip_range: PositiveFloat | Schedule = 0.2,
        reciprocal_clip: bool = False,
        value_clip_range: PositiveFloat | Schedule | None = None,
        value_coef: NonNegativeFloat = 0.5,
        entropy_coef: FiniteFloat | Schedule = 0.0,
        uniform_kl_coef: NonNegativeFloat | Schedule = 0.0,
        target_kl: PositiveFloat | None = None,
        normalize_advantage: bool = True,
        recompute_advantage: bool = False,
        reward_weights: RewardWeights | None = None,
    ):
        super().__init__(
            observation_spec, action_spec, reward_spec, network=network, gamma=gamma, lambda_=lambda_,
            value_coef=value_coef, entropy_coef=entropy_coef, normalize_advantage=normalize_advantage,
            reward_weights=reward_weights,
        )  # fmt: skip
        self.unroll_use = UnrollUse(single_epoch=False, preprocess_each_epoch=recompute_advantage)
        self._clip_range, self._reciprocal_clip = as_schedule(clip_range), reciprocal_clip
        self._uniform_kl_coef = None if uniform_kl_coef == 0 else as_schedule(uniform_kl_coef)
        if self._uniform_kl_coef is not None:
            specs.check_finite_choice(f"{type(self).__name__}.uniform_kl_coef", action_spec)
        self._value_clip_range = None if value_clip_range is None else as_schedule(value_clip_range)
        self._target_kl, self.measures_kl = target_kl, target_kl is not None

    def rollout_step(self, time_step: TimeStep, state: Nest) -> AlgStep:
        policy, state = self.network.policy(time_step, state)
        return AlgStep(policy.sample(), state, PPORollout(policy))

    def preprocess_experience(self, experience: Experience) -> Experience:
        advantage, value = self.advantage_and_value(experience)
        target = advantage + value[:-1]  # the lambda-return
        return self.with_target(experience, advantage, target, value)

    def with_target(
        self, experience: Experience, advantage: torch.Tensor, target: torch.Tensor, value: torch.Tensor, **extra: Any
    ) -> Experience:
        """Returns the experience with a PPOTarget as its info; `extra` is for summaries."""
        policy, step_type = experience.info.policy, experience.time_step.step_type
        info = PPOTarget(
            log_prob=policy.log_prob(experience.action),
            advantage=self.policy_advantage(advantage, step_type),
            target=target,
            value=None if self._value_clip_range is None else value,
            policy=policy if self.measures_kl else None,
            extra=extra,
        )
        return experience._replace(info=info)

    def calc_loss(self, experience: Experience, info: PolicyValue) -> LossInfo:
        stored = experience.info  # a PPOTarget
        log_prob = info.policy.log_prob(experience.action)
        policy_loss, extra = self.policy_loss(log_prob, stored)
        if self._value_clip_range is None:
            value_loss = losses.half_squared(info.value - stored.target)
        else:
            value_clip_range = self._value_clip_range(self.progress)
            value_loss = losses.clipped_value_loss(info.value, stored.value, stored.target, value_clip_range)
        with torch.no_grad():
            log_ratio = log_prob - stored.log_prob
            estimate = log_ratio.exp() - 1 - log_ratio  # unbiased and never negative (Schulman, 2020)
            kl = stored.policy.kl(info.policy) if self.measures_kl else None
            # The learner stops the iteration if the mean of `stop` is positive.
            stop = None if self._target_kl is None or kl is None else kl - 1.5 * self._target_kl
        total = self.total_loss(policy_loss, value_loss, info.policy)
        if self._uniform_kl_coef is not None:
            kl_to_uniform = extra["uniform_kl"] = uniform_kl(info.policy)
            total = total._replace(loss=total.loss + self._uniform_kl_coef(self.progress) * kl_to_uniform)
        return total._replace(extra={**(total.extra or {}), **extra, **stored.extra, "kl": estimate}, stop=stop, kl=kl)

    def policy_loss(self, log_prob: torch.Tensor, stored: PPOTarget) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Returns the clipped surrogate `[T, N]`, and its statistics for summaries."""
        clip_range = self._clip_range(self.progress)
        highest = 1 + clip_range
        lowest = 1 / highest if self._reciprocal_clip else 1 - clip_range
        loss, ratio = losses.clipped_surrogate(log_prob, stored.log_prob, stored.advantage, lowest, highest)
        return loss, {"clip_fraction": ((ratio < lowest) | (ratio > highest)).to(loss.dtype)}
