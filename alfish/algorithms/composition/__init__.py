"""Parts that extend an algorithm: rewards computed from rows, and representations learned from rows."""

from alfish.algorithms.composition.apprenticeship import ApprenticeshipLearning, SigmoidFeatures
from alfish.algorithms.composition.composed import Composed
from alfish.algorithms.composition.dynamics import ICM, DynamicsFeatures
from alfish.algorithms.composition.gail import GAIL
from alfish.algorithms.composition.guided_cost import GuidedCost
from alfish.algorithms.composition.part import (
    LogProb,
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
    "ApprenticeshipLearning",
    "Composed",
    "DynamicsFeatures",
    "GuidedCost",
    "LogProb",
    "NormalizedObservation",
    "Part",
    "Representation",
    "RewardPart",
    "SigmoidFeatures",
    "Transitions",
    "transitions_of",
]
