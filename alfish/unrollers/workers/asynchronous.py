"""The unroller whose environments and policies run in worker processes, while the trainer trains.

A worker fills segments: `unroll_length` rows of its environments, acted on with one version of the weights, in memory
that it shares with the trainer. The trainer grants slots and consumes what is ready, so that the number of slots
bounds both memory and how old rows can be. Slots change hands by messages alone: free, granted, told of, in use.
"""

import functools
import math
import sys
import time
from collections.abc import Callable
from typing import Annotated, Any, Literal

import gin
import torch

from alfish import nest
from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.data import Experience, StepType
from alfish.environments import Environment
from alfish.errors import RunError, UsageError
from alfish.parameters import NonNegativeFloat, NonNegativeInt, PositiveInt, Range, checked
from alfish.transforms import Transforms
from alfish.unrollers.sync import refuse_on_policy
from alfish.unrollers.unroller import Unroller
from alfish.unrollers.workers.messages import (
    Died,
    EnvironmentReplaced,
    FromWorker,
    Grant,
    Plan,
    Segment,
    Started,
    Stepping,
)
from alfish.unrollers.workers.pickling import EnvironmentMaker, to_bytes
from alfish.unrollers.workers.pool import LOOK_SECONDS, Worker, Workers
from alfish.unrollers.workers.segments import in_columns, records_in_columns, side_by_side
from alfish.unrollers.workers.shared_memory import state_tensors
from alfish.unrollers.workers.slot_ledger import SlotLedger
from alfish.unrollers.workers.slots import example_records, example_row, slot_forms
from alfish.unrollers.workers.stats import Stats

OFF_POLICY_LENGTH = 8  # rows of a segment, where nothing asks for more
WARN_SECONDS = 30.0  # of waiting without a word


@gin.configurable(module="alfish.unrollers")
@checked
class AsyncUnroller(Unroller):
    """Takes over what worker processes collect while the trainer trains.

    Args:
      environment, algorithm, transforms: see `Unroller`; the environment is closed, workers build their own.
      num_workers: processes.
      envs_per_worker: environments of each; None: as many as the environment factory makes by itself.
      mode: 'free': workers go on as long as there are slots; 'lockstep': each fills one segment while the trainer
        trains on the one before, so that the same seed gives the same run.
      slots: segments of each worker, on-policy the one in training included: where workers are equally fast, rows are
        at most `slots - 1` iterations old.
      unroll_length: rows of a segment; None: Trainer.unroll_length, off-policy at least 8.
      segments_per_unroll: on-policy, how many segments an iteration trains on; None: as many as there are workers.
      max_unroll_length: off-policy, rows of each environment that one unroll takes over at most; None: all there are.
      max_policy_lag: on-policy, older segments (in iterations) are not trained on, and counted; None: all are.
      parameter_update_period: iterations between two publications of the weights.
      worker_step_interval: seconds from one vector step of a worker to the next, at least; for real time.
      stagger: the first episode of environment i of n is broken off after `stagger * i / n` vector steps, so that
        environments whose episodes are equally long do not end all at once; 0: none is.
      max_env_errors: an environment that raises, or returns what is not finite or not of its space, is built anew, and
        its episode ends with the row before; one more than so many ends the run. Environments that are not stepped one
        by one end their worker instead, which is started again. None: the first error does.
      numpy_policy, overwrite_policy_output: see `SyncUnroller`.
      workers: takes the number of workers; see `Workers` for time limits, restarts and processor cores.

    Attributes:
      num_env_errors: environments that were built anew.

    Raises:
      UsageError: settings do not fit one another or the algorithm.
    """

    drains = True

    def __init__(
        self,
        environment: Environment,
        algorithm: RLAlgorithm,
        transforms: Transforms,
        num_workers: PositiveInt = 1,
        envs_per_worker: PositiveInt | None = None,
        mode: Literal["lockstep", "free"] = "free",
        slots: Annotated[int, Range(2)] = 2,
        unroll_length: PositiveInt | None = None,
        segments_per_unroll: PositiveInt | None = None,
        max_unroll_length: PositiveInt | None = None,
        max_policy_lag: NonNegativeInt | None = None,
        parameter_update_period: PositiveInt = 1,
        worker_step_interval: NonNegativeFloat = 0.0,
        stagger: NonNegativeInt = 0,
        max_env_errors: NonNegativeInt | None = 100,
        numpy_policy: NonNegativeInt | None = 0,
        overwrite_policy_output: bool = False,
        workers: Callable[[int], Workers] = Workers,
    ):
        super().__init__(environment, algorithm, transforms)
        self._workers, self._ledger = workers(num_workers), SlotLedger(num_workers, slots)
        self._lockstep, self._length = mode == "lockstep", unroll_length or 0  # 0: `bind` tells
        self._check_settings(segments_per_unroll, overwrite_policy_output)
        num_envs = envs_per_worker or environment.num_envs
        self.num_envs = num_workers * num_envs
        self.num_columns = num_envs * (segments_per_unroll or num_workers) if algorithm.on_policy else self.num_envs
        self._max_length, self._max_lag = max_unroll_length, max_policy_lag
        self._update_period, self._max_env_errors = parameter_update_period, max_env_errors
        self.num_env_errors = self._first_generation = 0
        self._running = self._closed = self._at_random = False
        self._stats = Stats()
        tolerates = max_env_errors is not None
        stepping = envs_per_worker, stagger, worker_step_interval, tolerates, numpy_policy, overwrite_policy_output
        self._plan: Callable[..., Plan] = functools.partial(
            Plan, num_workers, num_envs, num_workers * slots, Stepping(*stepping)
        )

    def _check_settings(self, segments_per_unroll: int | None, overwrite_policy_output: bool) -> None:
        name, num_workers, slots = type(self._algorithm).__name__, len(self._workers.all), self._ledger.slots
        if self._algorithm.on_policy and not self._algorithm.unroll_use.handles_stale_policies:
            raise UsageError(
                f"{name} is on-policy and does not correct for rows of an older policy, which AsyncUnroller brings; "
                "train with APPO, or bind Trainer.unroller = @SyncUnroller"
            )
        if overwrite_policy_output:
            refuse_on_policy(self._algorithm)
        if self._lockstep and segments_per_unroll not in (None, num_workers):
            raise UsageError("AsyncUnroller.segments_per_unroll is for mode 'free'; in lockstep each worker gives one")
        if self._algorithm.on_policy and (segments_per_unroll or num_workers) > num_workers * slots:
            raise UsageError(
                f"AsyncUnroller.segments_per_unroll is {segments_per_unroll}, and {num_workers} workers of {slots} "
                f"slots have {num_workers * slots} at most; raise AsyncUnroller.slots"
            )
        if self._workers.shrinks and self._lockstep:
            raise UsageError(
                "Workers.on_failure = 'shrink' takes AsyncUnroller.mode = 'free': lockstep waits for each worker"
            )

    def bind(self, make_environment: Callable[..., Environment], unroll_length: float, seed: int) -> None:
        at_least = 1 if self._algorithm.on_policy else OFF_POLICY_LENGTH
        self._length = self._length or max(at_least, math.ceil(unroll_length))
        self.unroll_length = unroll_length or self._length
        if self._algorithm.on_policy and self._length != unroll_length:
            raise UsageError(
                f"AsyncUnroller.unroll_length is {self._length} and Trainer.unroll_length {unroll_length}; on-policy "
                "they are the same: bind Trainer.unroll_length alone"
            )
        maker = EnvironmentMaker(make_environment)
        self._plan = functools.partial(self._plan, make_environment=maker, length=self._length, seed=seed)

    @torch.no_grad()
    def unroll(self, length: int = 0, at_random: bool = False) -> Experience:
        """Takes over what workers have collected, and waits where there is not enough.

        On-policy, `segments_per_unroll` segments, in the order they came, side by side: `[T + 1, B]`. Off-policy, at
        least one and, up to `max_unroll_length` rows, all that are ready: a column for each environment, filled up with
        PAD rows where a worker has given less than another.

        On-policy, leaves may lie in the workers' own memory, which is written again after the next call: clone what is
        to be kept for longer (`nest.map(torch.clone, experience)`).

        Args:
          length: not read; a segment's length is a setting.
          at_random: segments granted from now on execute the algorithm's `random_action`.
        """
        if not self._running:
            self._start()
        self._at_random = at_random
        began = time.perf_counter()
        self._ledger.release()
        self._grant()
        self._wait_for_enough()
        self._stats.waited(time.perf_counter() - began)
        taken = self._take()
        self._stats.delivered([self.policy_version - segment.version for segment in taken])
        experience = self._join(taken)
        if self._algorithm.on_policy:  # in use until the next unroll, so that no worker gets further ahead than it may
            self._mask_old(experience, taken)
        else:
            self._ledger.release()
        self._grant()
        return experience

    def publish(self) -> None:
        super().publish()
        if self._running and self.policy_version % self._update_period == 0:
            self._workers.publish(self.policy_version)

    def ignore_infos(self) -> None:
        self._plan = functools.partial(self._plan, keeps_infos=False)

    def stats(self) -> dict[str, float]:
        """Lags, waits, times, and what went wrong; times are shares of all that workers, or the trainer, did."""
        counts = {"restarts": self._workers.num_restarts, "env_errors": self.num_env_errors}
        return self._stats.take() | {name: float(value) for name, value in counts.items()}

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` continues from, without rows under way: new episodes begin then, with new seeds."""
        newest = max(worker.generation for worker in self._workers.all)
        return {"policy_version": self.policy_version, "generation": self._first_generation + newest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.policy_version = state["policy_version"]
        self._first_generation = state.get("generation", -1) + 1  # a `SyncUnroller` has none

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._workers.close()
        if not self._running:
            self.environment.close()

    def _start(self) -> None:
        self._running = True
        self._workers.log = self.log
        ragged, on_policy = self.environment.ragged, self._algorithm.on_policy
        self.environment.close()
        example = example_row(self.environment, self._algorithm, self._transforms, self._envs_per_worker)
        num_rows = self._length + (1 if on_policy or ragged else 0)
        records = example_records(example, self.shown)
        num_arrivals = 2 * self._length + 3 if ragged else self._length + 1
        plan = self._plan(
            first_generation=self._first_generation,
            modules=to_bytes((self._algorithm, self._transforms), type(self._algorithm).__name__),
            forms=slot_forms(example, records, num_rows, num_arrivals),
            shown=self.shown,
        )
        structure = nest.flatten((example, records))[1]
        weights = state_tensors(self._algorithm, self._transforms)
        self._workers.start(plan, structure, weights, self.policy_version)

    # Segments.

    @property
    def _envs_per_worker(self) -> int:
        return self.num_envs // len(self._workers.all)

    @property
    def _num_needed(self) -> int:
        """Segments that an unroll waits for."""
        if self._lockstep or self._algorithm.on_policy:
            return self.num_columns // self._envs_per_worker
        return 1

    def _grant(self) -> None:
        """Gives workers what they may fill now: all free slots, in lockstep one each."""
        publication = self._workers.newest if self._lockstep else None
        for worker in self._workers.all:
            while (slot := self._ledger.next_free(worker.index)) is not None:
                if self._lockstep and not self._ledger.is_idle(worker.index):
                    break  # it has a slot to fill, or has filled one that nobody has taken yet
                if not self._workers.grant(worker, Grant(slot, self._at_random, publication)):
                    break
                self._ledger.grant(worker.index)

    def _take(self) -> list[Segment]:
        """The segments of this unroll, out of those that are ready."""
        if self._lockstep:
            return sorted(self._ledger.take(), key=lambda segment: segment.worker_index)
        if self._algorithm.on_policy:
            return self._ledger.take(most=self._num_needed)
        # A policy's memory is stored at row 0 of an experience, so there every segment is one of its own.
        most = 1 if self._algorithm.has_state else max(1, (self._max_length or sys.maxsize) // self._length)
        return self._ledger.take(most_of_each=most)

    def _join(self, segments: list[Segment]) -> Experience:
        """The experience that segments make together; what arrived in them becomes `records`."""
        parts = [self._workers.read(segment) for segment in segments]
        by_worker = [
            [part for segment, part in zip(segments, parts) if segment.worker_index == worker.index]
            for worker in self._workers.all
        ]
        self.records = records_in_columns([[records for _, records in own] for own in by_worker])
        if self._algorithm.on_policy:
            return nest.arrays(side_by_side([experience for experience, _ in parts]))
        return nest.arrays(in_columns([[experience for experience, _ in own] for own in by_worker]))

    def _mask_old(self, experience: Experience, segments: list[Segment]) -> None:
        """Leaves nothing to train on of segments that are older than `max_policy_lag`."""
        num_envs = self._envs_per_worker
        for i, segment in enumerate(segments):
            if self._max_lag is not None and self.policy_version - segment.version > self._max_lag:
                experience.time_step.step_type[:, i * num_envs : (i + 1) * num_envs] = StepType.PAD
                self._stats.masked(self._length * num_envs)

    # Messages.

    def _wait_for_enough(self) -> None:
        began = warned = time.monotonic()
        while len(self._ledger.ready) < self._num_needed:
            self.check_signals()
            for worker, message in self._workers.wait(LOOK_SECONDS):
                self._receive(worker, message)
            self._grant()
            if time.monotonic() - warned > WARN_SECONDS:
                warned = time.monotonic()
                self.log(f"Waiting for rows for {warned - began:.0f} s: {self._workers.activities()}")
        # What else has come is taken in, so that nothing is older than it needs to be.
        for worker, message in self._workers.wait(0):
            self._receive(worker, message)

    def _receive(self, worker: Worker, message: FromWorker) -> None:
        if isinstance(message, Segment):
            self._ledger.fill(message)
            self._stats.filled(message.seconds)
        elif isinstance(message, EnvironmentReplaced):
            self._count_error(message)
        elif isinstance(message, Started):
            if message.num_envs != self._envs_per_worker:
                raise UsageError(
                    f"the environment factory made {message.num_envs} environments in a worker, and "
                    f"{self._envs_per_worker} here; it must always make the same number, or take the keyword num_envs "
                    "(AsyncUnroller.envs_per_worker)"
                )
        elif isinstance(message, Died):
            self._ledger.on_death(worker.index)
            num_left, slots = self._workers.num_left, self._ledger.slots
            if self._algorithm.on_policy and num_left * slots < self._num_needed:
                raise RunError(
                    f"{num_left} workers of {slots} slots are left, and an iteration takes "
                    f"AsyncUnroller.segments_per_unroll = {self._num_needed} segments; lower that, or raise "
                    "AsyncUnroller.slots"
                )

    def _count_error(self, error: EnvironmentReplaced) -> None:
        self.num_env_errors += 1
        assert self._max_env_errors is not None
        if self.num_env_errors > self._max_env_errors:
            raise RunError(
                f"environment {error.env_id} failed, error {self.num_env_errors} of environments in this run, more "
                f"than AsyncUnroller.max_env_errors = {self._max_env_errors}:\n{error.traceback.rstrip()}"
            )
        self.log(f"environment {error.env_id} failed, and is built anew:\n{error.traceback.rstrip()}")
