"""Twin delayed deterministic policy gradients: off-policy, for Box actions.

Fujimoto et al., 2018, https://arxiv.org/abs/1802.09477. Differences from the paper: those of `ddpg`.
"""

from collections.abc import Callable
from typing import Any

import gin
import torch
from gymnasium import spaces

from alfish.algorithms.ddpg import DDPG
from alfish.algorithms.delayed_actor import DelayedActor
from alfish.nest import Nest
from alfish.networks import CriticEnsemble
from alfish.parameters import NonNegativeFloat, PositiveInt, checked


@gin.configurable(module="alfish.algorithms")
@checked
class TD3(DelayedActor, DDPG):
    """DDPG with the minimum of two critics, noise on target actions, and delayed updates of the actor.

    Args:
      critic: as in DDPG; two by default.
      smoothing_std, smoothing_clip: of the noise on target actions, in units of half the action's range.
      actor_period: updates of the critics for each update of the actor and of the target networks.
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
        **ddpg_arguments,
    ):
        super().__init__(observation_spec, action_spec, reward_spec, critic=critic, **ddpg_arguments)
        self._smoothing_std, self._smoothing_clip, self.actor_period = smoothing_std, smoothing_clip, actor_period

    def target_action(self, seen: Nest) -> torch.Tensor:
        action = self.target_actor(seen)
        noise = (self._smoothing_std * torch.randn_like(action)).clamp(-self._smoothing_clip, self._smoothing_clip)
        return (action + noise).clamp(-1, 1)

    def after_update(self) -> None:
        if self.trains_actor():
            DDPG.after_update(self)
        DelayedActor.after_update(self)
