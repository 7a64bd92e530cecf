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

from typing import Any, Literal

import gin
import torch
from gymnasium import spaces

from alfish import corrections
from alfish.algorithms.ppo import PPO, PPOTarget
from alfish.data import Experience
from alfish.errors import UsageError
from alfish.nest import Nest
from alfish.parameters import PositiveFloat, checked


@gin.configurable(module="alfish.algorithms")
@checked
class APPO(PPO):
    """Asynchronous PPO; papers, and how it differs from them, are in the module's docstring.

    Args:
      rho_bar: largest weight of a step's own error; `loss` 'impala' also weighs its gradient by no more.
      c_bar: largest weight of what follows a step; at most rho_bar (Espeholt et al., 2018, section 4.1).
      loss: of the policy: 'clipped', PPO's surrogate, or 'impala', -rho log pi (q - V), which is for a single epoch.
      ppo_arguments: as PPO's, where lambda_ is of the V-trace targets and advantages, target_kl limits KL(behaviour
        policy, policy), so that rows that are too old are left out whole, and recompute_advantage computes ratios anew
        too, but never the behaviour's probabilities.
    """

    def __init__(
        self,
        observation_spec: Nest,
        action_spec: Nest,
        reward_spec: spaces.Box,
        *,
        rho_bar: PositiveFloat = 1.0,
        c_bar: PositiveFloat = 1.0,
        loss: Literal["clipped", "impala"] = "clipped",
        **ppo_arguments: Any,
    ):
        if c_bar > rho_bar:
            raise UsageError(f"APPO.c_bar is {c_bar}, above APPO.rho_bar {rho_bar}; lower it")
        super().__init__(observation_spec, action_spec, reward_spec, **ppo_arguments)
        self.unroll_use = self.unroll_use._replace(single_epoch=loss == "impala", handles_stale_policies=True)
        self._rho_bar, self._c_bar, self._loss = rho_bar, c_bar, loss

    def preprocess_experience(self, experience: Experience) -> Experience:
        step, behaviour = experience.time_step, experience.info.policy  # [T+1, B]
        (policy, value), _ = self.network(step, experience.state)
        ratio = (policy.log_prob(experience.action) - behaviour.log_prob(experience.action)).exp()
        target, advantage = corrections.vtrace(
            step.reward, self._gamma * step.discount, value, step.step_type, ratio,
            self._lambda, self._rho_bar, self._c_bar,
        )  # fmt: skip
        # Without lag the ratio is 1 but for float error, which is no clipping.
        rho_clipped = (ratio > 1.001 * self._rho_bar).to(ratio.dtype)
        return self.with_target(experience, advantage, target, value, rho_clipped=rho_clipped)

    def policy_loss(self, log_prob: torch.Tensor, rollout: PPOTarget) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        if self._loss == "clipped":
            return super().policy_loss(log_prob, rollout)
        rho = (log_prob.detach() - rollout.log_prob).exp()  # a weight (Espeholt et al., 2018, section 4.2)
        return -rho.clamp(max=self._rho_bar) * log_prob * rollout.advantage, {}
