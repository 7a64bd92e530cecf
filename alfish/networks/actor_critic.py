"""Networks of on-policy algorithms: the policy and the value of an observation."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import gin
import torch
from gymnasium import spaces
from torch import nn

from alfish import nest
from alfish.data import TimeStep
from alfish.functional.distributions import Distribution
from alfish.nest import Nest
from alfish.networks.encoders import Encoder, Torso
from alfish.networks.heads import PolicyHead, head_masks, policy_of
from alfish.networks.images import is_image
from alfish.networks.layers import MLP, orthogonal
from alfish.parameters import NonNegativeFloat, PositiveInt, checked
from alfish.parameters.parts import build_network, build_torso


class PolicyValue(NamedTuple):
    policy: Distribution  # [...]
    value: torch.Tensor  # [...], or [..., R] for vector rewards
    features: torch.Tensor | None = None  # [..., F] output of the policy's torso, for further losses


@gin.configurable(module="alfish.networks")
@checked
class ActorCritic(nn.Module):
    """An actor and a critic, with separate torsos or a shared one.

    With memory, the state is the state of the shared torso, or a dict of both torsos' states, {'actor', 'critic'}.

    Args:
      observation_spec: nest of spaces.
      action_spec: canonical spec of the actions, see `alfish.specs`.
      reward_spec: spec of the reward; its shape, () or (R,), is the shape of a value.
      actor_torso, critic_torso: classes or factories of the torsos; called with the observation spec. Gin scopes bind
        each torso separately (`@actor/Torso`).
      policy_head: class or factory of the head; called with the torso's output size and the action spec. The head's
        `forward` is called with features and, if the observation has an action mask, the mask of each leaf of the
        action.
      shared_torso: whether the critic uses the actor's torso; critic_torso is then not built. None shares it for
        images, which are costly to encode, if both torsos are the same class or function, without a scope or a partial.
    """

    def __init__(
        self,
        observation_spec: Nest,
        action_spec: Nest,
        reward_spec: spaces.Box,
        actor_torso: Callable[[Nest], Any] = Torso,
        critic_torso: Callable[[Nest], Any] = Torso,
        policy_head: Callable[[int, Nest], nn.Module] = PolicyHead,
        shared_torso: bool | None = None,
    ):
        super().__init__()
        self.actor_torso: Any = build_torso(actor_torso, "ActorCritic.actor_torso", observation_spec)
        self.critic_torso: Any = None
        if shared_torso is None:
            # A saved configuration gives each partial a scope of its own, so equal partials must not share either.
            is_same = actor_torso == critic_torso and not isinstance(actor_torso, functools.partial)
            shared_torso = is_same and any(map(is_image, nest.leaves(observation_spec)))
        if not shared_torso:
            self.critic_torso = build_torso(critic_torso, "ActorCritic.critic_torso", observation_spec)
        size = self.actor_torso.output_size
        self.policy_head: Any = build_network(policy_head, "ActorCritic.policy_head", size, action_spec, has=())
        self._masks = head_masks(self.policy_head, observation_spec, action_spec)
        critic_size = (self.actor_torso if self.critic_torso is None else self.critic_torso).output_size
        self._has_two_states = self.critic_torso is not None and bool(nest.leaves(self._two_states(1)))
        self._vector_reward = bool(reward_spec.shape)
        self.value_head = orthogonal(nn.Linear(critic_size, reward_spec.shape[0] if reward_spec.shape else 1), 1.0)

    def initial_state(self, batch_size: int) -> Nest:
        if self._has_two_states:
            return self._two_states(batch_size)
        return self.actor_torso.initial_state(batch_size)

    def policy(self, time_step: TimeStep, state: Nest) -> tuple[Distribution, Nest]:
        """Returns the policy and the next state, including the critic's state."""
        if not self._has_two_states:
            features, state = self.actor_torso(time_step, state)
            return self._policy(features, time_step), state
        features, actor = self.actor_torso(time_step, state["actor"])
        critic = state["critic"]
        if critic is not None:
            _, critic = self.critic_torso(time_step, critic)
        return self._policy(features, time_step), {"actor": actor, "critic": critic}

    def value(self, time_step: TimeStep, state: Nest) -> torch.Tensor:
        """Returns the value `[...]`, or `[..., R]` for vector rewards; `policy` returns the next state."""
        if self.critic_torso is None:
            return self._value(self.actor_torso(time_step, state)[0])
        return self._value(self.critic_torso(time_step, state["critic"] if self._has_two_states else state)[0])

    def forward(self, time_step: TimeStep, state: Nest) -> tuple[PolicyValue, Nest]:
        """Returns policy, value and the features of the policy, and the next state."""
        if not self._has_two_states:
            features, after = self.actor_torso(time_step, state)
            critic_features = features if self.critic_torso is None else self.critic_torso(time_step, state)[0]
        else:
            features, actor = self.actor_torso(time_step, state["actor"])
            critic_features, critic = self.critic_torso(time_step, state["critic"])
            after = {"actor": actor, "critic": critic}
        return PolicyValue(self._policy(features, time_step), self._value(critic_features), features), after

    def _two_states(self, batch_size: int) -> dict[str, Nest]:
        torsos = {"actor": self.actor_torso, "critic": self.critic_torso}
        return {name: torso.initial_state(batch_size) for name, torso in torsos.items()}

    def _policy(self, features: torch.Tensor, time_step: TimeStep) -> Distribution:
        return policy_of(self.policy_head, features, self._masks, time_step.observation)

    def _value(self, features: torch.Tensor) -> torch.Tensor:
        value = self.value_head(features)
        return value if self._vector_reward else value.squeeze(-1)


@gin.configurable(module="alfish.networks")
@checked
class DeterministicActor(nn.Module):
    """Maps observations to actions `[..., A]` in (-1, 1).

    Args:
      observation_spec: nest of spaces.
      action_size: number of action entries, A.
      encoder: class or factory of the encoder; called with the observation spec.
      mlp: class or factory of the MLP; called with the encoder's output size.
      gain: gain of the final layer's orthogonal weights. The first steps of Adam change each weight by the learning
        rate, independently of the size of the gradient. With a much smaller gain, these steps dominate: all
        observations get the same action, and tanh saturates before the critic has learned.
    """

    def __init__(
        self,
        observation_spec: Nest,
        action_size: PositiveInt,
        encoder: Callable[[Nest], Any] = Encoder,
        mlp: Callable[[int], Any] = MLP,
        gain: NonNegativeFloat = 1.0,
    ):
        super().__init__()
        self.encoder: Any = build_network(encoder, "DeterministicActor.encoder", observation_spec)
        self.mlp: Any = build_network(mlp, "DeterministicActor.mlp", self.encoder.output_size)
        self.linear = orthogonal(nn.Linear(self.mlp.output_size, action_size), gain)

    def forward(self, observation: Nest) -> torch.Tensor:
        return torch.tanh(self.linear(self.mlp(self.encoder(observation))))
