"""Beta distributions over bounded actions; see `alfish.functional.distributions`."""

import math
from typing import NamedTuple

import torch
from torch import distributions

from alfish.functional.distributions import BOUND


class Beta(NamedTuple):
    """Independent beta distributions on [-1, 1]; actions are `[..., A]` float32.

    An action is a = 2 x - 1 with x ~ Beta(alpha, beta). If alpha and beta exceed 1, the density has one maximum, and is
    0 at the bounds.

    Source: Chou, Maturana and Scherer, 2017, http://proceedings.mlr.press/v70/chou17a.html.
    """

    alpha: torch.Tensor  # [..., A], above 1
    beta: torch.Tensor  # [..., A], above 1

    @property
    def mean(self) -> torch.Tensor:
        return (self.alpha - self.beta) / (self.alpha + self.beta)

    def sample(self) -> torch.Tensor:
        return 2 * distributions.Beta(*self, validate_args=False).sample() - 1

    def mode(self) -> torch.Tensor:
        return (self.alpha - self.beta) / (self.alpha + self.beta - 2)

    def log_prob(self, action: torch.Tensor) -> torch.Tensor:
        """Returns the log-density `[...]` of an action `[..., A]`; entries are clamped to +-(1 - 1e-6)."""
        x = 0.5 * (1 + action.clamp(-BOUND, BOUND))
        log_density = (self.alpha - 1) * x.log() + (self.beta - 1) * (1 - x).log() - self._log_norm()
        return log_density.sum(-1)

    def entropy(self) -> torch.Tensor:
        a, b = self.alpha, self.beta
        mean_logs = (a - 1) * (a.digamma() - (a + b).digamma()) + (b - 1) * (b.digamma() - (a + b).digamma())
        return (self._log_norm() - mean_logs).sum(-1)

    def kl(self, other: "Beta") -> torch.Tensor:
        a, b = self.alpha, self.beta
        log_x, log_rest = a.digamma() - (a + b).digamma(), b.digamma() - (a + b).digamma()
        differences = (a - other.alpha) * log_x + (b - other.beta) * log_rest
        return (other._log_norm() - self._log_norm() + differences).sum(-1)

    def _log_norm(self) -> torch.Tensor:
        """Returns log(2 B(alpha, beta)), the log of the integral of x^(alpha - 1) (1 - x)^(beta - 1) over actions."""
        return self.alpha.lgamma() + self.beta.lgamma() - (self.alpha + self.beta).lgamma() + math.log(2)
