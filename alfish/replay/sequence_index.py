"""Where windows of a ring start, and its rows for whoever gathers windows by itself."""

from typing import NamedTuple

import torch

from alfish import nest
from alfish.data import Batch, Experience, TimeStep, trainable
from alfish.nest import Nest


class SequenceIndex(NamedTuple):
    """Where windows start."""

    column: torch.Tensor  # [N] int64
    position: torch.Tensor  # [N] int64
    weight: torch.Tensor | None = None  # [N] float32, importance weight; None: all 1


class RingView(NamedTuple):
    """A ring's rows where they lie, for a graph that gathers windows by itself. They change as the ring does."""

    rows: Nest  # what `_kept` keeps; leaves [length * B, ...], row (pos % length) * B + column
    env_id: torch.Tensor  # [B]
    offset: torch.Tensor  # [L, 1] int64, of a window's rows from its first: 0 to L - 1

    def windows(self, start: SequenceIndex) -> Batch:
        """As `RingBuffer.windows`."""
        num_envs = len(self.env_id)
        length = len(nest.leaves(self.rows)[0]) // num_envs
        index = (start.position + self.offset) % length * num_envs + start.column
        step_type, reward, discount, observation, prev_action, action, info = nest.at(self.rows, index)
        env_id = self.env_id[start.column]
        time_step = TimeStep(step_type, reward, discount, observation, prev_action, env_id.expand_as(index))
        mask = trainable(step_type)
        return Batch(Experience(time_step, action, info, None), mask, env_id, start.position, start.weight)
