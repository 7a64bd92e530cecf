"""Parts beside an algorithm: rewards that are computed from rows, and representations that are learned from rows."""

from alfish.algorithms.composition.composed import Composed
from alfish.algorithms.composition.dynamics import ICM, DynamicsFeatures
from alfish.algorithms.composition.gail import GAIL
from alfish.algorithms.composition.part import (
    NormalizedObservation,
    Part,
    Representation,
    RewardPart,
    Transitions,
    transitions_of,
)
from alfish.algorithms.composition.rnd import RND

__all__ = [
    "GAIL",
    "ICM",
    "RND",
    "Composed",
    "DynamicsFeatures",
    "NormalizedObservation",
    "Part",
    "Representation",
    "RewardPart",
    "Transitions",
    "transitions_of",
]
