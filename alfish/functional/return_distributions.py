"""Values that are distributions of the return.

`Bins` predicts the probabilities of fixed returns. `Quantiles` predicts the returns at fixed probabilities, and
`ImplicitQuantiles` the returns at random probabilities. All have the interface of `functional.values.Scalar`.
"""

import math
from collections.abc import Callable
from typing import Annotated, Any

import gin
import torch
import torch.nn.functional as F
from torch import nn

from alfish.data import Experience
from alfish.errors import UsageError
from alfish.functional import losses
from alfish.functional.returns import lambda_return
from alfish.functional.targets import NextValues
from alfish.functional.values import Scalar, ValueLoss, of_choice, of_least_critic
from alfish.parameters import FiniteFloat, NonNegativeInt, PositiveFloat, PositiveInt, Range, UnitInterval, checked
from alfish.parameters.parts import bound


class Distribution(nn.Module, Scalar):
    """Base class of values that describe the distribution of a scalar return by K numbers.

    The loss uses only row 0 of a window. The target is the sum of discounted rewards up to the bootstrap row of row 0
    (see `targets.NextValues`), plus the discounted distribution at the bootstrap row.

    Args:
      gamma: discount per environment step.
      num_values: number of values per distribution, K.
    """

    num_values: int

    def __init__(self, gamma: float, num_values: int):
        nn.Module.__init__(self)
        self.gamma, self.num_values = gamma, num_values

    def scalarized(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the mean of distributions, `[...]` from `[..., K]`."""
        raise NotImplementedError

    def shifted(self, values: torch.Tensor, reward: torch.Tensor, discount: torch.Tensor) -> torch.Tensor:
        """Returns distributions `[..., J]` of reward + discount * Z, given distributions `values` `[..., K]` of Z."""
        raise NotImplementedError

    def of_choice(self, q: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
        return of_choice(q, choice)

    def target(self, experience: Experience, following: NextValues, lambda_: float) -> torch.Tensor:
        """Returns the target of row 0, `[1, N, J]`; `lambda_` is 1, or 0 for the one-step return.

        `following` has the values of the bootstrap row, `[1, N, K]`.
        """
        step_type = experience.time_step.step_type
        reward, discount = self.reward_and_discount(experience.time_step)
        zero = torch.zeros_like(reward)
        total = lambda_return(reward, discount, zero[1:], step_type, lambda_)
        remaining = lambda_return(zero, discount, zero[1:] + 1, step_type, lambda_)
        return self.shifted(following.value, total[:1], remaining[:1])

    def check(self, owner: object, lambda_: float, one_critic: bool = False, **uses: bool) -> None:
        name, kind = type(owner).__name__, type(self).__name__
        if lambda_ not in (0, 1):
            raise UsageError(
                f"{name}.lambda_ is {lambda_}, but {kind} are distributions, which cannot mix returns of different "
                "lengths: set it to 0 for one-step returns, or to 1 for returns over the whole window"
            )
        for use in (use for use, is_used in uses.items() if is_used):
            raise UsageError(
                f"{name} does not support {use.replace('_', ' ')} with {kind}, which are distributions; leave out "
                "either `values` or this feature"
            )


@gin.configurable(module="alfish.values", denylist=["gamma"])
@checked
class Bins(Distribution):
    """Values are logits of K equidistant returns, `[..., K]`, as in C51, REPPO, XQC and FlashSAC.

    A bonus, such as entropy, shifts all returns. A value with a bonus is `[..., K + 1]`: the last number is the bonus.
    A target consists of probabilities of the K returns: each shifted return G is clipped to [low,
    high], and the probability of G is divided between the two neighbouring bins by distance. With `smoothing`, a normal
    distribution around G replaces G (HL-Gauss). Bin k gets the probability of its interval, normalized over all
    intervals:

        p_k = (Phi((z_k + w/2 - G) / s) - Phi((z_k - w/2 - G) / s)) / c,
        c = Phi((high + w/2 - G) / s) - Phi((low - w/2 - G) / s)

    with the distance w between bins and the standard deviation s = smoothing w. The loss is the cross-entropy.

    Args:
      gamma: discount per environment step, set by the algorithm.
      num_bins: number of bins, K.
      low, high: returns of the first and the last bin. Returns beyond this range are clipped without a message; the
        summary `outside` shows the target's probability in these two bins.
      smoothing: standard deviation of the normal around a target's return, in units of the distance between bins; None
        divides each return between two bins.

    Source: Bellemare et al., 2017, algorithm 1, https://arxiv.org/abs/1707.06887; smoothing: Farebrother et al., 2024,
    https://arxiv.org/abs/2403.03950.
    """

    returns: torch.Tensor  # [K] returns of the bins
    _edges: torch.Tensor  # [K + 1], edges of the bins' intervals

    def __init__(
        self,
        gamma: UnitInterval,
        num_bins: Annotated[int, Range(2)] = 51,
        low: FiniteFloat = -10.0,
        high: FiniteFloat = 10.0,
        smoothing: PositiveFloat | None = None,
    ):
        if low >= high:
            raise UsageError(f"Bins.low is {low}, and Bins.high is {high}; `low` must be below `high`")
        super().__init__(gamma, num_bins)
        self._low = low
        self._high = high
        self._width = (high - low) / (num_bins - 1)
        self._smoothing = smoothing
        self.register_buffer("returns", torch.linspace(low, high, num_bins), persistent=False)
        if smoothing is not None:
            edges = torch.linspace(low - self._width / 2, high + self._width / 2, num_bins + 1)
            self.register_buffer("_edges", edges, persistent=False)

    def scalarized(self, values: torch.Tensor) -> torch.Tensor:
        mean = (values[..., : self.num_values].softmax(-1) * self.returns).sum(-1)
        return mean if values.shape[-1] == self.num_values else mean + values[..., -1]

    def least(self, q: torch.Tensor) -> torch.Tensor:
        """Returns, for each row, the distribution of the critic with the least mean, `[..., K]` from `[E, ..., K]`."""
        return of_least_critic(q, self.scalarized(q))

    def average(self, q: torch.Tensor) -> torch.Tensor:
        """Returns the logits of the critics' mean probabilities, `[..., K]` from `[E, ..., K]`."""
        return F.log_softmax(q, -1).logsumexp(0)

    def with_bonus(self, value: torch.Tensor, bonus: torch.Tensor) -> torch.Tensor:
        if value.shape[-1] > self.num_values:
            value, bonus = value[..., :-1], bonus + value[..., -1]
        return torch.cat([value, bonus.unsqueeze(-1)], -1)

    def shifted(self, values: torch.Tensor, reward: torch.Tensor, discount: torch.Tensor) -> torch.Tensor:
        returns = self.returns
        if values.shape[-1] > self.num_values:
            returns = returns + values[..., -1:]
        shares = self.certain(reward.unsqueeze(-1) + discount.unsqueeze(-1) * returns)  # [..., K, K]
        probabilities = values[..., : self.num_values].softmax(-1)
        return (probabilities.unsqueeze(-1) * shares).sum(-2)

    def certain(self, returns: torch.Tensor) -> torch.Tensor:
        """Returns the targets `[..., K]` for deterministic returns `[...]`."""
        inside = returns.clamp(self._low, self._high).unsqueeze(-1)
        if self._smoothing is None:
            # The share of a return in a bin falls linearly from 1 at the bin's return to 0 at the neighbouring returns.
            return (1 - (inside - self.returns).abs() / self._width).clamp(min=0)
        deviation = self._smoothing * self._width
        below = 0.5 + 0.5 * torch.erf((self._edges - inside) / (math.sqrt(2) * deviation))  # [..., K + 1]
        return (below[..., 1:] - below[..., :-1]) / (below[..., -1:] - below[..., :1])

    def clipped(self, returns: torch.Tensor) -> torch.Tensor:
        """Returns 1 for each return `[...]` that is clipped, and 0 for each other return."""
        return ((returns < self._low) | (returns > self._high)).float()

    def loss(self, q: torch.Tensor, target: torch.Tensor) -> ValueLoss:
        cross_entropy = -(target * F.log_softmax(q, -1)).sum(-1)
        return ValueLoss(cross_entropy, cross_entropy)

    def shown(self, q: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        mean = self.scalarized(q)
        variance = (q.softmax(-1) * (self.returns - mean.unsqueeze(-1)).square()).sum(-1)
        outside = (target[..., 0] + target[..., -1]).expand_as(mean)
        return {"q": mean, "q_std": variance.sqrt(), "outside": outside}


@gin.configurable(module="alfish.values", denylist=["gamma"])
@checked
class Quantiles(Distribution):
    """Values are K quantiles of the return, `[..., K]`, at probabilities (k + 0.5) / K, as in QR-DQN and TQC.

    The loss of a quantile is the mean asymmetric Huber loss over all returns of the target; the losses of all quantiles
    are added up:

        sum over k of mean over j of |tau_k - 1(y_j < q_k)| huber(y_j - q_k)

    Args:
      gamma: discount per environment step, set by the algorithm.
      num_quantiles: number of quantiles, K.
      num_dropped: number of quantiles per critic that the target leaves out (TQC): with E critics, the E num_dropped
        largest quantiles of all critics. 0 means that no quantile is left out.
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
        """Returns all critics' quantiles without the `E num_dropped` largest: `[..., E (K - num_dropped)]`."""
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
                f"Quantiles.num_dropped is {self._num_dropped}, but it requires several critics and "
                f"{type(owner).__name__} has one; leave num_dropped out"
            )

    def loss(self, q: torch.Tensor, target: torch.Tensor) -> ValueLoss:
        return quantile_loss(q, self.probabilities, target, self._delta)

    def shown(self, q: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"q": q.mean(-1), "q_std": q.std(-1, unbiased=False)}


@gin.configurable(module="alfish.values", denylist=["gamma"])
@checked
class ImplicitQuantiles(Distribution):
    """Values are N quantiles, followed by their N random probabilities, `[..., 2 N]`, as in IQN.

    The network draws the probabilities (`ImplicitQNetwork`). In evaluation, the probabilities are (k + 0.5) / N.

    Args:
      gamma: discount per environment step, set by the algorithm.
      num_samples: number of probabilities, N, for each value, target and choice of an action.
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
      q: quantiles `[..., K]` of the value.
      probabilities: probabilities of the quantiles, `[..., K]` or `[K]`.
      target: returns `[..., J]` of equal probability.
      delta: error beyond which the loss is linear.
    """
    error = target.unsqueeze(-2) - q.unsqueeze(-1)  # [..., K, J]
    weight = (probabilities.unsqueeze(-1) - (error < 0).to(error.dtype)).abs()
    return ValueLoss((weight * losses.huber(error, delta)).mean(-1).sum(-1), error.abs().mean((-2, -1)))
