"""Indices of windows in a ring, and a view of its rows from which they are gathered."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from alfish import nest
from alfish.data import Batch, TimeStep, trainable
from alfish.replay.row_store import Row


class SequenceIndex(NamedTuple):
    """First rows of N windows."""

    column: torch.Tensor  # [N] int64
    position: torch.Tensor  # [N] int64
    weight: torch.Tensor | None = None  # [N] float32, importance weights; None: all are 1


class RingView(NamedTuple):
    """View of a ring's stored rows, for a graph that gathers windows by itself. The rows change with the ring."""

    rows: Row  # leaves [length * B, ...], row (position % length) * B + column
    env_id: torch.Tensor  # [B]
    offset: torch.Tensor  # [L, 1] int64, 0 to L - 1: a window's rows relative to its first
    transforms: Callable[[TimeStep], TimeStep] | None = None  # of windows `[L, N]`, as a nest; None: rows stay raw

    def windows(self, start: SequenceIndex) -> Batch:
        """Returns the windows that begin at `start`, as `RingBuffer.windows` does, transformed."""
        num_envs = len(self.env_id)
        length = len(self.rows.step_type) // num_envs
        index = (start.position + self.offset) % length * num_envs + start.column
        env_id = self.env_id[start.column]
        experience = nest.at(self.rows, index).experience(env_id.expand_as(index))
        if self.transforms is not None:
            experience = experience._replace(time_step=self.transforms(experience.time_step))
        mask = trainable(experience.time_step.step_type)
        return Batch(experience, mask, env_id, start.position, start.weight)
