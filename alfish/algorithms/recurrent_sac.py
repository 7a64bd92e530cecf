"""Soft actor-critic (`sac`) with memory. The loss uses all rows of a window, except the last.

Ni et al., 2022, https://arxiv.org/abs/2110.05038. The memory takes the outputs of the critics' encoder, and the
critics' loss trains the memory. The memory's outputs are the features of the critics. The actor takes these features
without a gradient to the critics.

Difference from the paper: the actor has no memory of its own.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import gin
import torch
from gymnasium import spaces
from torch import nn

from alfish.algorithms.sac import SAC
from alfish.data import Experience, TimeStep
from alfish.errors import UsageError
from alfish.nest import Nest
from alfish.networks import GRU, Encoder, Features, HybridHead, Window
from alfish.parameters import checked
from alfish.parameters.parts import build_network


@gin.configurable(module="alfish.algorithms")
@checked
class RecurrentSAC(SAC):
    """SAC whose critics and actor share a memory.

    Args:
      memory: class or factory of the memory; called with the output size of the critics' encoder (`@GRU`, `@LSTM`,
        `@MinGRU`, `@AttentionWindow`, `@StackedMemory`).
      sac_arguments: settings of `SAC`. `critic` also takes `memory`; `actor_mlp` takes the size of the critics'
        features; `actor_encoder` is refused, because the actor takes the critics' features; `lambda_` is 0 by default.
    """

    feature_module = "critic.memory"
    default_lambda: ClassVar[float] = 0.0
    needs_every_row: ClassVar[bool] = True

    def __init__(
        self,
        observation_spec: Nest,
        action_spec: Nest,
        reward_spec: spaces.Box,
        *,
        memory: Callable[[int], Any] = GRU,
        **sac_arguments: Any,
    ):
        self._memory = memory  # set first, because the base class calls `make_networks`
        super().__init__(observation_spec, action_spec, reward_spec, **sac_arguments)
        del self._memory  # a reference of gin cannot be sent to workers
        self.replay_needs = self.replay_needs._replace(recurrent_state=True)
        self.values.check(self, self._lambda, memory=True)

    def make_networks(
        self, actor_encoder: Callable[[Nest], Any], actor_mlp: Callable[[int], Any], critic: Callable[..., Any]
    ) -> None:
        if actor_encoder is not Encoder:
            raise UsageError(
                "RecurrentSAC.actor_encoder is set, but the actor has no encoder: its input is the critics' features, "
                "so it sees the same leaves as the critics; bind CriticEnsemble.encoder, or train with SAC or PPO"
            )
        self.critic = build_network(
            critic,
            "RecurrentSAC.critic",
            *(self.observation_spec, *self.action_space.critic_sizes),
            has=("features", "feature_size", "ensemble_size", "initial_state"),
            memory=self._memory,
        )
        self.actor_encoder = nn.Identity()
        self.actor_mlp = build_network(actor_mlp, "RecurrentSAC.actor_mlp", self.critic.feature_size)
        self.policy_head = HybridHead(self.actor_mlp.output_size, self.action_space)

    def initial_state(self, batch_size: int) -> Nest:
        return self.critic.initial_state(batch_size)

    def actor_features(self, time_step: TimeStep, state: Nest) -> tuple[torch.Tensor, Nest]:
        return self.critic.features(time_step, state)

    def window_features(self, experience: Experience) -> Features:
        window = Window(experience, every_row=True)
        critic, next_actor = window.both(self.critic.features)
        return Features(critic, critic.detach(), next_actor, window.later(self.target_critic.network.features))
