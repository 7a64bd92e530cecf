"""TD3 with behavioural cloning, for recorded data: Fujimoto & Gu, 2021, https://arxiv.org/abs/2106.06860."""

from typing import Any

import gin
import torch
from gymnasium import spaces

from alfish.algorithms.td3 import TD3
from alfish.nest import Nest
from alfish.parameters import NonNegativeFloat, checked
from alfish.processes import replicas


@gin.configurable(module="alfish.algorithms")
@checked
class TD3BC(TD3):
    """TD3 whose actor stays close to the actions of recorded data.

        loss = (pi(s) - a)^2 - alpha / mean |Q(s, pi(s))| Q(s, pi(s)),   the square averaged over the action's entries

    The mean of |Q| is taken over the minibatches of all learners, without gradient. The paper also normalizes
    observations; to do so, add an `ObservationNormalizer` to the transforms.

    Args:
      alpha: weight of Q divided by its mean magnitude; 0 means behavioural cloning.
      td3_arguments: settings of `TD3`.
    """

    weighted_losses = None  # None means all groups: the actor's loss, too, depends on how often an action is drawn

    def __init__(
        self,
        observation_spec: Nest,
        action_spec: Nest,
        reward_spec: spaces.Box,
        *,
        alpha: NonNegativeFloat = 2.5,
        **td3_arguments: Any,
    ):
        super().__init__(observation_spec, action_spec, reward_spec, **td3_arguments)
        self._alpha = alpha

    def actor_loss(self, policy_q: torch.Tensor, policy_action: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        magnitude = policy_q.detach().abs()
        scale = self._alpha / replicas.mean(magnitude.mean(), magnitude >= 0).clamp(min=1e-8)
        return (policy_action - action).square().mean(-1) - scale * policy_q
