"""The base of SAC: policy, critics and acting, for Box leaves and at most one Discrete leaf.

The critics take the Box part of an action as an input, and have one output for each choice of the Discrete part.
"""

from collections.abc import Callable
from typing import Any

import torch
from gymnasium import spaces

from alfish import nest, specs
from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.data import AlgStep, Experience, TimeStep
from alfish.functional.values import Scalar
from alfish.nest import Nest
from alfish.networks import Features, TargetNetwork
from alfish.networks.hybrid import HybridAction, HybridHead, HybridPolicy, HybridSpace
from alfish.networks.target import NoTarget
from alfish.parameters.parts import build_network


class SoftActor(RLAlgorithm):
    """Acts with samples of a policy, and in evaluation with the policy's mode. Subclasses train the policy.

    Attributes:
      values: representation of the values that the critics predict; set by subclasses.
      target_critic: target network of the `critic` that `make_networks` makes; set by subclasses.
    """

    feature_module = "critic.encoder"
    values: Scalar
    target_critic: TargetNetwork | NoTarget

    def __init__(self, observation_spec: Nest, action_spec: Nest, reward_spec: spaces.Box):
        super().__init__(observation_spec, action_spec, reward_spec)
        self.action_space = HybridSpace(action_spec)

    @classmethod
    def check_specs(cls, observation_spec: Nest, action_spec: Nest, reward_spec: spaces.Box) -> None:
        specs.check_hybrid_action(cls.__name__, action_spec)

    def make_networks(
        self, actor_encoder: Callable[[Nest], Any], actor_mlp: Callable[[int], Any], critic: Callable[..., Any]
    ) -> None:
        """Makes actor and critics in a fixed order, because initial weights depend on the order."""
        name = type(self).__name__
        self.actor_encoder: Any = build_network(actor_encoder, f"{name}.actor_encoder", self.observation_spec)
        self.actor_mlp: Any = build_network(actor_mlp, f"{name}.actor_mlp", self.actor_encoder.output_size)
        self.policy_head = HybridHead(self.actor_mlp.output_size, self.action_space)
        sizes, has = self.action_space.critic_sizes, ("features", "ensemble_size")
        self.critic: Any = build_network(critic, f"{name}.critic", self.observation_spec, *sizes, has=has)

    def policy(self, features: torch.Tensor, mask: torch.Tensor | None) -> HybridPolicy:
        """Returns the policy for features of the actor.

        Args:
          features: `[..., F]`, input of the actor.
          mask: `[..., n]` bool, allowed choices of the Discrete leaf; None means all.
        """
        return self.policy_head(self.actor_mlp(features), mask)

    def actor_features(self, time_step: TimeStep, state: Nest) -> tuple[torch.Tensor, Nest]:
        """Returns the actor's input, and the next state."""
        return self.actor_encoder(time_step.observation), state

    def discrete_mask(self, time_step: TimeStep) -> torch.Tensor | None:
        """Returns the allowed choices of the Discrete leaf, `[..., n]` bool; None means all."""
        if self.action_masks is None:
            return None
        return next((mask for mask in self.action_masks(time_step.observation) if mask is not None), None)

    def rollout_step(self, time_step: TimeStep, state: Nest) -> AlgStep:
        features, state = self.actor_features(time_step, state)
        policy = self.policy(features, self.discrete_mask(time_step))
        sample, state, info = self.explore(policy, state)
        return AlgStep(self.action_space.join(sample), state, info)

    def log_prob(self, time_step: TimeStep, action: Nest) -> torch.Tensor:
        features, _ = self.actor_features(time_step, None)
        return self.policy(features, self.discrete_mask(time_step)).log_prob(self.action_space.split(action))

    def explore(self, policy: HybridPolicy, state: Nest) -> tuple[HybridAction, Nest, Any]:
        """Returns the action of a rollout, the next state, and the info for replay. Default: a sample, and no info."""
        return policy.sample(), state, None

    def predict_step(self, time_step: TimeStep, state: Nest) -> AlgStep:
        features, state = self.actor_features(time_step, state)
        policy = self.policy(features, self.discrete_mask(time_step))
        return AlgStep(self.action_space.join(policy.mode()), state)

    def window_features(self, experience: Experience) -> Features:
        """Returns the inputs of the networks for a window `[L, N]`; inputs of rows 1 to L-1 take no gradient."""
        now, later = nest.split(experience.time_step, 1)
        critic, actor = self.critic.features(now, None)[0], self.actor_encoder(now.observation)
        with torch.no_grad():
            next_actor = self.actor_encoder(later.observation)
            next_critic = self.target_critic.network.features(later, None)[0]
        return Features(critic, actor, next_actor, next_critic)

    def state_value(self, time_step: TimeStep, state: Nest) -> torch.Tensor:
        """Returns the values `[B]` of rows `[B]`: the critics' minimum for the action of `predict_step`."""
        action = self.action_space.split(self.predict_step(time_step, state).output)
        q = self.critic(self.critic.features(time_step, state)[0], action.box)
        return self.values.scalarized(self.values.least(self.values.each(action.select, q)))
