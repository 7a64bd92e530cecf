"""Replay: what happened, kept as raw rows, and sampled as windows of consecutive rows of one environment."""

from alfish.replay.hindsight import HindsightReplay
from alfish.replay.ring_buffer import RingBuffer

__all__ = ["HindsightReplay", "RingBuffer"]
