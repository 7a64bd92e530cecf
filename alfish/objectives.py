"""Objectives: the entries of a reward, and the one number that a policy maximizes.

Values, targets and advantages keep one entry for each entry of a vector reward. Only the policy reads their weighted
sum, so values need not be learned again when weights change. A scalar reward is one objective; its functions are the
plain ones, with no operation more. `objectives_of` returns the object that fits a reward.
"""

from collections.abc import Sequence
from typing import TypeAlias

import torch
from gymnasium import spaces
from torch import nn

from alfish.data import TimeStep
from alfish.errors import UsageError
from alfish.parameters import FiniteFloat, UnitInterval

Discount: TypeAlias = UnitInterval | Sequence[UnitInterval]  # per environment step; a sequence: one for each entry
RewardWeights: TypeAlias = Sequence[FiniteFloat]  # of the entries of a vector reward


class OneObjective:
    """A scalar reward; the interface of `Objectives`.

    Args:
      gamma: discount per environment step.
    """

    weights: torch.Tensor | None = None

    def __init__(self, gamma: float):
        self.gamma = gamma

    def rows(self, time_step: TimeStep) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns rewards and discounts, as the functions of `returns` take them."""
        return time_step.reward, self.gamma * time_step.discount

    def scalarized(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the number that the policy maximizes, `[...]` from `[..., R]`."""
        return values

    def total(self, losses: torch.Tensor) -> torch.Tensor:
        """Returns the sum of the losses of all values, `[...]` from `[..., R]`."""
        return losses


class Objectives(nn.Module):
    """The R entries of a vector reward, with a weight and a discount each.

    Attributes:
      weights: `[R]` float32 buffer, saved and published; write it in place to change the weights in mid-run.

    Args:
      gamma: `[R]` discounts per environment step.
      weights: `[R]`.
    """

    weights: torch.Tensor
    gamma: torch.Tensor
    _endless: torch.Tensor

    def __init__(self, gamma: Sequence[float], weights: Sequence[float]):
        super().__init__()
        self.register_buffer("weights", torch.tensor(weights, dtype=torch.float32))
        self.register_buffer("gamma", torch.tensor(gamma, dtype=torch.float32), persistent=False)
        self.register_buffer("_endless", torch.zeros(len(gamma)), persistent=False)

    def ignore_ends(self, entry: int) -> None:
        """Makes an entry bootstrap at the end of an episode that terminated, from the value of its LAST row.

        Call it before training. Values of LAST rows are never trained.
        """
        self._endless[entry] = 1

    def rows(self, time_step: TimeStep) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns rewards and discounts, both `[..., R]`, as the functions of `returns` take them."""
        return time_step.reward, self.gamma * torch.maximum(time_step.discount.unsqueeze(-1), self._endless)

    def scalarized(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the weighted sum of values, `[...]` from `[..., R]`."""
        return (values * self.weights).sum(-1)

    def total(self, losses: torch.Tensor) -> torch.Tensor:
        """Returns the sum of the losses of all values, `[...]` from `[..., R]`; weights do not scale it."""
        return losses.sum(-1)


def objectives_of(
    owner: object, reward_spec: spaces.Box, gamma: Discount, weights: RewardWeights | None
) -> OneObjective | Objectives:
    """Returns the objectives of a reward.

    Args:
      owner: the algorithm, for messages.
      reward_spec: Box of shape () or (R,).
      gamma: one number for all entries, or one for each.
      weights: one for each entry; None: 1.

    Raises:
      UsageError: there is another number of discounts or of weights than of entries.
    """
    name, size = type(owner).__name__, sum(reward_spec.shape)
    for argument, value in (("gamma", gamma), ("reward_weights", weights)):
        if not isinstance(value, Sequence):
            continue
        if not reward_spec.shape:
            raise UsageError(f"{name}.{argument} is {value!r}, for a vector reward, and this reward is one number")
        if len(value) != size:
            raise UsageError(
                f"{name}.{argument} is {value!r}, and the reward has {size} entries; it must have one number for each"
            )
    if not reward_spec.shape:
        assert not isinstance(gamma, Sequence)
        return OneObjective(gamma)
    return Objectives(gamma if isinstance(gamma, Sequence) else [gamma] * size, weights or [1.0] * size)
