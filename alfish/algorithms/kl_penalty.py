"""PPO with a penalty on the KL divergence from the policy that collected the rows.

    L = L_PPO + kl_coef KL[pi_old(. | s), pi(. | s)]

The KL is exact, because the distributions of the rollout are stored. Schulman et al., 2017, section 4, use the penalty
instead of clipping; a very large `clip_range` turns clipping off. Sample Factory uses the penalty and clipping, with a
weight of 0.1 for Box actions.
"""

from typing import Any

import gin
import torch
from gymnasium import spaces

from alfish.algorithms.ppo import PPO
from alfish.data import Experience, LossInfo
from alfish.nest import Nest
from alfish.networks import PolicyValue
from alfish.parameters import NonNegativeFloat, checked
from alfish.parameters.schedules import Schedule, as_schedule


@gin.configurable(module="alfish.algorithms")
@checked
class KLPenaltyPPO(PPO):
    """PPO with a penalty on the KL from the rollout policy; see the module's docstring for the equation.

    Args:
      kl_coef: weight of KL(rollout policy, policy) in nats; a number or a schedule of progress.
      ppo_arguments: settings of `PPO`.
    """

    def __init__(
        self,
        observation_spec: Nest,
        action_spec: Nest,
        reward_spec: spaces.Box,
        *,
        kl_coef: NonNegativeFloat | Schedule = 0.1,
        **ppo_arguments: Any,
    ):
        super().__init__(observation_spec, action_spec, reward_spec, **ppo_arguments)
        self._kl_coef, self.measures_kl = as_schedule(kl_coef), True

    def calc_loss(self, experience: Experience, info: PolicyValue) -> LossInfo:
        result = super().calc_loss(experience, info)
        assert isinstance(result.loss, torch.Tensor)  # PPO has one group
        kl = experience.info.policy.kl(info.policy)  # this KL has a gradient, unlike `result.kl`
        return result._replace(loss=result.loss + self._kl_coef(self.progress) * kl)
