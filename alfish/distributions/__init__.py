"""Distributions over actions, as nests of their own parameters.

Each is a NamedTuple of tensors `[..., A]`. Unrolls, replay and minibatches store it like any other record, so training
has the exact distribution that drew an action. All have `sample`, `mode`, `log_prob(action)`, `entropy` and
`kl(other)`; only `SquashedNormal` lacks `entropy`, for which there is no formula. `log_prob`, `entropy` and
`kl` are sums over the action's entries, and have the shape `[...]`.

Arguments are not validated, because these methods run in every vector step.
"""

from typing import TypeAlias

from alfish.distributions.bernoulli import Bernoulli
from alfish.distributions.categorical import Categorical
from alfish.distributions.joint import Joint, MultiCategorical, is_distribution, sum_of
from alfish.distributions.normal import DiagonalNormal
from alfish.distributions.squashed_normal import SquashedNormal
from alfish.distributions.subset import random_subset
from alfish.distributions.uniform_kl import uniform_kl

Distribution: TypeAlias = Categorical | MultiCategorical | Bernoulli | DiagonalNormal | Joint

__all__ = [
    "Bernoulli",
    "Categorical",
    "DiagonalNormal",
    "Distribution",
    "Joint",
    "MultiCategorical",
    "SquashedNormal",
    "is_distribution",
    "random_subset",
    "sum_of",
    "uniform_kl",
]
