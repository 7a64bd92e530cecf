"""Asynchronous PPO: PPO on rows that an older policy made, with V-trace in place of generalised advantages.

PPO's surrogate, https://arxiv.org/abs/1707.06347, with the targets of IMPALA (Espeholt et al., 2018,
https://arxiv.org/abs/1802.01561), as in Sample Factory (Petrenko et al., 2020, https://arxiv.org/abs/2006.11751); or
IMPALA's own policy gradient.

Every ratio is to the behaviour policy mu, which rows bring along as a distribution. pi / mu is the whole weight of an
action, so the surrogate takes q - V without a second rho, and at lag 0 the first update is PPO's. (IMPACT, Luo et al.,
2020, has a target network's policy in the denominator, and then needs that network, and another clipped weight for what
lies between it and mu.)

With lag, the surrogate's first ratio is not 1 but how far the policy has come since the rows were made. Where it has
already gone clip_range in the direction of the advantage, a row trains the value alone: the older the rows, the less
they move the policy, and the later of several epochs move it least. V-trace corrects for the lag at the iteration's
start, not for what the iteration's own updates add to it; recompute_advantage does, each epoch.

Differs from the papers: a truncated episode is bootstrapped from its true final observation; advantages are normalised
over the whole unroll, trained rows only.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import gin
import torch
from gymnasium import spaces

from alfish import corrections, losses, returns
from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.data import AlgStep, Experience, LossInfo, TimeStep, trainable
from alfish.distributions import Distribution
from alfish.errors import UsageError
from alfish.nest import Nest
from alfish.networks import ActorCritic, PolicyValue
from alfish.parameters import FiniteFloat, NonNegativeFloat, PositiveFloat, UnitInterval, checked
from alfish.schedules import Schedule, as_schedule


class APPORollout(NamedTuple):
    policy: Distribution  # what the policy meant when it acted


class APPOTarget(NamedTuple):
    """What preprocess_experience makes of an unroll; all `[T, B]`, targets `[T, B, R]` for vector rewards."""

    log_prob: torch.Tensor  # of the action, under the behaviour policy
    advantage: torch.Tensor  # q - V, summed over R
    target: torch.Tensor  # of the value
    rho_clipped: torch.Tensor  # 1 where V-trace clipped the ratio, else 0
    policy: Distribution | None  # the behaviour policy, to measure the KL where that is limited
    trains: torch.Tensor | None  # which rows do, to average it


@gin.configurable(module="alfish.algorithms")
@checked
class APPO(RLAlgorithm):
    """Asynchronous PPO; papers, and how it differs from them, are in the module's docstring.

    Args:
      network: takes the three specs, has `policy`, `value` and both at once, and the `initial_state` of its memory.
      gamma: discount per environment step.
      lambda_: of the V-trace targets and advantages.
      rho_bar: largest weight of a step's own error; `loss` 'impala' also weighs its gradient by no more.
      c_bar: largest weight of what follows a step; at most rho_bar (Espeholt et al., 2018, section 4.1).
      loss: of the policy: 'clipped', PPO's surrogate, or 'impala', -rho log pi (q - V), which is for a single epoch.
      clip_range: of 'clipped', largest change of an action's probability since rollout that is rewarded.
      value_coef, entropy_coef: weights of the value loss (half a squared error) and of the entropy bonus (nats).
      target_kl: the iteration's remaining updates are skipped once KL(behaviour policy, policy) exceeds 1.5 times this,
        in nats, so that rows that are too old are left out whole; None: never.
      normalize_advantage: to mean 0 and standard deviation 1 over the unroll.
      recompute_advantage: values, ratios, targets and advantages anew at each epoch, the behaviour's probabilities
        never.

    clip_range and entropy_coef may be schedules of progress.
    """

    on_policy = True
    handles_stale_policies = True

    def __init__(
        self,
        observation_spec: Nest,
        action_spec: Nest,
        reward_spec: spaces.Box,
        *,
        network: Callable[..., Any] = ActorCritic,
        gamma: UnitInterval = 0.99,
        lambda_: UnitInterval = 0.95,
        rho_bar: PositiveFloat = 1.0,
        c_bar: PositiveFloat = 1.0,
        loss: Literal["clipped", "impala"] = "clipped",
        clip_range: PositiveFloat | Schedule = 0.2,
        value_coef: NonNegativeFloat = 0.5,
        entropy_coef: FiniteFloat | Schedule = 0.0,
        target_kl: PositiveFloat | None = None,
        normalize_advantage: bool = True,
        recompute_advantage: bool = False,
    ):
        if c_bar > rho_bar:
            raise UsageError(f"APPO.c_bar is {c_bar}, above APPO.rho_bar {rho_bar}; lower it")
        super().__init__(observation_spec, action_spec, reward_spec)
        self.network: Any = network(observation_spec, action_spec, reward_spec)
        self.single_epoch, self.preprocess_each_epoch = loss == "impala", recompute_advantage
        self._gamma, self._lambda = gamma, lambda_
        self._rho_bar, self._c_bar = rho_bar, c_bar
        self._loss = loss
        self._clip_range = as_schedule(clip_range)
        self._value_coef = value_coef
        self._entropy_coef = as_schedule(entropy_coef) if entropy_coef != 0 else None
        self._target_kl = target_kl
        self._normalize_advantage = normalize_advantage

    def initial_state(self, batch_size: int) -> Nest:
        return self.network.initial_state(batch_size)

    def rollout_step(self, time_step: TimeStep, state: Nest) -> AlgStep:
        policy, state = self.network.policy(time_step, state)
        return AlgStep(policy.sample(), state, APPORollout(policy))

    def predict_step(self, time_step: TimeStep, state: Nest) -> AlgStep:
        policy, state = self.network.policy(time_step, state)
        return AlgStep(policy.mode(), state)

    def preprocess_experience(self, experience: Experience) -> Experience:
        step, behaviour = experience.time_step, experience.info.policy  # [T+1, B]
        (policy, value), _ = self.network(step, experience.state)
        log_prob = behaviour.log_prob(experience.action)
        ratio = (policy.log_prob(experience.action) - log_prob).exp()
        target, advantage = corrections.vtrace(
            step.reward, self._gamma * step.discount, value, step.step_type, ratio,
            self._lambda, self._rho_bar, self._c_bar,
        )  # fmt: skip
        if self.reward_spec.shape:
            advantage = advantage.sum(-1)
        trains = trainable(step.step_type)
        if self._normalize_advantage:
            advantage = returns.standardize(advantage, trains)
        # Without lag the ratio is 1 but for float error, which is no clipping.
        rho_clipped = (ratio > 1.001 * self._rho_bar).to(ratio.dtype)
        info = APPOTarget(log_prob, advantage, target, rho_clipped, behaviour, trains)
        if self._target_kl is None:
            info = info._replace(policy=None, trains=None)
        return experience._replace(info=info)

    def train_step(self, experience: Experience, state: Nest) -> AlgStep:
        info, state = self.network(experience.time_step, state)
        return AlgStep(state=state, info=PolicyValue(*info))

    def calc_loss(self, experience: Experience, info: PolicyValue) -> LossInfo:
        rollout = experience.info
        log_prob, entropy = info.policy.log_prob(experience.action), info.policy.entropy()
        log_ratio = log_prob.detach() - rollout.log_prob
        extra = {"rho_clipped": rollout.rho_clipped, "kl": log_ratio.exp() - 1 - log_ratio}  # to the behaviour policy
        if self._loss == "clipped":
            clip_range = self._clip_range(self.progress)
            policy_loss, ratio = losses.clipped_surrogate(log_prob, rollout.log_prob, rollout.advantage, clip_range)
            extra["clip_fraction"] = ((ratio.detach() - 1).abs() > clip_range).to(policy_loss.dtype)
        else:  # Espeholt et al., 2018, section 4.2; rho is a weight, and has no gradient
            policy_loss = -log_ratio.exp().clamp(max=self._rho_bar) * log_prob * rollout.advantage
        value_loss = losses.squared(info.value - rollout.target)
        if self.reward_spec.shape:
            value_loss = value_loss.sum(-1)
        loss = policy_loss + self._value_coef * value_loss
        if self._entropy_coef is not None:
            loss = loss - self._entropy_coef(self.progress) * entropy
        extra |= {"policy_loss": policy_loss.detach(), "value_loss": value_loss.detach(), "entropy": entropy.detach()}
        stop = None
        if self._target_kl is not None:
            kl = losses.masked_mean(rollout.policy.kl(info.policy).detach(), rollout.trains)
            stop = kl > 1.5 * self._target_kl
        return LossInfo(loss, extra=extra, stop=stop)
