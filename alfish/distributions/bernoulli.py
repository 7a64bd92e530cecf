"""Independent bits."""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from alfish.distributions.categorical import FORBIDDEN


class Bernoulli(NamedTuple):
    """Independent bits; actions are `[..., A]` int8."""

    logits: torch.Tensor  # [..., A]

    @classmethod
    def of(cls, logits: torch.Tensor, mask: torch.Tensor | None = None) -> "Bernoulli":
        """Returns the distribution for logits `[..., A]`.

        A bit with one allowed value has that value and no gradient.

        Args:
          logits: of 1 against 0.
          mask: `[..., A, 2]` bool, whether a bit may be 0, and whether it may be 1; None: both.
        """
        if mask is not None:
            may_be_0, may_be_1 = mask.unbind(-1)
            only = torch.where(may_be_1, -FORBIDDEN, FORBIDDEN)
            logits = torch.where(may_be_0 == may_be_1, logits, only)
        return cls(logits)

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
