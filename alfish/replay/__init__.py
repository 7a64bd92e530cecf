"""Replay: what happened, kept as raw rows, and sampled as windows of consecutive rows of one environment."""

from alfish.replay.hindsight import HindsightReplay
from alfish.replay.ring_buffer import RingBuffer, StoredRows, Window
from alfish.replay.samplers import Epochs, Prioritized, Sampler, Uniform

__all__ = ["Epochs", "HindsightReplay", "Prioritized", "RingBuffer", "Sampler", "StoredRows", "Uniform", "Window"]
