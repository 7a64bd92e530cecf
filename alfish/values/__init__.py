"""Kinds of values: what a critic predicts for an action, and how it is learned.

A value is one number (`Scalar`), one for each entry of a vector reward (`Vector`), or a distribution of the return:
probabilities of fixed returns (`Bins`), or returns of fixed (`Quantiles`) or of random probabilities
(`ImplicitQuantiles`). All have one interface, that of `Scalar`, so algorithms do not ask which kind they have.
`values_of` returns the kind that fits a reward.
"""

from alfish.values.bins import Bins
from alfish.values.distribution import Distribution
from alfish.values.making import Discount, RewardWeights, values_of
from alfish.values.quantiles import ImplicitQuantiles, Quantiles
from alfish.values.scalar import Scalar, ValueLoss
from alfish.values.vector import Vector

__all__ = [
    "Bins",
    "Discount",
    "Distribution",
    "ImplicitQuantiles",
    "Quantiles",
    "RewardWeights",
    "Scalar",
    "ValueLoss",
    "Vector",
    "values_of",
]
