"""Normal distributions."""

import math
from typing import NamedTuple

import torch

LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)


class DiagonalNormal(NamedTuple):
    """Independent normals; actions are `[..., A]` float32, unclipped."""

    mean: torch.Tensor  # [..., A]
    log_std: torch.Tensor  # [..., A]

    def sample(self) -> torch.Tensor:
        return self.mean + self.log_std.exp() * torch.randn_like(self.mean)

    def mode(self) -> torch.Tensor:
        return self.mean

    def log_prob(self, action: torch.Tensor) -> torch.Tensor:
        standard = (action - self.mean) * (-self.log_std).exp()
        return -(0.5 * standard.square() + self.log_std + LOG_SQRT_2PI).sum(-1)

    def entropy(self) -> torch.Tensor:
        return (self.log_std + (0.5 + LOG_SQRT_2PI)).sum(-1)

    def kl(self, other: "DiagonalNormal") -> torch.Tensor:
        precision = (-2 * other.log_std).exp()
        spread = (2 * self.log_std).exp() + (self.mean - other.mean).square()
        return (other.log_std - self.log_std + 0.5 * spread * precision - 0.5).sum(-1)
