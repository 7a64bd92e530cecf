"""The unroller that collects in worker processes while the trainer trains.

A worker fills slots, memory that it shares with the trainer, with segments. A segment has `unroll_length` rows of the
worker's environments, made with one version of the weights. The trainer grants free slots to workers, and takes ready
segments. The number of slots therefore limits both the memory and the age of rows. `AsyncUnroller` decides which slots
are granted and which segments are taken; a `Transport` carries grants and segments.
"""

import functools
import math
import sys
import time
from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple

import gin
import numpy as np
import torch

from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.data import Experience
from alfish.environments import Environment
from alfish.errors import RunError, UsageError, counted
from alfish.errors.user_code import relayed
from alfish.parameters import NonNegativeFloat, NonNegativeInt, PositiveInt, Range, checked
from alfish.processes import replicas
from alfish.processes.channel import to_bytes
from alfish.processes.messages import (
    Died,
    EnvironmentReplaced,
    FromWorker,
    Grant,
    Plan,
    Segment,
    Started,
    Stepping,
)
from alfish.processes.pool import CHECK_SECONDS
from alfish.transforms import Transforms
from alfish.unrollers.unroller import Unroller
from alfish.unrollers.workers import worker_process
from alfish.unrollers.workers.acting import Acting, OnePolicy
from alfish.unrollers.workers.environment_maker import EnvironmentMaker
from alfish.unrollers.workers.segments import Stats, joined, masked
from alfish.unrollers.workers.shared_tensors import Layout
from alfish.unrollers.workers.slots import ActingPolicy, SlotLedger, slot_of
from alfish.unrollers.workers.transport import Transport, Workers

OFF_POLICY_LENGTH = 8  # minimum number of rows of a segment if `unroll_length` is None
WARN_SECONDS = 30.0  # seconds of waiting for segments after which a line is logged


class Collecting(NamedTuple):
    """Settings of collecting; see the arguments of `AsyncUnroller`. `segments` is this learner's share."""

    workers: Callable[[int], Transport]
    lockstep: bool
    slots: int
    segments: int | None
    max_length: int
    max_lag: float
    update_period: int
    max_env_errors: int | None
    stepping: Stepping


@gin.configurable(module="alfish.unrollers")
@checked
class AsyncUnroller(Unroller):
    """Returns rows that worker processes collect while the trainer trains.

    Args:
      environment, algorithm, transforms: parts of the run, see `Unroller`. The environment is closed, because workers
        build their own environments.
      num_workers: number of worker processes.
      envs_per_worker: number of environments of each worker; None means the default of the environment factory.
      mode: schedule of collecting. 'free': workers fill all free slots. 'lockstep': each worker fills one segment while
        the trainer trains on the previous segment, so that the same seed gives the same run.
      slots: number of slots of each worker; on-policy, one of them holds the segment in training. If workers are
        equally fast, rows are at most `slots - 1` iterations old.
      unroll_length: number of rows of a segment. None means Trainer.unroll_length, but at least 8 if training is
        off-policy and replay stores no recurrent states.
      segments_per_unroll: number of segments in an unroll, on-policy; None means `num_workers`.
      max_unroll_length: maximum number of rows of each environment in an unroll, off-policy; None means no limit.
      max_policy_lag: maximum age of a segment in iterations, on-policy. Rows of older segments are masked and counted.
        None means no limit.
      parameter_update_period: number of iterations between two publications of the weights.
      worker_step_interval: minimum seconds between the starts of a worker's vector steps, for real-time environments.
      stagger: number of vector steps over which the ends of first episodes are spread. Environment i of n truncates its
        first episode after `stagger * i / n` steps, so that equally long episodes end at different times. 0 means no
        truncation.
      max_env_errors: maximum number of errors of environments in a run. An environment is replaced if it raises, or
        returns a value that is not finite or has the wrong shape or dtype; its episode ends with the row before the
        error. If a worker cannot step its environments one by one, the worker is restarted instead. None means that the
        first error ends the worker.
      numpy_policy, overwrite_policy_output: settings of acting, see `SyncUnroller`.
      workers: class or factory of the transport; called with the number of workers. See `Workers` for time limits,
        restarts and cores, and `alfish.unrollers.ray.RayWorkers` for workers on other machines.

    Attributes:
      num_env_errors: number of environments that were replaced.
      envs_per_worker: number of environments of a worker.

    Raises:
      UsageError: settings contradict each other. `bind` raises UsageError if settings do not suit the algorithm.
    """

    drains = renews_columns = True
    _policies: list[ActingPolicy]  # set when workers start

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
        workers: Callable[[int], Transport] = Workers,
    ):
        super().__init__(environment, algorithm, transforms)
        num_workers, segments = _own_part(num_workers, segments_per_unroll)
        max_lag = math.inf if max_policy_lag is None else max_policy_lag
        self.tolerates_errors = tolerates = max_env_errors is not None
        stepping = envs_per_worker, stagger, worker_step_interval, tolerates, numpy_policy, overwrite_policy_output
        self._settings = Collecting(
            *(workers, mode == "lockstep", slots, segments, max_unroll_length or sys.maxsize, max_lag),
            *(parameter_update_period, max_env_errors, Stepping(*stepping)),
        )
        self._workers, self._ledger = workers(num_workers), SlotLedger(num_workers, slots)
        self._length = unroll_length or 0  # 0 until `bind` sets it
        self._acting: Acting = OnePolicy(self, algorithm, transforms)
        self.envs_per_worker = envs_per_worker or environment.num_envs
        self.num_envs = self.num_columns = num_workers * self.envs_per_worker
        self.num_env_errors = self._first_generation = 0
        self._running, self._closed, self._at_random, self._stats = False, False, False, Stats()
        # `bind` and `_start` set the other fields of the plan later.
        first = num_workers, self.envs_per_worker, num_workers * slots, self._settings.stepping
        self._plan: Callable[..., Plan] = functools.partial(Plan, *first, worker_process.__name__)

    def act_with(self, acting: Acting) -> None:
        """Sets the policies that act, in place of the constructor's policy; called before `bind`."""
        self._acting = acting

    @property
    def num_workers(self) -> int:
        """Number of workers of this learner."""
        return len(self._workers.all)

    @property
    def num_segments(self) -> int:
        """Expected number of segments in an unroll."""
        return (self._settings.segments if self._is_on_policy else None) or self.num_workers

    @property
    def _is_on_policy(self) -> bool:
        """True if at least one of the policies that train is on-policy."""
        return self._acting.learns_on_policy

    def _check_settings(self) -> None:
        num_workers, settings = self.num_workers, self._settings
        lockstep, slots, segments = settings.lockstep, settings.slots, settings.segments
        self._acting.check(settings.stepping, lockstep)
        if lockstep and segments not in (None, num_workers):
            raise UsageError("AsyncUnroller.segments_per_unroll is for mode 'free'; in lockstep it is num_workers")
        if self._is_on_policy and self.num_segments > num_workers * slots:
            raise UsageError(
                f"AsyncUnroller.segments_per_unroll is {segments}, but {num_workers} workers with {slots} "
                f"slots have at most {num_workers * slots}; raise AsyncUnroller.slots"
            )
        if self._workers.shrinks and lockstep:
            raise UsageError(
                f"{self._workers.shrinks} requires AsyncUnroller.mode = 'free', because lockstep waits for every worker"
            )

    @property
    def stepping(self) -> str:
        return f"in {counted(self.num_workers * replicas.size(), 'worker')} {self._workers.place}"

    def bind(self, make_environment: Callable[..., Environment], unroll_length: float, seed: int) -> None:
        """See `Unroller`.

        Raises:
          UsageError: settings do not suit the policies, or lengths do not suit each other.
        """
        learning = self._acting.learning().values()
        self.num_columns = self.envs_per_worker * self.num_segments
        self._check_settings()
        # Replay stores recurrent states only at the starts of segments, which then must not be longer than an unroll.
        stores_states = any(algorithm.replay_needs.recurrent_state for algorithm in learning)
        at_least = 1 if self._is_on_policy or stores_states else OFF_POLICY_LENGTH
        self._length = self._length or max(at_least, math.ceil(unroll_length))
        self.unroll_length = unroll_length or self._length
        found = f"AsyncUnroller.unroll_length is {self._length} and Trainer.unroll_length is {unroll_length}"
        if self._is_on_policy and self._length != unroll_length:
            raise UsageError(f"{found}; on-policy the two must be equal: bind only Trainer.unroll_length")
        if stores_states and self._length > math.ceil(self.unroll_length):
            raise UsageError(
                f"{found}; replay stores the memory's state at the start of each segment only, so segments must not be "
                "longer than Trainer.unroll_length: bind only Trainer.unroll_length"
            )
        maker = to_bytes(EnvironmentMaker(make_environment), "Trainer.environment")
        self._plan = functools.partial(self._plan, make_environment=maker, length=self._length, seed=seed)

    @torch.no_grad()
    def unroll(self, length: int = 0, at_random: Any = False) -> Experience:
        """Waits for enough segments and joins them.

        On-policy, the result has `segments_per_unroll` segments side by side, in order of arrival: `[T + 1, B]`.
        Off-policy, it has a column for each environment, with all ready segments: at least one segment, and at most
        `max_unroll_length` rows. Columns of workers with fewer segments end with PAD rows.

        On-policy, leaves may be views of shared memory, valid until the next call. Clone leaves that must stay valid
        longer (`nest.map(torch.clone, experience)`).

        Args:
          length: ignored; the length of segments is a setting.
          at_random: whether newly granted segments execute the algorithm's `random_action`.

        With several policies, `at_random` has the names of the policies that act at random, and the result is the
        experience of each policy that trains, by name. If one of them is on-policy, the unroll has
        `segments_per_unroll` segments.
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
        if not self._is_on_policy:  # on-policy, the slots stay in use until the next unroll; this bounds the lag
            self._ledger.release()
        self._grant()
        return experience

    def publish(self) -> None:
        super().publish()
        if self._running and self.policy_version % self._settings.update_period == 0:
            self._workers.publish(self.policy_version)

    def ignore_infos(self) -> None:
        self._acting.ignore_infos()

    def restart(self) -> None:
        """Ends the workers; their segments and episodes are lost. The next unroll starts workers with new policies."""
        if not self._running:
            return
        self._first_generation, old = self._newest_generation + 1, self._workers
        old.close()
        self._workers = self._settings.workers(self.num_workers)
        self._workers.num_restarts = old.num_restarts
        self._ledger = SlotLedger(self.num_workers, self._settings.slots)
        self._running = False

    def stats(self) -> dict[str, float]:
        """Returns lags, waits and times since the previous call (`Stats.take`), and numbers of all failures so far."""
        counts = {"restarts": self._workers.num_restarts, "env_errors": self.num_env_errors}
        return self._stats.take() | {name: float(value) for name, value in counts.items()}

    def state_dict(self) -> dict[str, Any]:
        """Returns version and generation; segments are not saved, so a resumed run begins episodes with new seeds."""
        generation = self._newest_generation
        return {"policy_version": self.policy_version, "generation": generation, **self.calls_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.policy_version = state["policy_version"]
        self._first_generation = state.get("generation", -1) + 1  # the state of another unroller has no generation
        self.repeat_calls(state)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._workers.close()
        if not self._running:
            self.environment.close()

    def _start(self) -> None:
        self._running, self._workers.log = True, self.log
        self.environment.close()
        self.environment.delivers_calls = False
        self._policies, sent = self._acting.policies(self.envs_per_worker), self._acting.sent()
        forms, structure = slot_of(self._policies, self._length)
        names = ", ".join(dict.fromkeys(type(policy.algorithm).__name__ for policy in self._policies))
        plan = self._plan(
            first_generation=self._first_generation,
            policies=to_bytes((sent, forms), names),
            slot_words=Layout(forms).num_words,
            calls=self.calls(),
        )
        self._workers.start(plan, forms, structure, sent.tensors(), self.policy_version)

    @property
    def _newest_generation(self) -> int:
        """Largest generation of a worker in the run."""
        return self._first_generation + max(worker.generation for worker in self._workers.all)

    @property
    def _num_needed(self) -> int:
        """Number of ready segments that an unroll waits for."""
        return self.num_segments if self._settings.lockstep or self._is_on_policy else 1

    def _grant(self) -> None:
        """Grants slots to workers: all free slots, or in lockstep one slot for each worker."""
        publication, calls = self._workers.newest if self._settings.lockstep else None, self.calls()
        for worker in self._workers.all:
            while (slot := self._ledger.next_free(worker.index)) is not None:
                if self._settings.lockstep and not self._ledger.is_idle(worker.index):
                    break  # this iteration's segment is granted or ready
                if not self._workers.grant(worker, Grant(slot, self._at_random, publication, calls)):
                    break
                self._ledger.grant(worker.index)
        self._workers.send()

    def _take(self) -> list[Segment]:
        """Takes the segments of this unroll out of the ready segments."""
        if self._settings.lockstep:
            return sorted(self._ledger.take(), key=lambda segment: segment.worker_index)
        if self._is_on_policy:
            return self._ledger.take(most=self._num_needed)
        # An experience has recurrent states at row 0 only, so with memory an unroll has one segment of each worker.
        has_state = any(algorithm.has_state for algorithm in self._acting.learning().values())
        most = 1 if has_state else max(1, self._settings.max_length // self._length)
        return self._ledger.take(most_of_each=most)

    def _join(self, segments: list[Segment]) -> Any:
        """Joins the segments of each policy that trains into one experience; joins all step records into `records`."""
        parts = [self._workers.read(segment) for segment in segments]
        workers = [segment.worker_index for segment in segments]
        experience, records = {}, {}
        for policy, own in zip(self._policies, zip(*parts), strict=True):
            rows, records[policy.name] = joined(own, workers, self.num_workers, policy.algorithm.on_policy)
            if rows is not None and policy.algorithm.on_policy:
                rows = self._mask_old(policy, rows, segments)
            if rows is not None:
                experience[policy.name] = rows
        self.records = self._acting.whole(records)
        return self._acting.whole(experience)

    def _mask_old(self, policy: ActingPolicy, experience: Experience, segments: list[Segment]) -> Experience:
        """Returns a policy's experience, with rows of segments older than `max_policy_lag` masked."""
        most = self._settings.max_lag
        old = np.repeat([self.policy_version - segment.version > most for segment in segments], policy.num_columns)
        if not old.any():
            return experience
        self._stats.masked(self._length * int(old.sum()), policy.name)
        return masked(experience, old)

    def _wait_for_enough(self) -> None:
        began = warned = time.monotonic()
        while len(self._ledger.ready) < self._num_needed:
            self.check_signals()
            for worker, message in self._workers.wait(CHECK_SECONDS):
                self._receive(worker, message)
            self._grant()
            if time.monotonic() - warned > WARN_SECONDS:
                warned = time.monotonic()
                self.log(f"Waiting for rows for {warned - began:.0f} s: {self._workers.activities()}")
        # Receives all messages that have arrived, so that off-policy rows are not older than necessary.
        for worker, message in self._workers.wait(0):
            self._receive(worker, message)

    def _receive(self, worker: Any, message: FromWorker) -> None:
        if isinstance(message, Segment):
            self._ledger.fill(message)
            self._stats.filled(message.seconds)
        elif isinstance(message, EnvironmentReplaced):
            self._count_error(message)
        elif isinstance(message, Started):
            if message.num_envs != self.envs_per_worker:
                raise UsageError(
                    f"the environment factory made {message.num_envs} {self._acting.noun}s in a worker, but "
                    f"{self.envs_per_worker} here; it must always make the same number, or take the keyword num_envs "
                    "(AsyncUnroller.envs_per_worker)"
                )
        elif isinstance(message, Died):
            self._ledger.on_death(worker.index)
            num_left, slots = self._workers.num_left, self._ledger.slots
            if self._is_on_policy and num_left * slots < self._num_needed:
                raise RunError(
                    f"{num_left} workers with {slots} slots are left, but an iteration needs "
                    f"AsyncUnroller.segments_per_unroll = {self._num_needed} segments; lower segments_per_unroll, or "
                    "raise AsyncUnroller.slots"
                )

    def _count_error(self, error: EnvironmentReplaced) -> None:
        self.num_env_errors += 1
        most = self._settings.max_env_errors
        assert most is not None
        if self.num_env_errors > most:
            raise relayed(
                f"{self._acting.noun} {error.env_id}: {error.sentence}\nThat is error {self.num_env_errors} of "
                f"{self._acting.noun}s in this run, more than AsyncUnroller.max_env_errors = {most}",
                error.traceback,
            )
        self.log(f"{self._acting.noun} {error.env_id} failed and is replaced:\n{error.traceback.rstrip()}")


def _own_part(num_workers: int, segments: int | None) -> tuple[int, int | None]:
    """Returns this learner's part of the workers and segments of all learners."""
    own = replicas.fraction(num_workers, "AsyncUnroller.num_workers")
    return own, None if segments is None else replicas.fraction(segments, "AsyncUnroller.segments_per_unroll")
