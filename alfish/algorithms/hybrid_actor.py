"""The base of SAC: a policy over Box leaves and at most one Discrete leaf, whose Box part is the input of critics."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from gymnasium import spaces

from alfish import nest, specs
from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.data import AlgStep, Experience, TimeStep
from alfish.nest import Nest
from alfish.networks import Features, TargetNetwork
from alfish.networks.bodies.batch_norm import Moments, has_batch_norm
from alfish.networks.hybrid import HybridHead, HybridPolicy, HybridSpace
from alfish.networks.no_target import NoTarget
from alfish.parameters.parts import build_network
from alfish.values import Scalar


class DrawnAction(NamedTuple):
    """Probability of an action when it was drawn, for Retrace."""

    log_prob: torch.Tensor  # [B] of the sample, all leaves together
    action: Nest  # the sample; log_prob does not hold where another action was executed (random, or by hand)


class HybridActor(RLAlgorithm):
    """Acts by a policy, which subclasses train with critics. Their constructors set the attributes.

    Attributes:
      action_space: the parts of the action.
      target_critic: of the `critic` that `make_networks` makes.
      values: the kind of values that the critics predict.
      records_probability: whether `rollout_step` returns a DrawnAction as its info.
    """

    action_space: HybridSpace
    target_critic: TargetNetwork | NoTarget
    values: Scalar
    records_probability: bool
    _actor_has_batch_norm = False

    def make_networks(
        self, actor_encoder: Callable[[Nest], Any], actor_mlp: Callable[[int], Any], critic: Callable[..., Any]
    ) -> None:
        """Makes actor and critics; their order decides which weights a seed gives."""
        self.actor_encoder: Any = build_network(actor_encoder, "SAC.actor_encoder", self.observation_spec)
        self.actor_mlp = build_network(actor_mlp, "SAC.actor_mlp", self.actor_encoder.output_size)
        self._actor_has_batch_norm = has_batch_norm(self.actor_mlp)
        self.policy_head = HybridHead(self.actor_mlp.output_size, self.action_space)
        sizes, has = self.action_space.critic_sizes, ("features", "ensemble_size")
        self.critic: Any = build_network(critic, "SAC.critic", self.observation_spec, *sizes, has=has)

    @classmethod
    def check_specs(cls, observation_spec: Nest, action_spec: Nest, reward_spec: spaces.Box) -> None:
        specs.check_hybrid_action(cls.__name__, action_spec)

    def actor_features(self, time_step: TimeStep, state: Nest) -> tuple[torch.Tensor, Nest]:
        """Returns the actor's input, and the next state."""
        return self.actor_encoder(time_step.observation), state

    def policy(self, features: torch.Tensor, mask: torch.Tensor | None, moments: Moments | None = None) -> HybridPolicy:
        """Returns the policy from the actor's input, and the mask of the Discrete leaf; `moments`: see `BatchNorm`."""
        with_moments = (moments,) if moments is not None and self._actor_has_batch_norm else ()
        return self.policy_head(self.actor_mlp(features, *with_moments), mask)

    def discrete_mask(self, time_step: TimeStep) -> torch.Tensor | None:
        """Returns the allowed Discrete choices `[..., n]` bool; None: all."""
        masks = () if self.action_masks is None else self.action_masks(time_step.observation)
        return next((mask for mask in masks if mask is not None), None)

    def window_features(self, experience: Experience) -> Features:
        """Returns the inputs of the networks for a window `[L, N]`; those of rows 1 to L-1 take no gradient."""
        now, later = nest.split(experience.time_step, 1)
        critic, actor = self.critic.features(now, None)[0], self.actor_encoder(now.observation)
        with torch.no_grad():
            next_actor = self.actor_encoder(later.observation)
            next_critic = self.target_critic.network.features(later, None)[0]
        return Features(critic, actor, next_actor, next_critic)

    def rollout_step(self, time_step: TimeStep, state: Nest) -> AlgStep:
        features, state = self.actor_features(time_step, state)
        policy = self.policy(features, self.discrete_mask(time_step))
        sample = policy.sample()
        action = self.action_space.join(sample)
        return AlgStep(
            action, state, DrawnAction(policy.log_prob(sample), action) if self.records_probability else None
        )

    def predict_step(self, time_step: TimeStep, state: Nest) -> AlgStep:
        features, state = self.actor_features(time_step, state)
        policy = self.policy(features, self.discrete_mask(time_step))
        return AlgStep(self.action_space.join(policy.mode()), state)

    def state_value(self, time_step: TimeStep, state: Nest) -> torch.Tensor:
        """Returns the values `[B]` of rows `[B]`: the critics' minimum for the policy's most likely action."""
        action = self.action_space.split(self.predict_step(time_step, state).output)
        q = self.critic(self.critic.features(time_step, state)[0], action.box)
        return self.values.scalarized(self.values.least(self.values.each(action.value, q)))
