"""Proximal policy optimization: several epochs of a clipped policy gradient on each unroll.

Schulman et al., 2017, https://arxiv.org/abs/1707.06347, with generalised advantages (Schulman et al., 2016).

Differs from the paper: a truncated episode is bootstrapped from its true final observation; advantages are normalised
over the whole unroll, trained rows only, rather than per minibatch; the critic has its own torso unless it shares.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import gin
import torch
from gymnasium import spaces

from alfish import losses, returns
from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.data import AlgStep, Experience, LossInfo, TimeStep, trainable
from alfish.distributions import Distribution
from alfish.nest import Nest
from alfish.networks import ActorCritic, PolicyValue
from alfish.parameters import FiniteFloat, NonNegativeFloat, PositiveFloat, UnitInterval, checked
from alfish.schedules import Schedule, as_schedule


class PPORollout(NamedTuple):
    policy: Distribution  # what the policy meant when it acted


class PPOTarget(NamedTuple):
    """What preprocess_experience makes of an unroll; all `[T, B]`, values `[T, B, R]` for vector rewards.

    What no setting asks for is None, and is not gathered for every minibatch.
    """

    log_prob: torch.Tensor  # of the action, under the rollout's policy
    advantage: torch.Tensor  # summed over R
    target: torch.Tensor  # of the value
    value: torch.Tensor | None  # before the updates on this target, to clip the value
    policy: Distribution | None  # of the rollout, to measure the KL
    trains: torch.Tensor | None  # which rows do, to average it


@gin.configurable(module="alfish.algorithms")
@checked
class PPO(RLAlgorithm):
    """Proximal policy optimization; the paper, and how it differs from it, are in the module's docstring.

    Args:
      network: takes the three specs, has `policy`, `value` and both at once, and the `initial_state` of its memory.
      gamma: discount per environment step.
      lambda_: of the generalised advantage; 1 is the Monte-Carlo return.
      clip_range: largest change of an action's probability ratio that is rewarded.
      value_clip_range: largest useful change of a value in one iteration, with recompute_advantage in one epoch, in
        units of return; None: not clipped.
      value_coef, entropy_coef: weights of the value loss (half a squared error) and of the entropy bonus (nats).
      target_kl: the iteration's remaining updates are skipped once KL(rollout policy, policy) exceeds 1.5 times this,
        in nats; None: never.
      normalize_advantage: to mean 0 and standard deviation 1 over the unroll.
      recompute_advantage: values and advantages anew at each epoch, log-probabilities never (Andrychowicz et al., 2021,
        section 3.5).

    clip_range, value_clip_range and entropy_coef may be schedules of progress.
    """

    on_policy = True
    single_epoch = False

    def __init__(
        self,
        observation_spec: Nest,
        action_spec: Nest,
        reward_spec: spaces.Box,
        *,
        network: Callable[..., Any] = ActorCritic,
        gamma: UnitInterval = 0.99,
        lambda_: UnitInterval = 0.95,
        clip_range: PositiveFloat | Schedule = 0.2,
        value_clip_range: PositiveFloat | Schedule | None = None,
        value_coef: NonNegativeFloat = 0.5,
        entropy_coef: FiniteFloat | Schedule = 0.0,
        target_kl: PositiveFloat | None = None,
        normalize_advantage: bool = True,
        recompute_advantage: bool = False,
    ):
        super().__init__(observation_spec, action_spec, reward_spec)
        self.network: Any = network(observation_spec, action_spec, reward_spec)
        self.preprocess_each_epoch = recompute_advantage
        self._gamma, self._lambda = gamma, lambda_
        self._clip_range = as_schedule(clip_range)
        self._value_clip_range = None if value_clip_range is None else as_schedule(value_clip_range)
        self._value_coef = value_coef
        self._entropy_coef = as_schedule(entropy_coef) if entropy_coef != 0 else None
        self._target_kl = target_kl
        self._normalize_advantage = normalize_advantage

    def initial_state(self, batch_size: int) -> Nest:
        return self.network.initial_state(batch_size)

    def rollout_step(self, time_step: TimeStep, state: Nest) -> AlgStep:
        policy, state = self.network.policy(time_step, state)
        return AlgStep(policy.sample(), state, PPORollout(policy))

    def predict_step(self, time_step: TimeStep, state: Nest) -> AlgStep:
        policy, state = self.network.policy(time_step, state)
        return AlgStep(policy.mode(), state)

    def preprocess_experience(self, experience: Experience) -> Experience:
        step = experience.time_step  # [T+1, B]
        value = self.network.value(step, experience.state)
        discount = self._gamma * step.discount
        advantage = returns.gae(step.reward, discount, value, step.step_type, self._lambda)
        target = advantage + value[:-1]
        if self.reward_spec.shape:
            advantage = advantage.sum(-1)
        trains = trainable(step.step_type)
        if self._normalize_advantage:
            advantage = returns.standardize(advantage, trains)
        policy = experience.info.policy
        log_prob = policy.log_prob(experience.action)
        info = PPOTarget(log_prob, advantage, target, value, policy, trains)
        if self._value_clip_range is None:
            info = info._replace(value=None)
        if self._target_kl is None:
            info = info._replace(policy=None, trains=None)
        return experience._replace(info=info)

    def train_step(self, experience: Experience, state: Nest) -> AlgStep:
        info, state = self.network(experience.time_step, state)
        return AlgStep(state=state, info=PolicyValue(*info))

    def calc_loss(self, experience: Experience, info: PolicyValue) -> LossInfo:
        rollout = experience.info
        clip_range = self._clip_range(self.progress)
        log_prob = info.policy.log_prob(experience.action)
        policy_loss, ratio = losses.clipped_surrogate(log_prob, rollout.log_prob, rollout.advantage, clip_range)
        if self._value_clip_range is None:
            value_loss = losses.squared(info.value - rollout.target)
        else:
            value_clip_range = self._value_clip_range(self.progress)
            value_loss = losses.clipped_value_loss(info.value, rollout.value, rollout.target, value_clip_range)
        if self.reward_spec.shape:
            value_loss = value_loss.sum(-1)
        loss = policy_loss + self._value_coef * value_loss
        if self._entropy_coef is not None:
            loss = loss - self._entropy_coef(self.progress) * info.policy.entropy()
        with torch.no_grad():
            log_ratio = log_prob - rollout.log_prob
            extra = {
                "policy_loss": policy_loss.detach(),
                "value_loss": value_loss.detach(),
                "entropy": info.policy.entropy(),
                "kl": log_ratio.exp() - 1 - log_ratio,  # unbiased and never negative (Schulman, 2020)
                "clip_fraction": ((ratio - 1).abs() > clip_range).to(loss.dtype),
            }
        stop = None
        if self._target_kl is not None:
            kl = losses.masked_mean(rollout.policy.kl(info.policy).detach(), rollout.trains)
            stop = kl > 1.5 * self._target_kl
        return LossInfo(loss, extra=extra, stop=stop)
