"""Policies over actions in two parts, Box and Discrete, and the temperatures of their entropies."""

from alfish.networks.hybrid.hybrid_policy import (
    Choice,
    HeldNoise,
    HybridAction,
    HybridHead,
    HybridPolicy,
    HybridSpace,
    SquashedNormalHead,
)
from alfish.networks.hybrid.temperatures import Temperatures

__all__ = [
    "Choice",
    "HeldNoise",
    "HybridAction",
    "HybridHead",
    "HybridPolicy",
    "HybridSpace",
    "SquashedNormalHead",
    "Temperatures",
]
