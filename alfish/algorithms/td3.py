"""Twin delayed deterministic policy gradients: off-policy, for Box actions.

Fujimoto et al., 2018, https://arxiv.org/abs/1802.09477. Differences from the paper: see `ddpg`.
"""

from collections.abc import Callable
from typing import Any

import gin
import torch
from gymnasium import spaces

from alfish.algorithms.ddpg import DDPG
from alfish.nest import Nest
from alfish.networks import CriticEnsemble
from alfish.parameters import NonNegativeFloat, PositiveInt, checked


@gin.configurable(module="alfish.algorithms")
@checked
class TD3(DDPG):
    """DDPG with the minimum of two critics, noise on target actions, and delayed updates of the actor.

    Args:
      critic: class or factory of the critic ensemble, as in `DDPG`; by default an ensemble of two critics.
      smoothing_std, smoothing_clip: standard deviation and largest absolute value of the noise on target actions, in
        units of half the action's range.
      actor_period: number of updates of the critics for each update of the actor and of the target networks.
      ddpg_arguments: other settings of `DDPG`.
    """

    def __init__(
        self,
        observation_spec: Nest,
        action_spec: Nest,
        reward_spec: spaces.Box,
        *,
        critic: Callable[..., Any] = CriticEnsemble,
        smoothing_std: NonNegativeFloat = 0.2,
        smoothing_clip: NonNegativeFloat = 0.5,
        actor_period: PositiveInt = 2,
        **ddpg_arguments: Any,
    ):
        super().__init__(observation_spec, action_spec, reward_spec, critic=critic, **ddpg_arguments)
        self._smoothing_std, self._smoothing_clip = smoothing_std, smoothing_clip
        self.update_periods = {"actor": actor_period}

    def target_action(self, seen: Nest) -> torch.Tensor:
        action = self.target_actor(seen)
        noise = (self._smoothing_std * torch.randn_like(action)).clamp(-self._smoothing_clip, self._smoothing_clip)
        return (action + noise).clamp(-1, 1)

    def after_update(self) -> None:
        if self.trains("actor"):
            super().after_update()
