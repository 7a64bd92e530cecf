"""Policy and value of an observation: what on-policy algorithms train."""

from collections.abc import Callable
from typing import Any

import gin
import torch
from gymnasium import spaces
from torch import nn

from alfish.distributions import Distribution
from alfish.nest import Nest
from alfish.networks.heads import PolicyHead
from alfish.networks.initializers import orthogonal
from alfish.networks.torsos import Torso


@gin.configurable(module="alfish.networks")
class ActorCritic(nn.Module):
    """An actor and a critic, on a torso each or on a shared one.

    Args:
      observation_spec: nest of spaces.
      action_spec: canonical action nest.
      reward_spec: its shape, () or (R,), is the shape of a value.
      actor_torso, critic_torso: take the observation spec; scope them to tell them apart (`@actor/Torso`).
      policy_head: takes the torso's output size and the action spec.
      shared_torso: the critic stands on the actor's torso; critic_torso is not built.
    """

    def __init__(
        self,
        observation_spec: Nest,
        action_spec: Nest,
        reward_spec: spaces.Box,
        actor_torso: Callable[[Nest], Any] = Torso,
        critic_torso: Callable[[Nest], Any] = Torso,
        policy_head: Callable[[int, Nest], nn.Module] = PolicyHead,
        shared_torso: bool = False,
    ):
        super().__init__()
        self.actor_torso: Any = actor_torso(observation_spec)
        self.critic_torso: Any = None if shared_torso else critic_torso(observation_spec)
        self.policy_head: Any = policy_head(self.actor_torso.output_size, action_spec)
        critic_size = (self.actor_torso if self.critic_torso is None else self.critic_torso).output_size
        self._vector_reward = bool(reward_spec.shape)
        self.value_head = orthogonal(nn.Linear(critic_size, reward_spec.shape[0] if reward_spec.shape else 1), 1.0)

    def policy(self, observation: Nest) -> Distribution:
        return self.policy_head(self.actor_torso(observation))

    def value(self, observation: Nest) -> torch.Tensor:
        """`[...]`, or `[..., R]` for vector rewards."""
        torso = self.actor_torso if self.critic_torso is None else self.critic_torso
        return self._value(torso(observation))

    def forward(self, observation: Nest) -> tuple[Distribution, torch.Tensor]:
        features = self.actor_torso(observation)
        critic_features = features if self.critic_torso is None else self.critic_torso(observation)
        return self.policy_head(features), self._value(critic_features)

    def _value(self, features: torch.Tensor) -> torch.Tensor:
        value = self.value_head(features)
        return value if self._vector_reward else value.squeeze(-1)
