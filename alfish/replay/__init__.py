"""Replay: stores raw rows, and samples windows of consecutive rows of one environment."""

from typing import TypeAlias

from alfish.replay.aligned_ring import AlignedRingBuffer, AlignedView
from alfish.replay.hindsight import HindsightReplay
from alfish.replay.prioritized import Prioritized
from alfish.replay.ring_buffer import RingBuffer
from alfish.replay.samplers import Epochs, Sampler, Uniform
from alfish.replay.start_index import RingView, SequenceIndex

ReplayView: TypeAlias = RingView | AlignedView

__all__ = [
    "AlignedRingBuffer",
    "AlignedView",
    "Epochs",
    "HindsightReplay",
    "Prioritized",
    "ReplayView",
    "RingBuffer",
    "Sampler",
    "RingView",
    "Uniform",
    "SequenceIndex",
]
