"""Where the learner's batches come from: the mode of training, as an object that a gin file injects.

A source yields chunks: rows laid out once, and the indices of several minibatches within them. So a learner may gather
and train a whole chunk in one call.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import gin
import torch

from alfish import nest
from alfish.data import Batch, Experience, trainable
from alfish.errors import UsageError
from alfish.nest import Nest

Prepare = Callable[[Experience], Experience]  # transforms and preprocess_experience, under no_grad


class Chunk(NamedTuple):
    batch: Batch  # [T', M] rows
    index: torch.Tensor  # type: ignore[assignment]  # [K, N] int64: K minibatches, each N of the M columns


class Batches(Protocol):
    """What the trainer needs of a source of batches."""

    def check(self, unroll_length: int, num_envs: int, has_state: bool) -> None:
        """Raises UsageError where the settings do not fit one another."""
        ...

    def chunks(self, experience: Experience, prepare: Prepare, has_state: bool, again: bool) -> Iterator[Chunk]:
        """The batches to train on after an unroll.

        Args:
          experience: `[T+1, B]` raw rows, on the learner's device.
          prepare: to be called on whole sequences.
          has_state: minibatches must be sequences, each with its state at row 0.
          again: prepare anew at the start of every later epoch.
        """
        ...


@gin.configurable(module="alfish")
class EpochBatches:
    """On-policy: trains on the unroll itself, several times over, in minibatches drawn without replacement.

    Args:
      num_epochs: passes over the unroll.
      minibatch_size: rows a gradient step; it divides the unroll's rows (unroll length x environments). With memory,
        whole sequences are drawn, and it is also a multiple of the unroll length. None: all rows.
    """

    def __init__(self, num_epochs: int = 10, minibatch_size: int | None = None):
        if num_epochs < 1:
            raise UsageError(f"EpochBatches.num_epochs is {num_epochs}; it must be at least 1")
        self._num_epochs, self._minibatch_size = num_epochs, minibatch_size

    def check(self, unroll_length: int, num_envs: int, has_state: bool) -> None:
        rows, size = unroll_length * num_envs, self._minibatch_size
        if size is None:
            return
        if size < 1 or rows % size:
            fitting = [divisor for divisor in range(1, rows + 1) if rows % divisor == 0]
            nearest = sorted(sorted(fitting, key=lambda divisor: abs(divisor - size))[:2])
            raise UsageError(
                f"EpochBatches.minibatch_size is {size}, which does not divide the {rows} rows of an unroll "
                f"({unroll_length} steps x {num_envs} environments); the nearest that do are "
                f"{' and '.join(str(n) for n in nearest)}"
            )
        if has_state and size % unroll_length:
            raise UsageError(
                f"EpochBatches.minibatch_size is {size}; a policy with memory trains on whole sequences, so it must be "
                f"a multiple of the unroll length {unroll_length}"
            )

    def chunks(self, experience: Experience, prepare: Prepare, has_state: bool, again: bool) -> Iterator[Chunk]:
        for epoch in range(self._num_epochs):
            if epoch == 0 or again:
                batch = self._batch(prepare(experience), has_state)
            length, columns = batch.mask.shape
            size = columns if self._minibatch_size is None else self._minibatch_size // length
            # Drawn on the CPU, so that a seed means the same minibatches on every device.
            index = torch.randperm(columns).to(batch.mask.device)
            yield Chunk(batch, index.view(-1, size))

    def _batch(self, experience: Experience, has_state: bool) -> Batch:
        """The T rows that may train: as `[T, B]` sequences where there is memory, else as one row of T x B."""
        mask = trainable(experience.time_step.step_type)

        def first_rows(rows: Nest) -> Nest:
            kept = nest.map(lambda leaf: leaf[: len(mask)], rows)
            return kept if has_state else nest.merge_leading(kept)

        time_step, action, info, mask = (
            first_rows(rows) for rows in (experience.time_step, experience.action, experience.info, mask)
        )
        return Batch(Experience(time_step, action, info, experience.state if has_state else None, None), mask)


def take(batch: Batch, columns: torch.Tensor) -> Batch:
    """The minibatch of these columns (`[N]` int64)."""
    experience = batch.experience
    rows = experience._replace(state=None, policy_version=None), batch.mask
    rows, mask = nest.map(lambda leaf: leaf.index_select(1, columns), rows)
    one_each = experience.state, experience.policy_version, batch.env_id, batch.position, batch.weight
    state, version, env_id, position, weight = nest.map(lambda leaf: leaf.index_select(0, columns), one_each)
    return Batch(rows._replace(state=state, policy_version=version), mask, env_id, position, weight)
