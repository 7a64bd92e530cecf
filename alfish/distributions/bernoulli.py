"""Independent bits."""

from typing import NamedTuple

import torch
import torch.nn.functional as F


class Bernoulli(NamedTuple):
    """Independent bits; actions are `[..., A]` int8."""

    logits: torch.Tensor  # [..., A]

    def sample(self) -> torch.Tensor:
        return torch.bernoulli(self.logits.sigmoid()).to(torch.int8)

    def mode(self) -> torch.Tensor:
        return (self.logits > 0).to(torch.int8)

    def log_prob(self, action: torch.Tensor) -> torch.Tensor:
        return -F.binary_cross_entropy_with_logits(self.logits, action.to(self.logits.dtype), reduction="none").sum(-1)

    def entropy(self) -> torch.Tensor:
        p = self.logits.sigmoid()
        return F.binary_cross_entropy_with_logits(self.logits, p, reduction="none").sum(-1)

    def kl(self, other: "Bernoulli") -> torch.Tensor:
        p = self.logits.sigmoid()
        cross = F.binary_cross_entropy_with_logits(other.logits, p, reduction="none").sum(-1)
        return cross - self.entropy()
