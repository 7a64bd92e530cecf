"""Where windows of a ring start, and its rows for whoever gathers windows by itself."""

from typing import NamedTuple

import torch

from alfish import nest
from alfish.data import Batch, trainable
from alfish.replay.row_store import Row


class SequenceIndex(NamedTuple):
    """Where windows start."""

    column: torch.Tensor  # [N] int64
    position: torch.Tensor  # [N] int64
    weight: torch.Tensor | None = None  # [N] float32, importance weight; None: all 1


class RingView(NamedTuple):
    """A ring's rows where they lie, for a graph that gathers windows by itself. They change as the ring does."""

    rows: Row  # leaves [length * B, ...], row (position % length) * B + column
    env_id: torch.Tensor  # [B]
    offset: torch.Tensor  # [L, 1] int64, of a window's rows from its first: 0 to L - 1

    def windows(self, start: SequenceIndex) -> Batch:
        """As `RingBuffer.windows`."""
        num_envs = len(self.env_id)
        length = len(self.rows.step_type) // num_envs
        index = (start.position + self.offset) % length * num_envs + start.column
        env_id = self.env_id[start.column]
        experience = nest.at(self.rows, index).experience(env_id.expand_as(index))
        mask = trainable(experience.time_step.step_type)
        return Batch(experience, mask, env_id, start.position, start.weight)
