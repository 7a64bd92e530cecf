"""The base of SAC: a policy over Box leaves and at most one Discrete leaf, whose Box part is the input of critics."""

from collections.abc import Callable
from typing import Any

import torch

from alfish import nest
from alfish.algorithms.hybrid_acting import HybridActing
from alfish.algorithms.soft_critics import SeparatePasses
from alfish.data import Experience, TimeStep
from alfish.nest import Nest
from alfish.networks import Features, TargetNetwork
from alfish.networks.bodies.batch_norm import Moments, has_batch_norm
from alfish.networks.hybrid import HybridHead, HybridPolicy
from alfish.networks.no_target import NoTarget
from alfish.parameters.parts import build_network, check_forward
from alfish.values import Scalar


class HybridActor(HybridActing):
    """Makes a policy and critics, which subclasses train. Their constructors set the attributes.

    Attributes:
      target_critic: of the `critic` that `make_networks` makes.
      values: the kind of values that the critics predict.
    """

    target_critic: TargetNetwork | NoTarget
    values: Scalar
    _passes: SeparatePasses
    _actor_has_batch_norm = False

    def make_networks(
        self, actor_encoder: Callable[[Nest], Any], actor_mlp: Callable[[int], Any], critic: Callable[..., Any]
    ) -> None:
        """Makes actor and critics; their order decides which weights a seed gives."""
        name = type(self).__name__
        self.actor_encoder: Any = build_network(actor_encoder, f"{name}.actor_encoder", self.observation_spec)
        self.actor_mlp = build_network(actor_mlp, f"{name}.actor_mlp", self.actor_encoder.output_size)
        self._actor_has_batch_norm = has_batch_norm(self.actor_mlp)
        if self._actor_has_batch_norm:
            check_forward(self.actor_mlp, f"{name}.actor_mlp, with batch norm,", takes=2)
        self.policy_head = HybridHead(self.actor_mlp.output_size, self.action_space)
        sizes, has = self.action_space.critic_sizes, ("features", "ensemble_size")
        self.critic: Any = build_network(critic, f"{name}.critic", self.observation_spec, *sizes, has=has)

    def policy(self, features: torch.Tensor, mask: torch.Tensor | None, moments: Moments | None = None) -> HybridPolicy:
        """Returns the policy from the actor's input, and the mask of the Discrete leaf; `moments`: see `BatchNorm`."""
        with_moments = (moments,) if moments is not None and self._actor_has_batch_norm else ()
        return self.policy_head(self.actor_mlp(features, *with_moments), mask)

    def trained_policy(self, features: Features, mask: torch.Tensor | None, moments: Moments) -> HybridPolicy:
        """Returns the policy at the rows that train; `mask` `[L, N, n]` is that of all rows."""
        rows = slice(features.critic.shape[0])
        if not self._passes.with_actor:
            return self.policy(features.actor, None if mask is None else mask[rows], moments)
        return nest.at(self.policy(torch.cat([features.actor, features.next_actor]), mask, moments), rows)

    def window_features(self, experience: Experience) -> Features:
        """Returns the inputs of the networks for a window `[L, N]`; those of rows 1 to L-1 take no gradient."""
        now, later = nest.split(experience.time_step, 1)
        critic, actor = self.critic.features(now, None)[0], self.actor_encoder(now.observation)
        with torch.no_grad():
            next_actor = self.actor_encoder(later.observation)
            next_critic = self.target_critic.network.features(later, None)[0]
        return Features(critic, actor, next_actor, next_critic)

    def state_value(self, time_step: TimeStep, state: Nest) -> torch.Tensor:
        """Returns the values `[B]` of rows `[B]`: the critics' minimum for the policy's most likely action."""
        action = self.action_space.split(self.predict_step(time_step, state).output)
        q = self.critic(self.critic.features(time_step, state)[0], action.box)
        return self.values.scalarized(self.values.least(self.values.each(action.value, q)))
