"""Learning rates that follow the KL divergence between the policy of the rollout and the policy in training.

A rate is a 0-d tensor on the algorithm's device. So the host does not wait for a GPU to read the rate, and compiled
updates and CUDA graphs can change the rate.
"""

import math
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

    KL is the mean of KL(rollout policy, policy) over the trainable rows of a minibatch, of all learners. It is computed
    from the stored distributions before the update, and this update uses the new rate. A skipped update does not change
    the rate. The algorithm must return `LossInfo.kl`, as PPO and APPO do.

    Args:
      initial: learning rate at the start.
      target: KL divergence to keep, in nats; the rate changes outside of [target / 2, 2 target].
      factor: factor by which one update multiplies or divides the rate, above 1.
      lowest: smallest learning rate.
      highest: largest learning rate.

    Source: `schedule = 'adaptive'` of rsl_rl, which does not change the rate if the KL is exactly 0. Here the rate then
    rises, as in Sample Factory.
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
            raise UsageError(
                f"KLAdaptive.factor is {factor}; it divides a rate that is too high, so it must be above 1"
            )
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
        """Returns the rate for an update, 0-d.

        Args:
          rate: rate of the last update, 0-d.
          kl: KL of the minibatch, 0-d; nan does not change the rate.
        """
        lower = (rate / self._factor).clamp(min=self._lowest)
        higher = (rate * self._factor).clamp(max=self._highest)
        return torch.where(kl > 2 * self._target, lower, torch.where(kl < self._target / 2, higher, rate))

    def bounded(self, rate: torch.Tensor) -> torch.Tensor:
        """Returns a saved rate, limited to [lowest, highest], because the run may continue with other bounds.

        Raises:
          ValueError: the rate is not a positive number.
        """
        if rate.ndim or not 0 < float(rate) < math.inf:
            raise ValueError(f"the learning rate is {rate}")
        return rate.clamp(self._lowest, self._highest)

    def __repr__(self) -> str:
        return f"KLAdaptive({self.initial}, target={self._target})"


@torch.no_grad()
def follow(
    leads: Mapping[str, KLAdaptive],
    rates: Mapping[str, torch.Tensor],
    kl: torch.Tensor | None,
    is_applied: torch.Tensor,
) -> None:
    """Changes the KL-adaptive learning rates before an update, in place.

    Args:
      leads: `KLAdaptive` of each rate, by the name of the rate's optimizer.
      rates: 0-d tensor of each rate, by the same names; changed in place.
      kl: 0-d KL of the minibatch; None if `leads` is empty.
      is_applied: 0-d tensor; 0 means that the update is skipped and that the rates do not change.
    """
    for name, lead in leads.items():
        assert kl is not None  # `Updates.means` requires the KL
        rates[name].copy_(torch.where(is_applied > 0, lead.next(rates[name], kl), rates[name]))


def multiplied(learning_rate: Mapping[str, float], rates: Mapping[str, torch.Tensor], reads: bool) -> dict[str, Any]:
    """Returns the learning rate of each optimizer, multiplied by its KL-adaptive rate if it has one.

    Args:
      learning_rate: learning rate of each optimizer.
      rates: KL-adaptive rates, 0-d, by the name of their optimizer.
      reads: whether to return KL-adaptive rates as Python numbers, which waits for the device; otherwise they are 0-d
        tensors.
    """
    factors = {name: float(rate) if reads else rate for name, rate in rates.items()}
    return {name: rate * factors.get(name, 1.0) for name, rate in learning_rate.items()}
