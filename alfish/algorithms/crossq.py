"""CrossQ and XQC: SAC without target network, with batch norm and one pass of the critics over both observations.

CrossQ: Bhatt et al., 2024, https://arxiv.org/abs/1902.05605; no target network (`SAC.target_rate = None`).
XQC: Palenicek et al., 2026, https://arxiv.org/abs/2509.25174; weights of unit norm are a setting of the networks, and
categorical values a setting of `values`.

In a pass, row 0 has the action that was taken, and later rows have actions of the policy. Batch norm therefore uses one
mean and one variance for all rows together. Without batch norm, the values equal SAC's.
"""

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import gin
import torch

from alfish import nest
from alfish.algorithms.sac import SAC
from alfish.data import AlgStep, Experience, LossInfo
from alfish.functional.targets import NextValues
from alfish.nest import Nest
from alfish.networks import Features, TargetNetwork, first_and_bootstrap_rows
from alfish.networks.bodies.batch_norm import Moments, has_batch_norm
from alfish.networks.hybrid import HybridPolicy
from alfish.parameters import checked
from alfish.parameters.parts import check_forward


class CrossQTrain(NamedTuple):
    """Outputs for the row that trains, as in `SACTrain`, and new statistics of batch norm."""

    q: torch.Tensor
    following: NextValues
    value: torch.Tensor | None
    entropies: dict[str, torch.Tensor]
    moments: Moments


@gin.configurable(module="alfish.algorithms")
@checked
class CrossQ(SAC):
    """SAC with one pass of the critics over both rows of a transition; the settings are those of `SAC`."""

    updates_batch_norms = ("actor_mlp", "critic.body", "target_critic")
    # Whether the actor's batch norm updates its statistics even if the actor does not train.
    collects_always: ClassVar[bool] = False

    def make_networks(
        self, actor_encoder: Callable[[Nest], Any], actor_mlp: Callable[[int], Any], critic: Callable[..., Any]
    ) -> None:
        super().make_networks(actor_encoder, actor_mlp, critic)
        self._has_batch_norm = has_batch_norm(self.actor_mlp), has_batch_norm(self.critic)  # actor, critics
        if self._has_batch_norm[0]:
            check_forward(self.actor_mlp, f"{type(self).__name__}.actor_mlp, with batch norm,", takes=2)

    def train_step(self, experience: Experience, state: Nest) -> AlgStep:
        experience = first_and_bootstrap_rows(experience, self._lambda)
        features, mask, moments = self.window_features(experience), self.discrete_mask(experience.time_step), Moments()
        taken = self.action_space.split(nest.at(experience.action, slice(0, 1)))
        with torch.no_grad():
            drawn = self.policy(features.next_actor, None if mask is None else mask[1:]).choose()
        boxes = None if taken.box is None or drawn.box is None else torch.cat([taken.box, drawn.box])
        all_q = self._over_all(self.critic, experience, boxes, moments)  # [E, L, N]
        q = self.values.each(taken.select, all_q[:, :1])
        # The target critic normalizes by the statistics of this batch, and does not store them.
        if isinstance(self.target_critic, TargetNetwork):
            all_q = self._over_all(self.target_critic.network, experience, boxes, Moments())
        following = NextValues(self.soft_value(self.target_q(all_q[:, 1:].detach()), drawn, drawn.entropies()))
        if not self.trains("actor"):
            if self.collects_always:
                self.trained_policy(features, mask, moments)
            return AlgStep(info=CrossQTrain(q, following, None, {}, moments))
        choice = self.trained_policy(features, mask, moments).choose()
        policy_q = self.critic(features.critic.detach(), choice.box)  # uses running statistics; trains no encoder
        entropies = choice.entropies()
        value = self.values.scalarized(self.soft_value(self.actor_q(policy_q), choice, entropies))
        return AlgStep(info=CrossQTrain(q, following, value, entropies, moments))

    def calc_loss(self, experience: Experience, info: Any) -> LossInfo:
        return super().calc_loss(experience, info)._replace(buffers=info.moments)

    def trained_policy(self, features: Features, mask: torch.Tensor | None, moments: Moments) -> HybridPolicy:
        """Returns the policy at row 0; batch-norm layers write new statistics to `moments`.

        `mask` is the mask `[L, N, n]` of all rows.
        """
        return self.policy_with_moments(features.actor, None if mask is None else mask[:1], moments)

    def policy_with_moments(self, features: torch.Tensor, mask: torch.Tensor | None, moments: Moments) -> HybridPolicy:
        """Returns the policy for features of the actor.

        Batch-norm layers normalize by the statistics of `features`, and write them to `moments`.
        """
        with_moments = (moments,) if self._has_batch_norm[0] else ()
        return self.policy_head(self.actor_mlp(features, *with_moments), mask)

    def _over_all(
        self, critic: Any, experience: Experience, boxes: torch.Tensor | None, moments: Moments
    ) -> torch.Tensor:
        features, _ = critic.features(experience.time_step, None)
        return critic(features, boxes, moments=moments) if self._has_batch_norm[1] else critic(features, boxes)


@gin.configurable(module="alfish.algorithms")
@checked
class XQC(CrossQ):
    """CrossQ whose actor updates its batch-norm statistics in every update; the settings are those of `SAC`."""

    collects_always: ClassVar[bool] = True
