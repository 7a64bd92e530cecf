"""Policies over actions in two parts, Box and Discrete, and the temperatures of their entropies."""

from alfish.networks.hybrid.held_noise import HeldNoise
from alfish.networks.hybrid.policy import (
    Choice,
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
