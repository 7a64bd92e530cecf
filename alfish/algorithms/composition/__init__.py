"""Parts that extend an algorithm: rewards, representations, and losses on its features."""

from alfish.algorithms.composition.apprenticeship import ApprenticeshipLearning, SigmoidFeatures
from alfish.algorithms.composition.auxiliary import CPCA, AuxiliaryLoss, FeatureRows, Reconstruction
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
    "CPCA",
    "GAIL",
    "ICM",
    "RND",
    "ApprenticeshipLearning",
    "AuxiliaryLoss",
    "Composed",
    "DynamicsFeatures",
    "FeatureRows",
    "GuidedCost",
    "LogProb",
    "NormalizedObservation",
    "Part",
    "Reconstruction",
    "Representation",
    "RewardPart",
    "SigmoidFeatures",
    "Transitions",
    "transitions_of",
]
