"""Transforms from raw rows to the inputs of networks. Unrolls and replay store raw rows, transformed at each use."""

from alfish.transforms.frozen_encoder import FrozenEncoder
from alfish.transforms.history import FrameStack, PreviousStep
from alfish.transforms.normalizers import ObservationNormalizer, ObservationRescaler, RewardNormalizer, RewardRescaler
from alfish.transforms.random_shift import RandomShift
from alfish.transforms.rewards import RewardClip, RewardScale
from alfish.transforms.transform import Transform, Transforms, TransformsInGraph

__all__ = [
    "FrameStack",
    "FrozenEncoder",
    "ObservationNormalizer",
    "ObservationRescaler",
    "PreviousStep",
    "RandomShift",
    "RewardClip",
    "RewardNormalizer",
    "RewardRescaler",
    "RewardScale",
    "Transform",
    "Transforms",
    "TransformsInGraph",
]
