"""Objectives: the entries of a reward, and the one number that a policy maximizes.

Values, targets and advantages keep one entry for each entry of a vector reward. Only the policy reads their weighted
sum, so values need not be learned again when weights change. A scalar reward is one objective; its functions are the
plain ones, with no operation more. `objectives_of` returns the object that fits a reward.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
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

    def magnitude(self, errors: torch.Tensor) -> torch.Tensor:
        """Returns the size of TD errors, `[...]` from `[..., R]`: a priority."""
        return errors.abs()

    def least(self, q: torch.Tensor) -> torch.Tensor:
        """Returns the values of the most pessimistic critic of each row, `[...]` from `[E, ...]`."""
        return q.amin(0)

    def each(self, function: Callable[..., torch.Tensor], values: torch.Tensor, *others: Any) -> torch.Tensor:
        """Returns `function(values, *others)`, for each entry."""
        return function(values, *others)

    def with_bonus(self, value: torch.Tensor, bonus: torch.Tensor) -> torch.Tensor:
        """Returns values with a bonus of the policy, `[...]`, whose weight is 1."""
        return value + bonus

    def sized(self, network: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the factory of a network of action values with an output for each entry."""
        return network

    def return_gamma(self, lower_bound: bool) -> float | None:
        """Returns the discount of the returns that replay stores for lower bounds; None: it stores none."""
        return self.gamma if lower_bound else None


class Objectives(nn.Module):
    """The R entries of a vector reward, with a weight and a discount each.

    An algorithm may add a bonus to its rewards, as SAC adds the entropy. With several entries, the bonus is one more,
    with weight 1, so that weights do not scale it. With one entry it is part of that entry.

    Attributes:
      weights: `[R]` float32 buffer, saved and published; write it in place to change the weights in mid-run.

    Args:
      gamma: `[R]` discounts per environment step. That of a bonus is the largest.
      weights: `[R]`.
      has_bonus: whether values have an entry for a bonus.
    """

    weights: torch.Tensor
    gamma: torch.Tensor
    _endless: torch.Tensor

    def __init__(self, gamma: Sequence[float], weights: Sequence[float], has_bonus: bool = False):
        super().__init__()
        self._num_bonuses = int(has_bonus and len(weights) > 1)
        self._num_values = len(weights) + self._num_bonuses
        gamma = [*gamma, *[max(gamma)] * self._num_bonuses]
        self.register_buffer("weights", torch.tensor(weights, dtype=torch.float32))
        self.register_buffer("gamma", torch.tensor(gamma, dtype=torch.float32), persistent=False)
        self.register_buffer("_endless", torch.zeros(self._num_values), persistent=False)

    def ignore_ends(self, entry: int) -> None:
        """Makes an entry bootstrap at the end of an episode that terminated, from the value of its LAST row.

        Call it before training. Values of LAST rows are never trained.
        """
        self._endless[entry] = 1

    def rows(self, time_step: TimeStep) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns rewards and discounts, both `[..., R]`, as the functions of `returns` take them."""
        discount = self.gamma * torch.maximum(time_step.discount.unsqueeze(-1), self._endless)
        return self._extended(time_step.reward, 0.0), discount

    def scalarized(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the weighted sum of values, `[...]` from `[..., R]`."""
        return (values * self._extended(self.weights, 1.0)).sum(-1)

    def total(self, losses: torch.Tensor) -> torch.Tensor:
        """Returns the sum of the losses of all values, `[...]` from `[..., R]`; weights do not scale it."""
        return losses.sum(-1)

    def magnitude(self, errors: torch.Tensor) -> torch.Tensor:
        """Returns the weighted sum of the sizes of TD errors, `[...]` from `[..., R]`: a priority."""
        return (errors * self._extended(self.weights, 1.0)).abs().sum(-1)

    def least(self, q: torch.Tensor) -> torch.Tensor:
        """Returns all values of the critic whose weighted sum is least, for each row, `[..., R]` from `[E, ..., R]`.

        A minimum of each entry would join values of different critics.
        """
        critic = self.scalarized(q).argmin(0)[None, ..., None]
        return q.gather(0, critic.expand(1, *q.shape[1:])).squeeze(0)

    def each(self, function: Callable[..., torch.Tensor], values: torch.Tensor, *others: Any) -> torch.Tensor:
        """Returns `function(entry, *others)` of each entry of values, as the last dimension again."""
        return torch.stack([function(entry, *others) for entry in values.unbind(-1)], -1)

    def with_bonus(self, value: torch.Tensor, bonus: torch.Tensor) -> torch.Tensor:
        """Returns `[..., R]` values with a bonus of the policy, `[...]`, added to the last entry."""
        return value + F.pad(bonus.unsqueeze(-1), (self._num_values - 1, 0))

    def sized(self, network: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the factory of a network of action values with an output for each entry."""
        return functools.partial(network, num_objectives=self._num_values)

    def return_gamma(self, lower_bound: bool) -> None:
        """Returns None: replay stores no returns of vector rewards.

        Raises:
          UsageError: there is a lower bound.
        """
        if lower_bound:
            raise UsageError(
                "lower_bound takes a scalar reward, because the best returns of two objectives may need two policies; "
                "set lower_bound to False"
            )

    def _extended(self, entries: torch.Tensor, bonus: float) -> torch.Tensor:
        """Returns `[..., R]` entries, and one more for the bonus if it has its own."""
        return F.pad(entries, (0, 1), value=bonus) if self._num_bonuses else entries


def objectives_of(
    owner: object, reward_spec: spaces.Box, gamma: Discount, weights: RewardWeights | None, has_bonus: bool = False
) -> OneObjective | Objectives:
    """Returns the objectives of a reward.

    Args:
      owner: the algorithm, for messages.
      reward_spec: Box of shape () or (R,).
      gamma: one number for all entries, or one for each.
      weights: one for each entry; None: 1.
      has_bonus: whether the algorithm adds a bonus to its values.

    Raises:
      UsageError: there is another number of discounts or of weights than of entries; a bonus would be scaled.
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
    weights = weights or [1.0] * size
    if has_bonus and size == 1 and weights[0] != 1:
        raise UsageError(
            f"{name}.reward_weights is {weights!r}, and with one entry the bonus of {name} is part of it; leave the "
            "weight out, and scale the reward by RewardScale"
        )
    return Objectives(gamma if isinstance(gamma, Sequence) else [gamma] * size, weights, has_bonus)
