"""Learning rates that follow the KL divergence between the policy of the rollout and the policy in training.

A rate is a 0-d tensor on the algorithm's device, so an update reads no number of a GPU, and compiled updates and CUDA
graphs change the rate themselves.
"""

from collections.abc import Mapping
from typing import Any

import gin
import torch

from alfish.errors import UsageError
from alfish.parameters import PositiveFloat, checked


@gin.configurable(module="alfish")
@checked
class KLAdaptive:
    """A learning rate that follows the KL divergence of a minibatch: `Learner.learning_rate = @KLAdaptive()`.

        KL > 2 target:    rate = max(rate / factor, lowest)
        KL < target / 2:  rate = min(rate * factor, highest)

    KL is the mean of KL(rollout policy, policy) over the rows of all learners, computed before the update from the
    stored distributions. The update already uses the new rate. A skipped update leaves the rate as it is. The algorithm
    returns `LossInfo.kl`, as PPO and APPO do.

    Args:
      initial: learning rate at the start.
      target: KL divergence that the updates of an iteration may reach, in nats.
      factor: factor by which an update changes the rate, above 1.
      lowest: smallest learning rate.
      highest: largest learning rate.

    Source: `schedule = 'adaptive'` of rsl_rl, which leaves the rate as it is where the KL is exactly 0; here it rises,
    as in Sample Factory.
    """

    def __init__(
        self,
        initial: PositiveFloat = 1e-3,
        target: PositiveFloat = 0.01,
        factor: PositiveFloat = 1.5,
        lowest: PositiveFloat = 1e-5,
        highest: PositiveFloat = 1e-2,
    ):
        if factor <= 1:
            raise UsageError(f"KLAdaptive.factor is {factor}; it divides a rate that is too high, so take more than 1")
        if not lowest <= initial <= highest:
            raise UsageError(
                f"KLAdaptive.initial is {initial}, outside of [{lowest}, {highest}]; move it into the range, or "
                "change lowest or highest"
            )
        self.initial = initial
        self._target = target
        self._factor = factor
        self._lowest = lowest
        self._highest = highest

    def next(self, rate: torch.Tensor, kl: torch.Tensor) -> torch.Tensor:
        """Returns the 0-d rate for an update whose minibatch has this 0-d KL; a KL of nan changes nothing."""
        lower = (rate / self._factor).clamp(min=self._lowest)
        higher = (rate * self._factor).clamp(max=self._highest)
        return torch.where(kl > 2 * self._target, lower, torch.where(kl < self._target / 2, higher, rate))

    def check(self, rate: torch.Tensor) -> None:
        """Raises ValueError if a saved rate is outside of [lowest, highest]."""
        # Both limits are rounded to float32, and so is the saved rate.
        if rate.ndim or not 0.999 * self._lowest <= float(rate) <= 1.001 * self._highest:
            raise ValueError(f"the learning rate is {rate}, outside of [{self._lowest}, {self._highest}]")

    def __repr__(self) -> str:
        return f"KLAdaptive({self.initial}, target={self._target})"


@torch.no_grad()
def follow(
    leads: Mapping[str, KLAdaptive],
    rates: Mapping[str, torch.Tensor],
    kl: torch.Tensor | None,
    is_applied: torch.Tensor,
) -> None:
    """Writes the learning rates for an update.

    Args:
      leads: `KLAdaptive` of each rate.
      rates: 0-d tensor of each rate, under the same name; overwritten.
      kl: 0-d KL of the minibatch; None if there are no rates.
      is_applied: 0-d tensor, 0 where the update is skipped, so that nothing may change.
    """
    for name, lead in leads.items():
        assert kl is not None  # `Updates.means` requires it
        rates[name].copy_(torch.where(is_applied > 0, lead.next(rates[name], kl), rates[name]))


def multiplied(learning_rate: Mapping[str, float], rates: Mapping[str, torch.Tensor], reads: bool) -> dict[str, Any]:
    """Returns the learning rate of each optimizer, multiplied by its KL-adaptive rate if it has one.

    Args:
      learning_rate: learning rate of each optimizer.
      rates: 0-d rates that follow the KL.
      reads: whether the product is a Python number, for which the host waits for a device; if not, it is a 0-d tensor.
    """
    factors = {name: float(rate) if reads else rate for name, rate in rates.items()}
    return {name: rate * factors.get(name, 1.0) for name, rate in learning_rate.items()}
