"""Values that are returns of fixed probabilities."""

from collections.abc import Callable
from typing import Any

import gin
import torch

from alfish import losses
from alfish.errors import UsageError
from alfish.parameters import NonNegativeInt, PositiveFloat, PositiveInt, UnitInterval, checked
from alfish.parameters.parts import bound
from alfish.values.distribution import Distribution
from alfish.values.scalar import ValueLoss


@gin.configurable(module="alfish.values", denylist=["gamma"])
@checked
class Quantiles(Distribution):
    """A value is K quantiles of the return, `[..., K]`, those of (k + 0.5) / K; of QR-DQN and TQC.

    The loss of a quantile is the mean of its asymmetric Huber losses for all returns of the target; those of all
    quantiles are added up:

        sum over k of mean over j of |tau_k - 1(y_j < q_k)| huber(y_j - q_k)

    Args:
      gamma: discount per environment step; the algorithm gives it.
      num_quantiles: K.
      num_dropped: of several critics, whose quantiles are put together: the number for each critic of the largest ones
        that the target leaves out (TQC). 0: none.
      huber_delta: error beyond which the loss is linear, in units of return.

    Source: Dabney et al., 2018, eq. 10, https://arxiv.org/abs/1710.10044; Kuznetsov et al., 2020, eq. 12 to 15,
    https://arxiv.org/abs/2005.04269.
    """

    probabilities: torch.Tensor  # [K]

    def __init__(
        self,
        gamma: UnitInterval,
        num_quantiles: PositiveInt = 25,
        num_dropped: NonNegativeInt = 0,
        huber_delta: PositiveFloat = 1.0,
    ):
        if num_dropped >= num_quantiles:
            raise UsageError(
                f"Quantiles.num_dropped is {num_dropped}; it must be less than num_quantiles, which is {num_quantiles}"
            )
        super().__init__(gamma, num_quantiles)
        self._num_dropped, self._delta = num_dropped, huber_delta
        probabilities = (torch.arange(num_quantiles) + 0.5) / num_quantiles
        self.register_buffer("probabilities", probabilities, persistent=False)

    def scalarized(self, values: torch.Tensor) -> torch.Tensor:
        return values.mean(-1)

    def least(self, q: torch.Tensor) -> torch.Tensor:
        """Returns the quantiles of all critics but the largest ones, `[..., E (K - dropped)]` from `[E, ..., K]`."""
        together = q.movedim(0, -2).flatten(-2)
        if not self._num_dropped:
            return together
        return together.sort(-1).values[..., : len(q) * (self.num_values - self._num_dropped)]

    def with_bonus(self, value: torch.Tensor, bonus: torch.Tensor) -> torch.Tensor:
        return value + bonus.unsqueeze(-1)

    def shifted(self, values: torch.Tensor, reward: torch.Tensor, discount: torch.Tensor) -> torch.Tensor:
        return reward.unsqueeze(-1) + discount.unsqueeze(-1) * values

    def check(self, owner: object, lambda_: float, one_critic: bool = False, **uses: bool) -> None:
        super().check(owner, lambda_, one_critic, **uses)
        if one_critic and self._num_dropped:
            raise UsageError(
                f"Quantiles.num_dropped is {self._num_dropped}, for the targets of several critics, and "
                f"{type(owner).__name__} has one; leave it out"
            )

    def loss(self, q: torch.Tensor, target: torch.Tensor) -> ValueLoss:
        return quantile_loss(q, self.probabilities, target, self._delta)

    def shown(self, q: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"q": q.mean(-1), "q_std": q.std(-1, unbiased=False)}


@gin.configurable(module="alfish.values", denylist=["gamma"])
@checked
class ImplicitQuantiles(Distribution):
    """A value is N returns of random probabilities, and then these probabilities, `[..., 2 N]`; of IQN.

    The network draws the probabilities and has them as an input (`ImplicitQNetwork`). In evaluation they are
    (k + 0.5) / N.

    Args:
      gamma: discount per environment step; the algorithm gives it.
      num_samples: N, of each value, target and choice of an action.
      huber_delta: error beyond which the loss is linear, in units of return.

    Source: Dabney et al., 2018, eq. 3, https://arxiv.org/abs/1806.06923.
    """

    def __init__(self, gamma: UnitInterval, num_samples: PositiveInt = 32, huber_delta: PositiveFloat = 1.0):
        super().__init__(gamma, 2 * num_samples)
        self._num_samples, self._delta = num_samples, huber_delta

    def sized(self, network: Callable[..., Any]) -> Callable[..., Any]:
        return bound(network, "ImplicitQuantiles", num_samples=self._num_samples)

    def scalarized(self, values: torch.Tensor) -> torch.Tensor:
        return values[..., : self._num_samples].mean(-1)

    def shifted(self, values: torch.Tensor, reward: torch.Tensor, discount: torch.Tensor) -> torch.Tensor:
        return reward.unsqueeze(-1) + discount.unsqueeze(-1) * values[..., : self._num_samples]

    def loss(self, q: torch.Tensor, target: torch.Tensor) -> ValueLoss:
        returns, probabilities = q.split(self._num_samples, -1)
        return quantile_loss(returns, probabilities, target, self._delta)


def quantile_loss(q: torch.Tensor, probabilities: torch.Tensor, target: torch.Tensor, delta: float) -> ValueLoss:
    """Returns the losses of quantiles, `[...]`; the formula is in `Quantiles`.

    Args:
      q: `[..., K]`.
      probabilities: of the quantiles, `[..., K]` or `[K]`.
      target: `[..., J]` returns of equal probability.
      delta: error beyond which the loss is linear.
    """
    error = target.unsqueeze(-2) - q.unsqueeze(-1)  # [..., K, J]
    weight = (probabilities.unsqueeze(-1) - (error < 0).to(error.dtype)).abs()
    return ValueLoss((weight * losses.huber(error, delta)).mean(-1).sum(-1), error.abs().mean((-2, -1)))
