"""Distributions over actions, as nests of their own parameters.

Each is a NamedTuple of tensors `[..., A]`. Unrolls, replay and minibatches store it like any other record, so training
has the exact distribution that drew an action. All have `sample`, `mode`, `log_prob(action)`, `entropy` and
`kl(other)`; only `SquashedNormal` lacks the last two, because its entropy has no formula. `log_prob`, `entropy` and
`kl` are sums over the action's entries, and have the shape `[...]`.

Arguments are not validated, because these methods run in every vector step.
"""

import math
from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F

from alfish import nest
from alfish.nest import Nest

LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)
BOUND = 1 - 1e-6  # actions are clamped to this magnitude before a squashed normal's density is computed


class Categorical(NamedTuple):
    """One of A choices; actions are `[...]` int64. Made by `Categorical.of(logits)`."""

    log_p: torch.Tensor  # [..., A], normalized log-probabilities

    @classmethod
    def of(cls, logits: torch.Tensor) -> "Categorical":
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


class MultiCategorical(NamedTuple):
    """Independent categoricals; actions are `[..., K]` int64."""

    parts: tuple[Categorical, ...]  # K of them, log_p [..., A_k]

    def sample(self) -> torch.Tensor:
        return torch.stack([part.sample() for part in self.parts], -1)

    def mode(self) -> torch.Tensor:
        return torch.stack([part.mode() for part in self.parts], -1)

    def log_prob(self, action: torch.Tensor) -> torch.Tensor:
        return sum_of(part.log_prob(a) for part, a in zip(self.parts, action.unbind(-1)))

    def entropy(self) -> torch.Tensor:
        return sum_of(part.entropy() for part in self.parts)

    def kl(self, other: "MultiCategorical") -> torch.Tensor:
        return sum_of(p.kl(q) for p, q in zip(self.parts, other.parts))


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

    def log_prob(self, action: torch.Tensor) -> torch.Tensor:
        """Returns the log-density `[...]` of an action `[..., A]`, clamped to +-(1 - 1e-6).

        It is meant for ratios of two policies, where the error of atanh and the slope of tanh cancel out.
        """
        inside = action.clamp(-BOUND, BOUND)
        right, left = (1 + inside).log(), (1 - inside).log()
        standard = (0.5 * (right - left) - self.mean) * (-self.log_std).exp()  # atanh(a) = (log(1+a) - log(1-a)) / 2
        return -(0.5 * standard.square() + self.log_std + LOG_SQRT_2PI + right + left).sum(-1)


class Joint(NamedTuple):
    """Independent distributions for the leaves of an action nest."""

    parts: Nest  # the action's structure, with a distribution in place of each leaf

    def sample(self) -> Nest:
        return nest.map(lambda part: part.sample(), self.parts, is_leaf=is_distribution)

    def mode(self) -> Nest:
        return nest.map(lambda part: part.mode(), self.parts, is_leaf=is_distribution)

    def log_prob(self, action: Nest) -> torch.Tensor:
        return sum_of(part.log_prob(a) for part, a in zip(self._leaves(), nest.leaves(action)))

    def entropy(self) -> torch.Tensor:
        return sum_of(part.entropy() for part in self._leaves())

    def kl(self, other: "Joint") -> torch.Tensor:
        return sum_of(p.kl(q) for p, q in zip(self._leaves(), other._leaves()))

    def _leaves(self) -> list:
        return nest.leaves(self.parts, is_leaf=is_distribution)


Distribution: TypeAlias = Categorical | MultiCategorical | Bernoulli | DiagonalNormal | Joint


def is_distribution(value: object) -> bool:
    return isinstance(value, (Categorical, MultiCategorical, Bernoulli, DiagonalNormal, SquashedNormal))


def sum_of(terms) -> torch.Tensor:
    """Returns the sum of tensors; unlike `sum`, it does not start from 0."""
    first, *rest = terms
    for term in rest:
        first = first + term
    return first
