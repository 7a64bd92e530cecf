"""Off-policy batches: windows from replay, optionally mixed with windows of recorded data."""

import contextlib
import copy
import math
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import gin

from alfish.algorithms.contract import kind_of, warn_of_bounds
from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.compiler.inductor import is_checked
from alfish.data import Experience, in_line
from alfish.environments import Environment
from alfish.errors import UsageError
from alfish.errors.user_code import overridden
from alfish.learner.batches.batches import Batches, Minibatches
from alfish.learner.batches.sequence_sampler import SequenceBatches, SequenceSampler
from alfish.learner.batches.update_schedule import UpdateSchedule
from alfish.offline import OfflineBuffer
from alfish.parameters import NonNegativeInt, PositiveFloat, PositiveInt, Range, UnitInterval, checked
from alfish.parameters.kinds import device_named
from alfish.parameters.parts import build
from alfish.processes import replicas
from alfish.replay import HindsightReplay, RingBuffer, Sampler, Uniform
from alfish.runs.files import absolute
from alfish.transforms import Transforms

MOST_ROWS = 1_000_000  # upper limit of the default capacity


@gin.configurable(module="alfish")
@checked
class ReplayBatches(SequenceBatches):
    """Off-policy: trains on windows from a ring buffer, with a fixed number of updates per environment step.

    A run makes exactly floor(updates_per_env_step * (env_steps - warmup_env_steps)) updates, independently of the
    unroll length, after `offline_updates` updates on recorded data.

    With `offline`, a fixed fraction of every batch is drawn from recorded data, even while replay is nearly empty. Ball
    et al., 2023, https://arxiv.org/abs/2302.02948, use one half. Transforms first compute their running statistics from
    the recorded data, then update them with collected rows.

    Args:
      capacity: number of rows to store, over all environments; None means the budget's environment steps, at most
        1,000,000.
      batch_size: number of windows in an update.
      window_length: number of rows of a window: n + 1 for n-step returns; with memory, the number of rows that train
        plus 1.
      updates_per_env_step: number of updates per environment step after warm-up; may be below 1.
      warmup_env_steps: number of environment steps before the first update. Until then, actions are the algorithm's
        `random_action`, uniform by default; after offline updates, they are the policy's actions. Updates that become
        due before replay holds a batch are made as soon as replay holds one. None means a tenth of the budget's
        environment steps, at most 10,000, or 1000 if the budget does not limit steps; but at least `batch_size`, and
        never more than the capacity. After offline updates, None means 0.
      state_period: number of rows between two stored recurrent states of an environment; windows start at rows with a
        stored state. Used with memory only.
      burn_in: number of rows before the window from which only the recurrent state is computed. Must be 0 without
        memory.
      buffer: class of the ring, `RingBuffer` or `AlignedRingBuffer`; the latter is faster for many environments that
        reset in the same step, and does not wait for a GPU.
      sampler: class or factory of the sampler that draws windows: `Uniform`, `Prioritized` or `Epochs`.
      hindsight: class or factory of hindsight relabelling, `HindsightReplay`; None means that windows keep their goals.
      clear_after_use: whether all rows are removed after an iteration that made updates.
      offline: class or factory of recorded data, `OfflineBuffer`; None means no recorded data.
      offline_fraction: fraction of each batch that is drawn from recorded data, rounded to whole windows.
      offline_sampler: class or factory of the sampler that draws windows of recorded data.
      offline_updates: number of updates on recorded data only, before the first environment step.
      max_chunk_size: maximum number of updates whose windows are drawn at once, with the priorities before the first of
        these updates.
      device: device of the rows; None means the algorithm's device.
      directory: directory for memory-mapped files of the rows, whose disk space is reserved at the start; None means
        that rows are in memory.
      save: whether checkpoints save the rows. If False, a resumed run collects new rows before it trains. The number of
        environment steps for this is the largest of three numbers: the rest of the warm-up; the length of the warm-up,
        limited to a tenth of the remaining budget; and the number of steps after which a batch can be drawn.
    """

    on_policy = False

    def __init__(
        self,
        capacity: PositiveInt | None = None,
        batch_size: PositiveInt = 256,
        window_length: Annotated[int, Range(2)] = 2,
        updates_per_env_step: PositiveFloat = 1.0,
        warmup_env_steps: NonNegativeInt | None = None,
        state_period: PositiveInt = 8,
        burn_in: NonNegativeInt = 0,
        buffer: Callable[..., RingBuffer] = RingBuffer,
        sampler: Callable[[], Sampler] = Uniform,
        hindsight: Callable[[], HindsightReplay] | None = None,
        clear_after_use: bool = False,
        offline: Callable[..., OfflineBuffer] | None = None,
        offline_fraction: UnitInterval = 0.5,
        offline_sampler: Callable[[], Sampler] = Uniform,
        offline_updates: NonNegativeInt = 0,
        max_chunk_size: PositiveInt = 64,
        device: str | None = None,
        directory: str | None = None,
        save: bool = True,
    ):
        super().__init__(window_length, burn_in)
        if offline is None and offline_updates:
            raise UsageError(
                f"ReplayBatches.offline_updates is {offline_updates}, but there are no data; bind "
                "ReplayBatches.offline = @OfflineBuffer"
            )
        self._capacity = None if capacity is None else replicas.fraction(capacity, "ReplayBatches.capacity")
        self._batch_size, self._state_period = replicas.fraction(batch_size, "ReplayBatches.batch_size"), state_period
        self._num_recorded = 0 if offline is None else _num_recorded(self._batch_size, offline_fraction)
        self._schedule = UpdateSchedule(updates_per_env_step, warmup_env_steps, offline_updates)
        self._make_buffer, self._sampler, self._hindsight = buffer, sampler, hindsight
        self.outlasts_acting = not clear_after_use
        self._offline, self._offline_sampler = offline, offline_sampler
        self._max_chunk_size = max_chunk_size
        self._device = device
        self._directory = directory
        self._saves = save
        self._recorded: SequenceSampler | None = None  # see `start`
        self._num_added, self._tests_actions = 0, False  # number of calls of `add`, and whether they test actions
        self._files = contextlib.ExitStack()  # open files of the buffer

    @property
    def warmup_env_steps(self) -> int:  # type: ignore[override]
        return self._schedule.warmup_env_steps

    @property
    def needed_env_steps(self) -> int:  # type: ignore[override]
        return self._schedule.needed_env_steps

    def plan(self, num_env_steps: float) -> None:
        most = math.inf if self._capacity is None else self._capacity * replicas.size()
        self._schedule.plan(num_env_steps, self._batch_size * replicas.size(), most)

    def bind(self, algorithm: RLAlgorithm, transforms: Transforms, unroll_length: float, num_envs: int) -> None:
        super().bind(algorithm, transforms, unroll_length, num_envs)
        self._tests_actions = bool(overridden(algorithm))
        if self._schedule.has_offline_updates and (parts := algorithm.parts_with_statistics):
            raise UsageError(
                f"{', '.join(parts)} of {type(algorithm).__name__} has statistics of collected rows, but "
                "ReplayBatches.offline_updates come before rows are collected; set offline_updates to 0, or leave the "
                "part out"
            )
        state_period = self._state_period if algorithm.replay_needs.recurrent_state else None
        if state_period is not None and unroll_length > state_period:
            raise UsageError(
                f"ReplayBatches.state_period is {state_period}, and Trainer.unroll_length is {unroll_length}; states "
                "are known only where an unroll starts, so they cannot be stored more often; raise state_period, or "
                "lower unroll_length"
            )
        num_rows = self.num_rows
        needed = num_rows + transforms.look_back
        if state_period is not None:
            # A state is stored for the first unroll that begins in each block of `state_period` rows. If replay lacks
            # the earlier rows that transforms read, windows cannot begin at this state, only at that of the next block.
            needed += state_period + (math.ceil(unroll_length) if transforms.look_back else 0)
        needed *= num_envs
        self._unroll_rows = math.ceil(unroll_length)
        num_stored = self._num_stored(needed, num_envs * 2 * self._unroll_rows)  # twice, see `check_unrolls`
        if num_stored < needed:
            raise UsageError(
                f"ReplayBatches.capacity is {num_stored}, too small for one window of {num_rows} rows of each of "
                f"{num_envs} environments; raise the capacity"
            )
        if self._unroll_rows > num_stored // num_envs:
            raise UsageError(
                f"Trainer.unroll_length is {unroll_length}, but ReplayBatches.capacity keeps only "
                f"{num_stored // num_envs} rows of each of {num_envs} environments; raise the capacity"
            )
        self._schedule.needed_env_steps = replicas.size() * max(needed, self._batch_size - self._num_recorded)
        if not self.outlasts_acting and unroll_length < num_rows + transforms.look_back:
            and_earlier = " and the earlier rows that transforms read" if transforms.look_back else ""
            raise UsageError(
                f"with ReplayBatches.clear_after_use, replay keeps only the {unroll_length} rows of an unroll, too few "
                f"for windows of {num_rows} rows{and_earlier}; raise Trainer.unroll_length"
            )
        self.updates_per_iteration = self._schedule.ratio * unroll_length * num_envs * replicas.size()
        self.rows_per_update = self._batch_size * (self.window_length - 1)
        device = algorithm.progress.device
        if self._device is not None:
            device = device_named(self._device, "ReplayBatches.device")
        if self._directory is not None and self._device is not None and device.type != "cpu":
            raise UsageError(
                f"ReplayBatches.directory stores rows in files, but ReplayBatches.device is {self._device!r}; leave "
                "out `directory` or `device`"
            )
        directory = None if self._directory is None else replicas.own_directory(absolute(self._directory))
        try:
            self.buffer = build(
                self._make_buffer,
                RingBuffer,
                "ReplayBatches.buffer",
                num_stored,
                num_envs,
                device,
                directory,
                transforms.look_back,
                state_period,
                keeps_episodes=self._hindsight is not None,
                return_gamma=algorithm.replay_needs.return_gamma,
            )
        except MemoryError as error:
            raise UsageError(
                f"ReplayBatches.capacity is {num_stored:,} rows, which does not fit into memory ({error}); lower the "
                "capacity"
            ) from error
        self._files.callback(self.buffer.close)
        self._collected = SequenceSampler(self.buffer, self._sampler, self._hindsight, algorithm, transforms, num_rows)

    def start(self, environment: Environment) -> None:
        self.buffer.check_unrolls(self._unroll_rows, environment.uneven)
        self._collected.start(environment)
        if self._offline is not None and self._recorded is None:
            _, self._recorded = self.recorded(self._offline, self._offline_sampler, self._hindsight, environment)

    def rest(self) -> int:
        return 0 if self._offline is None else min(self._max_chunk_size, self._schedule.num_offline_due)

    def acts_at_random(self, env_steps: int) -> bool:
        return env_steps < self._schedule.warmup_env_steps and not self._schedule.has_offline_updates

    def add(self, experience: Experience) -> None:
        """See `Batches`. Warns once if the user's algorithm chooses actions out of bounds; some calls test this.

        Raises:
          UsageError: the info lacks a field that the algorithm needs.
        """
        if self._tests_actions and is_checked(self._num_added):
            self._tests_actions = not warn_of_bounds(experience.action, self.algorithm)
        self._num_added += 1
        needed = self.algorithm.replay_needs.info
        if experience.ends is not None and self.buffer.knows_starts:
            experience = in_line(experience).experience
        if not needed and experience.info is None:
            self.buffer.push(experience)
            return
        try:
            kept = {name: getattr(experience.info, name) for name in needed}
        except AttributeError as error:
            raise UsageError(
                f"rollout_step of {type(self.algorithm).__name__} returned {kind_of(experience.info)} as info; it must "
                f"be a NamedTuple with the fields {', '.join(needed)}, which its replay_needs lists"
            ) from error
        self.buffer.push(experience._replace(info=kept or None))

    def chunks(self, steps: int, for_graph: bool = False) -> Iterator[Minibatches]:
        schedule = self._schedule
        if count := self.rest():
            assert self._recorded is not None
            schedule.num_updates += count
            yield self._chunk([(self._recorded, self._batch_size)], count, for_graph)
            return
        parts = [(self._collected, self._batch_size - self._num_recorded)]
        parts += [] if self._recorded is None else [(self._recorded, self._num_recorded)]
        due = schedule.num_due(steps)
        if due and not schedule.can_draw and (replicas.is_joined() or not self.outlasts_acting):
            # Updates wait until every learner's replay holds a window. With several learners, the clock counts the rows
            # of all learners, so a learner with slow workers may have too few rows. After a clear, replay holds only
            # newer rows, and possibly none of them can start a window.
            can_draw = self.buffer.has_start(self.num_rows)
            schedule.can_draw = all(found > 0 for (found,) in replicas.gather(can_draw))
            due = due if schedule.can_draw else 0
        clears = due > 0 and not self.outlasts_acting
        schedule.num_updates += due
        try:
            while due > 0:
                count = min(due, self._max_chunk_size)
                yield self._chunk(parts, count, for_graph)
                due -= count
        finally:  # also if `LossInfo.stop` ends the updates of this iteration; the remaining ones are never made
            if clears:
                self.buffer.clear()
                schedule.can_draw = False

    def state_dict(self) -> dict[str, Any]:
        data = {} if self._recorded is None else {"offline": self._recorded.state_dict()}
        return {**self._schedule.state_dict(), **data}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._schedule.load_state_dict(state)
        if self._recorded is not None:
            self._recorded.load_state_dict(state["offline"])

    def close(self) -> None:
        self._files.close()

    def stored(self) -> dict[str, Any] | None:
        return self._rows() if self._saves else None

    def _rows(self) -> dict[str, Any]:
        return {**self.buffer.state_dict(), "sampler": self._collected.sampler.state_dict()}

    def load_stored(self, stored: dict[str, Any]) -> None:
        self.buffer.load_state_dict(stored)
        self._collected.sampler.load_state_dict(stored.get("sampler", {}))

    def take_over(self, other: Batches) -> None:
        assert isinstance(other, ReplayBatches)
        self.load_state_dict(other.state_dict())
        rows = other._rows()
        if self._directory is not None:  # only one buffer may use the directory's files at a time
            rows = copy.deepcopy(rows)
            other.close()
        self.load_stored(rows)

    def resume_without_rows(self, steps: int) -> int:
        """Continues with an empty replay, and skips updates that become due while rows are collected."""
        self.buffer.clear()  # loading a file with other content may have failed midway
        return self._schedule.resume_without_rows(steps)

    @property
    def has_offline_updates(self) -> bool:
        """True if updates are made before the first environment step."""
        return self._schedule.has_offline_updates

    def updates_until(self, steps: int) -> int:
        return self._schedule.num_until(steps)

    def _num_stored(self, window_rows: int, unroll_rows: int) -> int:
        """Returns the number of rows that this learner stores.

        Without a given capacity, the number is at least `window_rows` and at least `unroll_rows`.

        Args:
          window_rows: number of rows in one window of each environment.
          unroll_rows: number of rows in one unroll.

        Raises:
          UsageError: the given capacity is less than the warm-up.
        """
        warmup = self.warmup_env_steps
        if self._capacity is None:
            planned = max(int(min(MOST_ROWS, self._schedule.num_env_steps)), warmup)
            return max(math.ceil(planned / replicas.size()), window_rows, unroll_rows)
        capacity = self._capacity * replicas.size()
        if capacity < warmup:
            raise UsageError(
                f"ReplayBatches.capacity is {capacity}, less than the {warmup} steps of warm-up; raise the capacity"
            )
        return self._capacity


def _num_recorded(batch_size: int, offline_fraction: float) -> int:
    """Returns the number of windows in a batch that are drawn from recorded data.

    Raises:
      UsageError: the number is 0, or includes all windows.
    """
    count = round(offline_fraction * batch_size)
    if not 0 < count < batch_size:
        raise UsageError(
            f"ReplayBatches.offline_fraction is {offline_fraction}, which means {count} of {batch_size} windows, but a "
            "batch must have windows of both kinds; change it, or bind "
            + ("Trainer.batches = @OfflineBatches" if count else "ReplayBatches.offline = None")
        )
    return count
