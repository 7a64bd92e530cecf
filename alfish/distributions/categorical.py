"""One choice of several."""

from typing import NamedTuple

import torch

FORBIDDEN = -1e9  # logit of a forbidden choice, with probability 0; -inf would make p log p nan


class Categorical(NamedTuple):
    """One of A choices; actions are `[...]` int64. Made by `Categorical.of`.

    Choices that a mask forbids have probability 0 and no part in entropy, KL and gradients. Where a mask allows none,
    all are equally probable.
    """

    log_p: torch.Tensor  # [..., A], normalized log-probabilities

    @classmethod
    def of(cls, logits: torch.Tensor, mask: torch.Tensor | None = None) -> "Categorical":
        """Returns the distribution for logits `[..., A]`, over the choices that `mask` allows (`[..., A]` bool)."""
        if mask is not None:
            logits = torch.where(mask, logits, FORBIDDEN)
        return cls(logits.log_softmax(-1))

    def sample(self) -> torch.Tensor:
        # argmax(p / e) with e ~ Exp(1) is i with probability p_i, and takes a third of torch.multinomial's time.
        return (self.log_p.exp() / torch.empty_like(self.log_p).exponential_()).argmax(-1)

    def mode(self) -> torch.Tensor:
        return self.log_p.argmax(-1)

    def log_prob(self, action: torch.Tensor) -> torch.Tensor:
        return self.log_p.gather(-1, action.unsqueeze(-1)).squeeze(-1)

    def entropy(self) -> torch.Tensor:
        return -(self.log_p.exp() * self.log_p).sum(-1)

    def kl(self, other: "Categorical") -> torch.Tensor:
        return (self.log_p.exp() * (self.log_p - other.log_p)).sum(-1)
