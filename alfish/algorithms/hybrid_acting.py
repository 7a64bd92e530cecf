"""Acting by a policy over Box leaves and at most one Discrete leaf."""

import abc
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from gymnasium import spaces

from alfish import specs
from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.data import AlgStep, TimeStep
from alfish.errors import UsageError
from alfish.nest import Nest
from alfish.networks.hybrid import HybridPolicy, HybridSpace
from alfish.parameters.parts import build_network


class DrawnAction(NamedTuple):
    """Probability of an action when it was drawn, for Retrace."""

    log_prob: torch.Tensor  # [B] of the sample, all leaves together
    action: Nest  # the sample; log_prob does not hold where another action was executed (random, or by hand)


class HybridActing(RLAlgorithm):
    """Acts by samples of a policy, and in evaluation by its mode. Subclasses make the networks.

    Args:
      observation_spec, action_spec, reward_spec: as in RLAlgorithm.
      noise: takes the number of Box entries (`@HeldNoise`); None: each step has noise of its own. Noise is policy
        state.
      records_probability: whether `rollout_step` returns a DrawnAction as its info.
    """

    actor_encoder: Any

    def __init__(
        self,
        observation_spec: Nest,
        action_spec: Nest,
        reward_spec: spaces.Box,
        noise: Callable[[int], Any] | None = None,
        records_probability: bool = False,
    ):
        super().__init__(observation_spec, action_spec, reward_spec)
        self.action_space, self.records_probability = HybridSpace(action_spec), records_probability
        if noise is not None and (records_probability or not self.action_space.box_size):
            name = type(self).__name__
            raise UsageError(
                f"{name}.noise is set, and {name}.retrace needs actions that are drawn anew at each step; set one of "
                "them only"
                if records_probability
                else f"{name}.noise is set, and the action has no Box leaf; set it to None"
            )
        self.noise: Any = noise and build_network(
            noise,
            f"{type(self).__name__}.noise",
            self.action_space.box_size,
            has=("initial_state", "sample"),
            takes=None,
        )

    @classmethod
    def check_specs(cls, observation_spec: Nest, action_spec: Nest, reward_spec: spaces.Box) -> None:
        specs.check_hybrid_action(cls.__name__, action_spec)

    @abc.abstractmethod
    def policy(self, features: torch.Tensor, mask: torch.Tensor | None) -> HybridPolicy:
        """Returns the policy from the actor's input, and the mask of the Discrete leaf."""

    def actor_features(self, time_step: TimeStep, state: Nest) -> tuple[torch.Tensor, Nest]:
        """Returns the actor's input, and the next state."""
        return self.actor_encoder(time_step.observation), state

    def discrete_mask(self, time_step: TimeStep) -> torch.Tensor | None:
        """Returns the allowed Discrete choices `[..., n]` bool; None: all."""
        masks = () if self.action_masks is None else self.action_masks(time_step.observation)
        return next((mask for mask in masks if mask is not None), None)

    def initial_state(self, batch_size: int) -> Nest:
        return None if self.noise is None else self.noise.initial_state(batch_size)

    def rollout_step(self, time_step: TimeStep, state: Nest) -> AlgStep:
        features, state = self.actor_features(time_step, state)
        policy = self.policy(features, self.discrete_mask(time_step))
        sample, state = (policy.sample(), state) if self.noise is None else self.noise.sample(policy, state)
        action = self.action_space.join(sample)
        return AlgStep(
            action, state, DrawnAction(policy.log_prob(sample), action) if self.records_probability else None
        )

    def predict_step(self, time_step: TimeStep, state: Nest) -> AlgStep:
        features, state = self.actor_features(time_step, state)
        policy = self.policy(features, self.discrete_mask(time_step))
        return AlgStep(self.action_space.join(policy.mode()), state)
