"""Values that are probabilities of fixed returns."""

import math

import gin
import torch
import torch.nn.functional as F

from alfish.errors import UsageError
from alfish.parameters import FiniteFloat, PositiveFloat, PositiveInt, UnitInterval, checked
from alfish.values.distribution import Distribution
from alfish.values.scalar import ValueLoss, of_least_critic


@gin.configurable(module="alfish.values", denylist=["gamma"])
@checked
class Bins(Distribution):
    """A value is the logits of K returns at equal distances, `[..., K]`; of C51, REPPO, XQC and FlashSAC.

    A bonus of the policy shifts all returns; a value with a bonus has it as one more number, `[..., K + 1]`. A target
    is the probabilities of the K returns: each return of a row is cut off at `low` and `high`, and its probability is
    divided between the two bins beside it, by distance. With `smoothing` it is a normal's instead (HL-Gauss), and bin k
    gets the probability of its interval, divided by that of all intervals:

        p_k = (Phi((z_k + w/2 - G) / s) - Phi((z_k - w/2 - G) / s)) / (that of low - w/2 to high + w/2)

    with the bins' distance w and the standard deviation s = smoothing w. The loss is the cross-entropy.

    Args:
      gamma: discount per environment step; the algorithm gives it.
      num_bins: K, 2 or more.
      low, high: the first and the last return. Returns beyond them are cut off without a message: see `outside` in the
        summaries, the share of the target's probability in the first and the last bin.
      smoothing: standard deviation of a target's return, in units of the bins' distance; None: each return is divided
        between two bins.

    Source: Bellemare et al., 2017, algorithm 1, https://arxiv.org/abs/1707.06887; smoothing: Farebrother et al., 2024,
    https://arxiv.org/abs/2403.03950.
    """

    returns: torch.Tensor  # [K]
    _edges: torch.Tensor  # [K + 1], of the bins' intervals

    def __init__(
        self,
        gamma: UnitInterval,
        num_bins: PositiveInt = 51,
        low: FiniteFloat = -10.0,
        high: FiniteFloat = 10.0,
        smoothing: PositiveFloat | None = None,
    ):
        if num_bins < 2 or low >= high:
            raise UsageError(
                f"Bins are {num_bins} from {low} to {high}; there must be at least 2, and `low` must be below `high`"
            )
        super().__init__(gamma, num_bins)
        self._low, self._high, self._width = low, high, (high - low) / (num_bins - 1)
        self._smoothing = smoothing
        self.register_buffer("returns", torch.linspace(low, high, num_bins), persistent=False)
        if smoothing is not None:
            edges = torch.linspace(low - self._width / 2, high + self._width / 2, num_bins + 1)
            self.register_buffer("_edges", edges, persistent=False)

    def scalarized(self, values: torch.Tensor) -> torch.Tensor:
        mean = (values[..., : self.num_values].softmax(-1) * self.returns).sum(-1)
        return mean if values.shape[-1] == self.num_values else mean + values[..., -1]

    def least(self, q: torch.Tensor) -> torch.Tensor:
        """Returns the distribution with the least mean, for each row, `[..., K]` from `[E, ..., K]`."""
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
        """Returns the targets `[..., K]` of returns `[...]` that are certain."""
        inside = returns.clamp(self._low, self._high).unsqueeze(-1)
        if self._smoothing is None:
            # A return's share of a bin falls from 1 at its center to 0 at its neighbours'.
            return (1 - (inside - self.returns).abs() / self._width).clamp(min=0)
        deviation = self._smoothing * self._width
        below = 0.5 + 0.5 * torch.erf((self._edges - inside) / (math.sqrt(2) * deviation))  # [..., K + 1]
        return (below[..., 1:] - below[..., :-1]) / (below[..., -1:] - below[..., :1])

    def clipped(self, returns: torch.Tensor) -> torch.Tensor:
        """Returns 1 for each return `[...]` that is cut off, and 0 for others."""
        return ((returns < self._low) | (returns > self._high)).float()

    def loss(self, q: torch.Tensor, target: torch.Tensor) -> ValueLoss:
        cross_entropy = -(target * F.log_softmax(q, -1)).sum(-1)
        return ValueLoss(cross_entropy, cross_entropy)

    def shown(self, q: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        mean = self.scalarized(q)
        variance = (q.softmax(-1) * (self.returns - mean.unsqueeze(-1)).square()).sum(-1)
        outside = (target[..., 0] + target[..., -1]).expand_as(mean)
        return {"q": mean, "q_std": variance.sqrt(), "outside": outside}
