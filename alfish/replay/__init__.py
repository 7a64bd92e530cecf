"""Replay: stores raw rows, and samples windows of consecutive rows of one environment."""

from alfish.replay.hindsight import HindsightReplay
from alfish.replay.prioritized import Prioritized
from alfish.replay.ring_buffer import RingBuffer
from alfish.replay.samplers import Epochs, Sampler, Uniform
from alfish.replay.start_index import RingView, SequenceIndex

__all__ = ["Epochs", "HindsightReplay", "Prioritized", "RingBuffer", "Sampler", "RingView", "Uniform", "SequenceIndex"]
