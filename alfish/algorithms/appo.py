"""Asynchronous PPO: PPO on rows that an older policy collected, with V-trace instead of generalised advantages.

The policy loss is PPO's surrogate, https://arxiv.org/abs/1707.06347, or IMPALA's policy gradient. The targets are
IMPALA's (Espeholt et al., 2018, https://arxiv.org/abs/1802.01561), as in Sample Factory (Petrenko et al., 2020,
https://arxiv.org/abs/2006.11751).

Each ratio pi / mu is exact, because rows store the distribution of the behaviour policy mu. The surrogate therefore
multiplies the ratio by q - V, without a second weight rho. If the current policy made the rows (no lag), the first
update equals PPO's. IMPACT (Luo et al., 2020) instead divides pi by the policy of a target network, and needs a second
clipped weight between that policy and mu.

With lag, ratios differ from 1 even in the first update. If a row's ratio already exceeds clip_range in the direction of
the row's advantage, the row trains only the value, not the policy. V-trace corrects for the lag at the start of the
iteration. The updates of the iteration add lag; recompute_advantage corrects for it before each epoch.

Differences from the papers: a truncated episode bootstraps from its true final observation; advantages are normalized
over the trained rows of the unroll.
"""

from typing import Any, Literal

import gin
import torch
from gymnasium import spaces

from alfish.algorithms.ppo import PPO, PPOTarget
from alfish.data import Experience
from alfish.errors import UsageError
from alfish.functional import targets
from alfish.nest import Nest
from alfish.parameters import PositiveFloat, checked


@gin.configurable(module="alfish.algorithms")
@checked
class APPO(PPO):
    """Asynchronous PPO; see the module's docstring for the papers and the differences from them.

    Args:
      rho_bar: upper limit of the weight of each step's TD error. With `loss` 'impala', it also limits the weight of the
        policy gradient.
      c_bar: upper limit of the weight of later TD errors; at most rho_bar (Espeholt et al., 2018, section 4.1).
      loss: loss of the policy: 'clipped' is PPO's surrogate; 'impala' is -rho log pi (q - V), for a single epoch.
      ppo_arguments: settings of `PPO`. lambda_ is V-trace's lambda; target_kl limits KL(behaviour policy, policy),
        which skips updates on rows of a policy that is too old. recompute_advantage also recomputes ratios.
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
            name = type(self).__name__
            raise UsageError(f"{name}.c_bar is {c_bar}, which is larger than {name}.rho_bar = {rho_bar}; lower c_bar")
        super().__init__(observation_spec, action_spec, reward_spec, **ppo_arguments)
        self.unroll_use = self.unroll_use._replace(single_epoch=loss == "impala", handles_stale_policies=True)
        self._rho_bar, self._c_bar, self._loss = rho_bar, c_bar, loss

    def preprocess_experience(self, experience: Experience) -> Experience:
        step, behaviour = experience.time_step, experience.info.policy  # [T+1, B]
        (policy, value, *_), _ = self.network(step, experience.state)
        ratio = (policy.log_prob(experience.action) - behaviour.log_prob(experience.action)).exp()
        rows = *self.values.reward_and_discount(step), value, step.step_type, ratio
        target, advantage = targets.vtrace(*rows, self._lambda, self._rho_bar, self._c_bar)
        # Without lag the ratio is 1 up to rounding errors, which do not count as clipping.
        rho_clipped = (ratio > 1.001 * self._rho_bar).to(ratio.dtype)
        return self.with_target(experience, advantage, target, value, rho_clipped=rho_clipped)

    def policy_loss(self, log_prob: torch.Tensor, stored: PPOTarget) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        if self._loss == "clipped":
            return super().policy_loss(log_prob, stored)
        rho = (log_prob.detach() - stored.log_prob).exp()  # weight of the gradient (Espeholt et al., 2018, section 4.2)
        return -rho.clamp(max=self._rho_bar) * log_prob * stored.advantage, {}
