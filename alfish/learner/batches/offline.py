"""Batches of recorded data, without acting."""

from collections.abc import Callable, Iterator
from typing import Annotated, Any, NoReturn

import gin
import numpy as np
import torch

from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.data import Batch, Experience
from alfish.environments import Environment
from alfish.errors import UsageError
from alfish.learner.batches.batches import Minibatches
from alfish.learner.batches.sequence_sampler import SequenceBatches, SequenceSampler
from alfish.offline import OfflineBuffer
from alfish.parameters import NonNegativeInt, PositiveInt, Range, checked
from alfish.processes import replicas
from alfish.replay import HindsightReplay, RingBuffer, Sampler, SequenceIndex, Uniform
from alfish.runs import random_state
from alfish.transforms import Transforms

HOLDOUT_WINDOWS = 4096  # maximum number of windows, spread evenly over the held-out episodes


@gin.configurable(module="alfish")
@checked
class OfflineBatches(SequenceBatches):
    """Offline: trains on windows of recorded data and takes no environment steps. The run's clock counts updates.

    The running statistics of transforms are computed once, from all rows.

    Args:
      buffer: class or factory of the recorded data, `OfflineBuffer`.
      batch_size: number of windows in an update.
      window_length: number of rows of a window: n + 1 for n-step returns; with memory, the number of rows that train
        plus 1.
      burn_in: number of rows before the window from which only the recurrent state is computed, starting with the
        initial state. Must be 0 without memory.
      updates_per_iteration: number of updates in an iteration; their windows are drawn at once.
      sampler: class or factory of the sampler that draws windows: `Uniform`, `Prioritized` or `Epochs`.
      hindsight: class or factory of hindsight relabelling, `HindsightReplay`; None means that windows keep their goals.
    """

    acts = False
    outlasts_acting = True

    def __init__(
        self,
        buffer: Callable[..., OfflineBuffer] = OfflineBuffer,
        batch_size: PositiveInt = 256,
        window_length: Annotated[int, Range(2)] = 2,
        burn_in: NonNegativeInt = 0,
        updates_per_iteration: PositiveInt = 50,
        sampler: Callable[[], Sampler] = Uniform,
        hindsight: Callable[[], HindsightReplay] | None = None,
    ):
        super().__init__(window_length, burn_in)
        self._make_buffer, self._num_updates = buffer, updates_per_iteration
        self._batch_size = replicas.fraction(batch_size, "OfflineBatches.batch_size")
        self._sampler, self._hindsight = sampler, hindsight
        self._windows: SequenceSampler | None = None  # see `start`
        self._held: SequenceSampler | None = None

    def bind(self, algorithm: RLAlgorithm, transforms: Transforms, unroll_length: float, num_envs: int) -> None:
        super().bind(algorithm, transforms, unroll_length, num_envs)
        if parts := algorithm.parts_with_statistics:
            raise UsageError(
                f"{', '.join(parts)} of {type(algorithm).__name__} has statistics of collected rows, but "
                "OfflineBatches collects no rows; leave the part out, and normalize observations with "
                "Trainer.transforms = [@ObservationNormalizer]"
            )
        self.updates_per_iteration = self._num_updates
        self.rows_per_update = self._batch_size * (self.window_length - 1)

    def start(self, environment: Environment) -> None:
        if self._windows is not None:
            return
        buffer, self._windows = self.recorded(self._make_buffer, self._sampler, self._hindsight, environment)
        if (held := buffer.holdout) is not None:
            arguments = held, Uniform, None, self.algorithm, self.transforms, self.num_rows, self.burn_in
            self._held = SequenceSampler(*arguments)
            self._held_starts = _spread(held, self.num_rows)

    def rest(self) -> int:
        return self._num_updates

    def add(self, experience: Experience) -> NoReturn:
        raise TypeError("OfflineBatches trains on recorded data and accepts no rows")

    def chunks(self, steps: int, for_graph: bool = False) -> Iterator[Minibatches]:
        assert self._windows is not None
        yield self._chunk([(self._windows, self._batch_size)], self._num_updates, for_graph)

    def holdout(self) -> Batch | None:
        if self._held is None:
            return None
        with random_state.preserved():
            random_state.seed_torch(0)  # a transform that augments draws the same numbers in each call
            return self._seen(self._held.at(self._held_starts))

    def state_dict(self) -> dict[str, Any]:
        return {} if self._windows is None else self._windows.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._windows is not None:
            self._windows.load_state_dict(state)


def _spread(buffer: RingBuffer, num_rows: int) -> SequenceIndex:
    """Returns windows that are evenly spaced over all episodes, at most `HOLDOUT_WINDOWS`."""
    low, count = buffer.start_range(num_rows)
    column = np.repeat(np.arange(len(low)), count)
    position = np.concatenate([np.arange(first, first + number) for first, number in zip(low, count)])
    allowed = np.flatnonzero(buffer.may_start(column, position))
    chosen = allowed[np.linspace(0, len(allowed) - 1, min(len(allowed), HOLDOUT_WINDOWS)).astype(np.int64)]
    return SequenceIndex(*(torch.from_numpy(where[chosen]) for where in (column, position)))
