"""Independent distributions together: for the entries of a MultiDiscrete leaf, and for the leaves of an action."""

from typing import NamedTuple

import torch

from alfish import nest
from alfish.distributions.bernoulli import Bernoulli
from alfish.distributions.categorical import Categorical
from alfish.distributions.normal import DiagonalNormal
from alfish.distributions.squashed_normal import SquashedNormal
from alfish.nest import Nest


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


def is_distribution(value: object) -> bool:
    return isinstance(value, (Categorical, MultiCategorical, Bernoulli, DiagonalNormal, SquashedNormal))


def sum_of(terms) -> torch.Tensor:
    """Returns the sum of tensors; unlike `sum`, it does not start from 0."""
    first, *rest = terms
    for term in rest:
        first = first + term
    return first
