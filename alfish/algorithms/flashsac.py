"""FlashSAC: SAC with batch norm over both observations of a transition, and noise that lasts several steps.

Kim et al., 2026, https://arxiv.org/abs/2604.04539. Residual networks and weights of unit norm are settings of the
networks, and categorical values a setting of `values`.
"""

from collections.abc import Callable
from typing import Any

import gin
import torch
from gymnasium import spaces

from alfish import nest
from alfish.algorithms.crossq import CrossQ
from alfish.errors import UsageError
from alfish.nest import Nest
from alfish.networks import Features
from alfish.networks.bodies.batch_norm import Moments
from alfish.networks.hybrid import HeldNoise, HybridAction, HybridPolicy, HybridSpace
from alfish.parameters import checked
from alfish.parameters.parts import build_network


@gin.configurable(module="alfish.algorithms")
@checked
class FlashSAC(CrossQ):
    """CrossQ whose actor also processes both rows in one pass, and whose exploration noise is part of the policy's
    state.

    Args:
      noise: class or factory of exploration noise; called with the number of Box entries; None means new noise at each
        step.
      sac_arguments: settings of `SAC`.
    """

    def __init__(
        self,
        observation_spec: Nest,
        action_spec: Nest,
        reward_spec: spaces.Box,
        *,
        noise: Callable[[int], Any] | None = HeldNoise,
        **sac_arguments: Any,
    ):
        super().__init__(observation_spec, action_spec, reward_spec, **sac_arguments)
        name, has = f"{type(self).__name__}.noise", ("initial_state", "sample")
        self.noise: Any = noise and build_network(noise, name, self.action_space.box_size, has=has, takes=None)

    @classmethod
    def check_specs(cls, observation_spec: Nest, action_spec: Nest, reward_spec: spaces.Box) -> None:
        super().check_specs(observation_spec, action_spec, reward_spec)
        if not HybridSpace(action_spec).box_size:
            raise UsageError(
                f"{cls.__name__} requires an action with a Box leaf, but the action is {action_spec}; train with SAC"
            )

    def initial_state(self, batch_size: int) -> Nest:
        return None if self.noise is None else self.noise.initial_state(batch_size)

    def explore(self, policy: HybridPolicy, state: Nest) -> tuple[HybridAction, Nest, None]:
        sample, state = (policy.sample(), state) if self.noise is None else self.noise.sample(policy, state)
        return sample, state, None

    def trained_policy(self, features: Features, mask: torch.Tensor | None, moments: Moments) -> HybridPolicy:
        both = torch.cat([features.actor, features.next_actor])
        return nest.at(self.policy_with_moments(both, mask, moments), slice(0, 1))
