"""Values of vector rewards: one number for each entry.

Values, targets and advantages keep one entry for each entry of the reward. Only the policy reads their weighted sum, so
values need not be learned again when weights change.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from alfish.data import TimeStep
from alfish.errors import UsageError
from alfish.values.scalar import Scalar, of_choice, of_least_critic


class Vector(nn.Module, Scalar):
    """Values with a number for each of the R entries of a vector reward, which have a weight and a discount each.

    An algorithm may add a bonus to its rewards, as SAC adds the entropy. With several entries, the bonus is one more,
    with weight 1, so that weights do not scale it. With one entry it is part of that entry.

    Attributes:
      weights: `[R]` float32 buffer, saved and published; write it in place to change the weights in mid-run.
      scales_bonus: whether a weight would scale the bonus too, because there is one entry.

    Args:
      gamma: `[R]` discounts per environment step. That of a bonus is the largest.
      weights: `[R]`.
      has_bonus: whether values have an entry for a bonus.
      huber_delta: as in `Scalar`.
    """

    weights: torch.Tensor
    gamma: torch.Tensor
    num_values: int
    _endless: torch.Tensor

    def __init__(
        self,
        gamma: Sequence[float],
        weights: Sequence[float],
        has_bonus: bool = False,
        huber_delta: float | None = None,
    ):
        nn.Module.__init__(self)
        self._huber_delta = huber_delta
        self.scales_bonus = has_bonus and len(weights) == 1
        self._num_bonuses = int(has_bonus and not self.scales_bonus)
        self.num_values = len(weights) + self._num_bonuses
        gamma = [*gamma, *[max(gamma)] * self._num_bonuses]
        self.register_buffer("weights", torch.tensor(weights, dtype=torch.float32))
        self.register_buffer("gamma", torch.tensor(gamma, dtype=torch.float32), persistent=False)
        self.register_buffer("_endless", torch.zeros(self.num_values), persistent=False)

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
        return of_least_critic(q, self.scalarized(q))

    def each(self, function: Callable[..., torch.Tensor], values: torch.Tensor, *others: Any) -> torch.Tensor:
        """Returns `function(entry, *others)` of each entry of values, as the last dimension again."""
        return torch.stack([function(entry, *others) for entry in values.unbind(-1)], -1)

    def of_choice(self, q: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
        return of_choice(q, choice)

    def with_bonus(self, value: torch.Tensor, bonus: torch.Tensor) -> torch.Tensor:
        """Returns `[..., R]` values with a bonus of the policy, `[...]`, added to the last entry."""
        return value + F.pad(bonus.unsqueeze(-1), (self.num_values - 1, 0))

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
