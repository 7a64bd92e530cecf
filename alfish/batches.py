"""Where the learner's batches come from: the mode of training, as an object that a gin file injects.

A source yields chunks: rows laid out once, and the indices of several minibatches within them. So a learner may gather
and train a whole chunk in one call.
"""

import abc
import math
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

import gin
import torch

from alfish import nest
from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.data import Batch, Experience, trainable
from alfish.errors import UsageError
from alfish.nest import Nest
from alfish.replay import RingBuffer
from alfish.transforms import Transforms


class Chunk(NamedTuple):
    batch: Batch  # [T', M] rows
    # [K, N] int64: K minibatches, each N of the M columns; None: all columns are one
    index: torch.Tensor | None  # type: ignore[assignment]
    is_steady: bool = True  # whether the source's other chunks have as many rows, so that a graph may gather by itself


class Batches(abc.ABC):
    """A source of batches. The trainer calls `bind` once, then `add` and `chunks` in every iteration.

    Attributes:
      updates_per_iteration: about how many minibatches it yields for an unroll; known after `bind`.
      rows_per_update: that one of them trains; known after `bind`.
    """

    on_policy: ClassVar[bool]
    updates_per_iteration = 1.0
    rows_per_update = 1

    def bind(self, algorithm: RLAlgorithm, transforms: Transforms, unroll_length: float, num_envs: int) -> None:
        """Takes what it works with; raises UsageError where the settings do not fit one another."""
        self._algorithm, self._transforms = algorithm, transforms

    def acts_at_random(self, env_steps: int) -> bool:
        """Whether the next unroll should act uniformly at random."""
        return False

    @abc.abstractmethod
    def add(self, experience: Experience) -> None:
        """Takes in an unroll of raw rows."""

    @abc.abstractmethod
    def chunks(self, env_steps: int) -> Iterator[Chunk]:
        """The batches to train on now, `env_steps` into the run."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def stored(self) -> dict[str, Any] | None:
        """What is too large for every checkpoint, to be saved beside the newest; None: nothing."""
        return None

    def load_stored(self, stored: dict[str, Any]) -> None:
        """Continues from `stored`."""

    def _prepare(self, experience: Experience, burn_in: int = 0) -> Experience:
        """What the networks see of raw rows, preprocessed by the algorithm on whole sequences.

        Args:
          experience: `[T, N]`.
          burn_in: how many rows at the start become `Experience.burn_in`.
        """
        with torch.no_grad():
            seen = self._transforms.transform(experience.time_step, experience.transform_state)
            experience = experience._replace(time_step=seen)
            if burn_in:
                warming, seen = nest.split(seen, burn_in)
                action, info = nest.at((experience.action, experience.info), slice(burn_in, None))
                experience = experience._replace(time_step=seen, action=action, info=info, burn_in=warming)
            return self._algorithm.preprocess_experience(experience)


@gin.configurable(module="alfish")
class EpochBatches(Batches):
    """On-policy: trains on the unroll itself, several times over, in minibatches drawn without replacement.

    Args:
      num_epochs: passes over the unroll.
      minibatch_size: rows a gradient step; it divides the unroll's rows (unroll length x environments). With memory,
        whole sequences are drawn, and it is also a multiple of the unroll length. None: all rows.
    """

    on_policy = True

    def __init__(self, num_epochs: int = 10, minibatch_size: int | None = None):
        if num_epochs < 1:
            raise UsageError(f"EpochBatches.num_epochs is {num_epochs}; it must be at least 1")
        self._num_epochs, self._minibatch_size = num_epochs, minibatch_size

    def bind(self, algorithm: RLAlgorithm, transforms: Transforms, unroll_length: float, num_envs: int) -> None:
        super().bind(algorithm, transforms, unroll_length, num_envs)
        self._has_state = algorithm.has_state
        if unroll_length < 1 or unroll_length != int(unroll_length):
            raise UsageError(f"Trainer.unroll_length is {unroll_length}; on-policy it is a whole number of at least 1")
        rows, size = int(unroll_length) * num_envs, self._minibatch_size
        self.updates_per_iteration, self.rows_per_update = float(self._num_epochs), size or rows
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
        if self._has_state and size % unroll_length:
            raise UsageError(
                f"EpochBatches.minibatch_size is {size}; a policy with memory trains on whole sequences, so it must be "
                f"a multiple of the unroll length {unroll_length}"
            )
        self.updates_per_iteration *= rows / size

    def add(self, experience: Experience) -> None:
        self._experience = experience

    def chunks(self, env_steps: int) -> Iterator[Chunk]:
        for epoch in range(self._num_epochs):
            if epoch == 0 or self._algorithm.preprocess_each_epoch:
                batch = self._batch(self._prepare(self._experience))
            length, columns = batch.mask.shape
            size = columns if self._minibatch_size is None else self._minibatch_size // length
            # Drawn on the CPU, so that a seed means the same minibatches on every device.
            index = torch.randperm(columns).to(batch.mask.device)
            yield Chunk(batch, index.view(-1, size))

    def _batch(self, experience: Experience) -> Batch:
        """The T rows that may train: as `[T, B]` sequences where there is memory, else as one row of T x B."""
        mask = trainable(experience.time_step.step_type)

        def first_rows(rows: Nest) -> Nest:
            kept = nest.map(lambda leaf: leaf[: len(mask)], rows)
            return kept if self._has_state else nest.merge_leading(kept)

        time_step, action, info, mask = (
            first_rows(rows) for rows in (experience.time_step, experience.action, experience.info, mask)
        )
        state = experience.state if self._has_state else None
        return Batch(Experience(time_step, action, info, state), mask)


@gin.configurable(module="alfish")
class ReplayBatches(Batches):
    """Off-policy: keeps rows in a ring, and trains on windows drawn from it, so many updates for each environment step.

    Over a run exactly floor(updates_per_env_step * (env_steps - warmup_env_steps)) updates are made, however long the
    unrolls.

    Args:
      capacity: rows kept, all environments together.
      batch_size: windows an update.
      window_length: rows a window; one more than the n of n-step returns, with memory one more than it trains.
      updates_per_env_step: gradient steps for each environment step after warm-up; may be below 1.
      warmup_env_steps: environment steps that act uniformly at random, and train nothing.
      state_period: with memory, its state is kept once in so many rows of an environment, and windows start there.
      burn_in: with memory, rows before those of the window, which only bring its state up to date.
      max_chunk_size: largest number of updates whose windows are drawn at once.
      device: where rows are kept; None: the algorithm's device.
      directory: keep rows in memory-mapped files there.
      save: whether checkpoints save the rows; without them, a resumed run acts for `warmup_env_steps` again, with its
        policy, before it trains on.
    """

    on_policy = False

    def __init__(
        self,
        capacity: int = 1_000_000,
        batch_size: int = 256,
        window_length: int = 2,
        updates_per_env_step: float = 1.0,
        warmup_env_steps: int = 1000,
        state_period: int = 8,
        burn_in: int = 0,
        max_chunk_size: int = 64,
        device: str | None = None,
        directory: str | None = None,
        save: bool = True,
    ):
        if updates_per_env_step <= 0:
            raise UsageError(f"ReplayBatches.updates_per_env_step is {updates_per_env_step}; it must be positive")
        if window_length < 2:
            raise UsageError(f"ReplayBatches.window_length is {window_length}; a transition takes 2 rows")
        if state_period < 1 or burn_in < 0:
            raise UsageError(
                f"ReplayBatches.state_period is {state_period} and burn_in {burn_in}; they are at least 1 and 0"
            )
        if warmup_env_steps < batch_size:
            raise UsageError(
                f"ReplayBatches.warmup_env_steps is {warmup_env_steps}, less than one batch of {batch_size}; raise it"
            )
        if capacity < warmup_env_steps:
            raise UsageError(
                f"ReplayBatches.capacity is {capacity}, less than the {warmup_env_steps} steps of warm-up; raise it"
            )
        self._capacity, self._batch_size, self._window_length = capacity, batch_size, window_length
        self._state_period, self._burn_in = state_period, burn_in
        self._ratio, self._warmup = updates_per_env_step, warmup_env_steps
        self._max_chunk_size, self._device, self._directory, self._saves = max_chunk_size, device, directory, save
        self._num_updates = 0
        self._origin: int | None = None  # env steps at which this process resumed without rows

    def bind(self, algorithm: RLAlgorithm, transforms: Transforms, unroll_length: float, num_envs: int) -> None:
        super().bind(algorithm, transforms, unroll_length, num_envs)
        state_period = self._state_period if algorithm.replays_state else None
        if self._burn_in and not algorithm.replays_state:
            raise UsageError(
                f"ReplayBatches.burn_in is {self._burn_in}, and {type(algorithm).__name__} has no memory to warm up; "
                "leave it out, or give its network a memory"
            )
        if state_period is not None and unroll_length > state_period:
            raise UsageError(
                f"ReplayBatches.state_period is {state_period}, and Trainer.unroll_length {unroll_length}; a state is "
                "known at an unroll's start alone, so it cannot be kept more often: raise the one, or lower the other"
            )
        num_rows = self._burn_in + self._window_length
        # Where rows are missing before the first one, the next state is up to a period later.
        needed = num_envs * (num_rows + transforms.look_back + (state_period or 0))
        if self._capacity < needed:
            raise UsageError(
                f"ReplayBatches.capacity is {self._capacity}, too little for one window of {num_rows} rows "
                f"of each of {num_envs} environments; raise it"
            )
        if self._warmup < needed:
            raise UsageError(
                f"ReplayBatches.warmup_env_steps is {self._warmup}, too few for one window of {num_rows} "
                f"rows of each of {num_envs} environments; raise it"
            )
        if math.ceil(unroll_length) > self._capacity // num_envs:
            raise UsageError(
                f"Trainer.unroll_length is {unroll_length}, and ReplayBatches.capacity keeps "
                f"{self._capacity // num_envs} rows of each of {num_envs} environments; raise it"
            )
        self.updates_per_iteration = self._ratio * unroll_length * num_envs
        self.rows_per_update = self._batch_size * (self._window_length - 1)
        device = self._device or algorithm.progress.device
        look_back = transforms.look_back
        self.buffer = RingBuffer(self._capacity, num_envs, device, self._directory, look_back, state_period)

    def acts_at_random(self, env_steps: int) -> bool:
        return env_steps < self._warmup

    def add(self, experience: Experience) -> None:
        kept = {name: getattr(experience.info, name) for name in self._algorithm.replay_info}
        self.buffer.push(experience._replace(info=kept or None))

    def chunks(self, env_steps: int) -> Iterator[Chunk]:
        if self._origin is not None and env_steps < self._origin + self._warmup:
            return  # resumed without rows
        due = max(0, math.floor(self._ratio * (env_steps - self._warmup) + 1e-9)) - self._num_updates
        while due > 0:
            count = min(due, self._max_chunk_size)
            yield self._chunk(count)
            self._num_updates += count
            due -= count

    def state_dict(self) -> dict[str, Any]:
        return {"num_updates": self._num_updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._num_updates = state["num_updates"]

    def stored(self) -> dict[str, Any] | None:
        return self.buffer.state_dict() if self._saves else None

    def load_stored(self, stored: dict[str, Any]) -> None:
        self.buffer.load_state_dict(stored)

    def resume_without_rows(self, env_steps: int) -> int:
        """The rows were not saved: collect before training on, and make no updates for what was missed.

        Args:
          env_steps: as `chunks` counts them.

        Returns:
          How many environment steps to act before there is training again.
        """
        self._origin = env_steps
        self._num_updates = max(self._num_updates, math.floor(self._ratio * env_steps))
        return self._warmup

    def _chunk(self, num_updates: int) -> Chunk:
        num_rows = self._burn_in + self._window_length
        start = self.buffer.draw(num_updates * self._batch_size, num_rows)
        batch = self.buffer.windows(start, num_rows)
        before = self._transforms.window_state(self.buffer, start.column, start.position)
        device = self._algorithm.progress.device
        if self.buffer.device != device:
            batch, before = nest.to((batch, before), device)
        experience = self._prepare(batch.experience._replace(transform_state=before), self._burn_in)
        batch = batch._replace(experience=experience, mask=batch.mask[self._burn_in :])
        if num_updates == 1:
            return Chunk(batch, None)
        index = torch.arange(num_updates * self._batch_size, device=device).view(num_updates, -1)
        return Chunk(batch, index, is_steady=False)


def take(batch: Batch, columns: torch.Tensor) -> Batch:
    """The minibatch of these columns (`[N]` int64)."""
    experience = batch.experience
    rows = experience._replace(state=None, policy_version=None, transform_state=None), batch.mask
    rows, mask = nest.map(lambda leaf: leaf.index_select(1, columns), rows)
    one_each = experience.state, experience.policy_version, batch.env_id, batch.position, batch.weight
    state, version, env_id, position, weight = nest.map(lambda leaf: leaf.index_select(0, columns), one_each)
    return Batch(rows._replace(state=state, policy_version=version), mask, env_id, position, weight)
