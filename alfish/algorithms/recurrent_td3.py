"""TD3 (`td3`) with memory. All rows of a window train, except the last row.

Ni et al., 2022, https://arxiv.org/abs/2110.05038. As in RecurrentSAC, the memory takes the outputs of the critics'
encoder, and the critics' loss trains the memory. The actor takes the features of the critics, without a gradient to
the critics; the target actor takes the features of the target critics. Targets are one-step returns.

Differences from the paper: the actor has no memory of its own; exploration noise is white.
"""

from collections.abc import Callable
from typing import Any

import gin
import numpy as np
import torch
from gymnasium import spaces

from alfish.algorithms.rl_algorithm import ReplayNeeds
from alfish.algorithms.td3 import TD3
from alfish.data import Experience, TimeStep
from alfish.errors import UsageError
from alfish.nest import Nest
from alfish.networks import GRU, DeterministicActor, Features, Flat, Window
from alfish.parameters import checked
from alfish.parameters.parts import build_network


@gin.configurable(module="alfish.algorithms")
@checked
class RecurrentTD3(TD3):
    """TD3 whose critics and actor share a memory.

    Args:
      memory: class or factory of the memory; called with the output size of the critics' encoder (`@GRU`, `@LSTM`,
        `@MinGRU`, `@AttentionWindow`, `@StackedMemory`).
      td3_arguments: settings of `TD3`. `critic` also takes `memory`; `actor` is refused, because the actor is a
        `DeterministicActor` on the critics' features; `noise_correlation` must be 0.
    """

    feature_module = "critic.memory"
    replay_needs = ReplayNeeds(recurrent_state=True)
    lambda_ = 0.0

    def __init__(
        self,
        observation_spec: Nest,
        action_spec: Nest,
        reward_spec: spaces.Box,
        *,
        memory: Callable[[int], Any] = GRU,
        **td3_arguments: Any,
    ):
        self._memory = memory  # set first, because the base class calls `make_networks`
        super().__init__(observation_spec, action_spec, reward_spec, **td3_arguments)
        del self._memory  # a reference of gin cannot be sent to workers
        if self._noise_correlation:
            raise UsageError(
                f"RecurrentTD3.noise_correlation is {self._noise_correlation}, but the policy's state has room for the "
                "memory only; set noise_correlation to 0"
            )

    def make_networks(self, actor: Callable[..., Any], critic: Callable[..., Any], action_size: int) -> None:
        if actor is not DeterministicActor:
            raise UsageError(
                "RecurrentTD3.actor is set, but the actor's input is the critics' features, so it sees the same leaves "
                "as the critics; bind CriticEnsemble.encoder and MLP.layers, or train with TD3"
            )
        self.critic = build_network(
            critic,
            "RecurrentTD3.critic",
            *(self.observation_spec, action_size),
            has=("features", "feature_size", "initial_state"),
            memory=self._memory,
        )
        features = spaces.Box(-np.inf, np.inf, (self.critic.feature_size,), np.float32)
        self.actor = actor(features, action_size, encoder=Flat)

    def initial_state(self, batch_size: int) -> Nest:
        return self.critic.initial_state(batch_size)

    def actor_input(self, time_step: TimeStep, state: Nest) -> tuple[torch.Tensor, Nest]:
        return self.critic.features(time_step, state)

    def window_features(self, experience: Experience) -> Features:
        window = Window(experience, every_row=True)
        critic = window.trained(self.critic.features)
        next_critic = window.later(self.target_critic.network.features)
        return Features(critic, critic.detach(), next_critic, next_critic)
