"""Parts beside an algorithm: rewards that are computed from rows, and representations that are learned from them."""

from alfish.composition.composed import Composed
from alfish.composition.dynamics import ICM, DynamicsFeatures
from alfish.composition.gail import GAIL
from alfish.composition.normalized import NormalizedObservation
from alfish.composition.parts import Part, Representation, RewardPart, Transitions, transitions_of
from alfish.composition.rnd import RND

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
