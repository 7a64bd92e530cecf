"""Normal distributions squashed into (-1, 1), for bounded actions."""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F

from alfish.distributions.normal import LOG_SQRT_2PI, DiagonalNormal

BOUND = 1 - 1e-6  # actions are clamped to this magnitude before the density is computed


class SquashedNormal(NamedTuple):
    """tanh of independent normals; actions are `[..., A]` float32 in (-1, 1).

    `log_prob` of an action needs atanh, which is inexact where tanh is flat. `sample_with_log_prob` gives the exact
    density of a sample.
    """

    mean: torch.Tensor  # [..., A], before tanh
    log_std: torch.Tensor  # [..., A], before tanh

    def sample(self) -> torch.Tensor:
        return torch.tanh(self.mean + self.log_std.exp() * torch.randn_like(self.mean))

    def mode(self) -> torch.Tensor:
        """Returns tanh of the normal's mean, which is the median."""
        return torch.tanh(self.mean)

    def sample_with_log_prob(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns a sample `[..., A]`, differentiable in the parameters, and its log-density `[...]`.

            log p(a) = sum_i log N(u_i) - log(1 - tanh(u_i)^2),   log(1 - tanh(u)^2) = 2 (log 2 - u - softplus(-2u))

        Source: Haarnoja et al., 2018, appendix C.
        """
        noise = torch.randn_like(self.mean)
        before = self.mean + self.log_std.exp() * noise
        log_slope = 2 * (math.log(2) - before - F.softplus(-2 * before))
        log_prob = -(0.5 * noise.square() + self.log_std + LOG_SQRT_2PI + log_slope).sum(-1)
        return torch.tanh(before), log_prob

    def kl(self, other: "SquashedNormal") -> torch.Tensor:
        """Returns KL(self, other), `[...]`: that of the normals before tanh, because tanh is invertible."""
        return DiagonalNormal(*self).kl(DiagonalNormal(*other))

    def log_prob(self, action: torch.Tensor) -> torch.Tensor:
        """Returns the log-density `[...]` of an action `[..., A]`, clamped to +-(1 - 1e-6).

        It is meant for ratios of two policies, where the error of atanh and the slope of tanh cancel out.
        """
        inside = action.clamp(-BOUND, BOUND)
        right, left = (1 + inside).log(), (1 - inside).log()
        standard = (0.5 * (right - left) - self.mean) * (-self.log_std).exp()  # atanh(a) = (log(1+a) - log(1-a)) / 2
        return -(0.5 * standard.square() + self.log_std + LOG_SQRT_2PI + right + left).sum(-1)
