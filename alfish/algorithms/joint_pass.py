"""One pass of critics over the rows of a transition, as batch norm needs; and the choice of a kind of passes."""

from collections.abc import Sequence
from typing import Any

import torch

from alfish.algorithms.soft_critics import Box, NextQ, SeparatePasses
from alfish.data import Experience
from alfish.errors import UsageError
from alfish.networks import Features, TargetNetwork
from alfish.networks.bodies.batch_norm import Moments, has_batch_norm


class JointPass(SeparatePasses):
    """Critics over all rows of a window in one pass, and so their targets, if there are any.

    Row 0 has the action that was taken, and later rows have the policy's. A batch norm then has one mean and one
    variance for both. Without batch norm the values are those of separate passes.

    Args:
      passes: arguments of `SeparatePasses`.
      with_actor: see `SeparatePasses`; FlashSAC has it.

    Source: Bhatt et al., 2024, section 3, https://arxiv.org/abs/1902.05605.
    """

    def __init__(self, *passes: Any, with_actor: bool = False):
        super().__init__(*passes)
        self.with_actor, self._has_batch_norm = with_actor, has_batch_norm(self._critic)

    def online(
        self, experience: Experience, features: Features, box: Box, next_box: Box, moments: Moments
    ) -> tuple[torch.Tensor, NextQ]:
        q = self._over_all(self._critic, experience, box, next_box, moments)
        return q[:, :1], q[:, 1:]

    def following(
        self, experience: Experience, features: Features, box: Box, next_boxes: Sequence[Box], next_q: NextQ
    ) -> list[torch.Tensor]:
        (next_box,) = next_boxes
        if isinstance(self._target, TargetNetwork):  # by statistics of its own activations, which are not kept
            next_q = self._over_all(self._target.network, experience, box, next_box, Moments())[:, 1:]
        assert next_q is not None
        return self._least([next_q.detach()])

    def _over_all(self, critic: Any, experience: Experience, box: Box, next_box: Box, moments: Moments) -> torch.Tensor:
        boxes = None if box is None or next_box is None else torch.cat([box, next_box])
        features, _ = critic.features(experience.time_step, None)
        return critic(features, boxes, moments=moments) if self._has_batch_norm else critic(features, boxes)


def critic_passes(owner: Any, target_subset: int | None, joint_pass: bool | str, retrace: bool) -> SeparatePasses:
    """Returns the passes of the critics of an algorithm.

    Args:
      owner: the algorithm, which has `critic`, `target_critic` and `values`.
      target_subset, joint_pass, retrace: its settings.

    Raises:
      UsageError: the settings do not fit each other, or the critics.
    """
    name, size = type(owner).__name__, owner.critic.ensemble_size
    if target_subset is not None and target_subset > size:
        raise UsageError(f"{name}.target_subset is {target_subset}; it must be at most {size}, the number of critics")
    needs_more = retrace or getattr(owner.critic, "memory", None) is not None
    if needs_more and has_batch_norm(owner.critic):
        raise UsageError(
            f"{name}.critic has batch norm, which goes with neither Retrace nor memory; take critics without it, as "
            "those with norm = 'layer' or None and without a Residual body"
        )
    if joint_pass and needs_more:
        raise UsageError(
            f"{name}.joint_pass takes neither Retrace nor memory, whose rows need more than one value each; set "
            "joint_pass to False"
        )
    if not joint_pass and has_batch_norm(owner.critic):
        raise UsageError(
            f"{name}.critic has batch norm, and values of one batch need one mean and variance; set "
            f"{name}.joint_pass to True"
        )
    passes = owner.critic, owner.target_critic, owner.values, target_subset
    return JointPass(*passes, with_actor=joint_pass == "with_actor") if joint_pass else SeparatePasses(*passes)
