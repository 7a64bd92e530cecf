"""Distributions over actions, as nests of their parameters.

Each distribution is a NamedTuple of tensors `[..., A]`. Unrolls, replay and minibatches store distributions like other
records, so training can use the exact distribution that drew an action. All have `sample`, `mode`, `log_prob(action)`,
`entropy` and `kl(other)`, except that `SquashedNormal` has no `entropy`, because there is no closed form. `log_prob`,
`entropy` and `kl` are sums over the action's entries, and have the shape `[...]`.

Arguments are not validated, because these methods run in every vector step.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F

from alfish import nest
from alfish.nest import Nest

FORBIDDEN = -1e9  # logit of a forbidden choice, for probability 0; with -inf, p log p would be nan


class Categorical(NamedTuple):
    """A distribution over A choices, made by `Categorical.of`; actions are `[...]` int64.

    Forbidden choices have probability 0, and do not contribute to entropy, KL and gradients. Where a mask allows no
    choice, all choices are equally probable.
    """

    log_p: torch.Tensor  # [..., A], normalized log-probabilities

    @classmethod
    def of(cls, logits: torch.Tensor, mask: torch.Tensor | None = None) -> "Categorical":
        """Returns the distribution for logits `[..., A]`, over the choices that `mask` allows (`[..., A]` bool)."""
        if mask is not None:
            logits = torch.where(mask, logits, FORBIDDEN)
        return cls(logits.log_softmax(-1))

    def sample(self) -> torch.Tensor:
        # argmax(p / e) with e ~ Exp(1) is i with probability p_i, in a third of torch.multinomial's time.
        return (self.log_p.exp() / torch.empty_like(self.log_p).exponential_()).argmax(-1)

    def mode(self) -> torch.Tensor:
        return self.log_p.argmax(-1)

    def log_prob(self, action: torch.Tensor) -> torch.Tensor:
        return self.log_p.gather(-1, action.unsqueeze(-1)).squeeze(-1)

    def entropy(self) -> torch.Tensor:
        return -(self.log_p.exp() * self.log_p).sum(-1)

    def kl(self, other: "Categorical") -> torch.Tensor:
        return (self.log_p.exp() * (self.log_p - other.log_p)).sum(-1)


LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)


class DiagonalNormal(NamedTuple):
    """Independent normal distributions; actions are `[..., A]` float32, unclipped."""

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


BOUND = 1 - 1e-6  # largest magnitude of action entries in densities; larger entries are clamped


class SquashedNormal(NamedTuple):
    """The tanh of independent normal variables; actions are `[..., A]` float32 in (-1, 1).

    `log_prob` of an action uses atanh, which is inexact where tanh is flat. `sample_with_log_prob` returns the exact
    density of a sample.
    """

    mean: torch.Tensor  # [..., A], before tanh
    log_std: torch.Tensor  # [..., A], before tanh

    def sample(self) -> torch.Tensor:
        return torch.tanh(self.mean + self.log_std.exp() * torch.randn_like(self.mean))

    def mode(self) -> torch.Tensor:
        """Returns tanh of the normal's mean: the median of the squashed distribution."""
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
        """Returns KL(self, other), `[...]`, which equals the KL of the normals, because tanh is invertible."""
        return DiagonalNormal(*self).kl(DiagonalNormal(*other))

    def log_prob(self, action: torch.Tensor) -> torch.Tensor:
        """Returns the log-density `[...]` of an action `[..., A]`; entries are clamped to +-(1 - 1e-6).

        Use the result in ratios of two policies, in which the error of atanh and the slope of tanh cancel out.
        """
        inside = action.clamp(-BOUND, BOUND)
        right, left = (1 + inside).log(), (1 - inside).log()
        standard = (0.5 * (right - left) - self.mean) * (-self.log_std).exp()  # atanh(a) = (log(1+a) - log(1-a)) / 2
        return -(0.5 * standard.square() + self.log_std + LOG_SQRT_2PI + right + left).sum(-1)


class Bernoulli(NamedTuple):
    """Independent bits; actions are `[..., A]` int8."""

    logits: torch.Tensor  # [..., A]

    @classmethod
    def of(cls, logits: torch.Tensor, mask: torch.Tensor | None = None) -> "Bernoulli":
        """Returns the distribution for logits `[..., A]`.

        A bit with only one allowed value has this value, and no gradient.

        Args:
          logits: log-odds of 1 against 0.
          mask: allowed values of each bit, `[..., A, 2]` bool: whether the bit may be 0, and whether it may be 1. None
            allows both.
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


class MultiCategorical(NamedTuple):
    """Independent categoricals; actions are `[..., K]` int64."""

    parts: tuple[Categorical, ...]  # K categoricals, with log_p [..., A_k]

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


class Joint(NamedTuple):
    """Independent distributions for the leaves of an action nest."""

    parts: Nest  # nest with the action's structure, and a distribution for each leaf

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
    """Returns whether a value is the distribution of one leaf of an action."""
    return hasattr(type(value), "log_prob") and not isinstance(value, Joint)


def sum_of(terms) -> torch.Tensor:
    """Returns the sum of tensors; unlike Python's `sum`, does not start by adding 0."""
    first, *rest = terms
    for term in rest:
        first = first + term
    return first


def random_subset(each: Sequence[torch.Tensor], size: int | None) -> Sequence[torch.Tensor]:
    """Returns the same `size` random entries of each tensor's first dimension; all entries if `size` is None.

    Args:
      each: tensors on one device with equal first dimensions.
      size: number of entries, at most the first dimension; None means all.
    """
    if size is None:
        return each
    count, device = len(each[0]), each[0].device
    if device.type == "cpu":
        members = torch.randperm(count)[:size]
    else:  # `randperm` draws few numbers on the CPU even for a GPU, so a CUDA graph cannot record it
        members = torch.rand(count, device=device).topk(size).indices
    return [tensor[members] for tensor in each]


def uniform_kl(policy: Any) -> torch.Tensor:
    """Returns the symmetric KL divergence of a policy p from the uniform distribution u, `[...]` in nats.

        0.5 (KL(p, u) + KL(u, p)) = 0.5 sum_a (p_a - u_a) log p_a

    The gradient grows as the policy becomes certain. Forbidden choices have probability 0 in u. For independent parts
    of an action, the result is the sum over the parts.

    Args:
      policy: distribution of the policy: Categorical, Bernoulli, MultiCategorical, or Joint of these.

    Source: Petrenko et al., 2020 (Sample Factory's exploration loss 'symmetric_kl').
    """
    if isinstance(policy, Categorical):
        allowed = policy.log_p > FORBIDDEN / 2
        uniform = allowed / allowed.sum(-1, keepdim=True)
        return 0.5 * ((policy.log_p.exp() - uniform) * policy.log_p).sum(-1)
    if isinstance(policy, Bernoulli):
        is_free = policy.logits.abs() < -FORBIDDEN / 2
        return torch.where(is_free, 0.5 * (policy.logits.sigmoid() - 0.5) * policy.logits, 0.0).sum(-1)
    if isinstance(policy, (MultiCategorical, Joint)):
        return sum_of(uniform_kl(part) for part in nest.leaves(policy.parts, is_leaf=is_distribution))
    raise TypeError(f"there is no uniform distribution to compare with a {type(policy).__name__}")
