"""Values of the actions taken, and of the policy's actions at the rows that follow, by critics and their targets."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from alfish.data import Experience
from alfish.distributions import random_subset
from alfish.networks import Features, TargetNetwork
from alfish.networks.bodies.batch_norm import Moments
from alfish.networks.no_target import NoTarget
from alfish.values import Scalar

Box: TypeAlias = torch.Tensor | None  # [..., A] of an action's Box leaves; None: it has none
NextQ: TypeAlias = torch.Tensor | None


class SeparatePasses:
    """Critics over the rows that train, and target critics over the rows that follow.

    Args:
      critic, target: `CriticEnsemble` or another network with its interface, and its target.
      values: the kind of their values.
      subset: number of critics, drawn at random in each call, of whose values the least are taken; None: all.

    Attributes:
      with_actor: whether the actor, too, runs over all rows of a window in one pass when it trains.
    """

    with_actor = False

    def __init__(self, critic: Any, target: TargetNetwork | NoTarget, values: Scalar, subset: int | None):
        self._critic, self._target, self._values, self._subset = critic, target, values, subset

    def online(
        self, experience: Experience, features: Features, box: Box, next_box: Box, moments: Moments
    ) -> tuple[torch.Tensor, NextQ]:
        """Returns the critics' values of the rows that train, `[E, T', N, ...]`, and of rows 1 to L-1 if they have any.

        Args:
          experience, features: `[L, N]`.
          box, next_box: at the rows that train, `[T', N, A]`; the policy's at rows 1 to L-1.
          moments: collects those of the critics' batch norms.
        """
        return self._critic(features.critic, box), None

    def following(
        self, experience: Experience, features: Features, box: Box, next_boxes: Sequence[Box], next_q: NextQ
    ) -> list[torch.Tensor]:
        """Returns the least target values of rows 1 to L-1 for each of `next_boxes`; `online` gives `next_q`."""
        return self._least([self._target(features.next_critic, each) for each in next_boxes])

    def _least(self, each_q: list[torch.Tensor]) -> list[torch.Tensor]:
        return [self._values.least(q) for q in random_subset(each_q, self._subset)]
