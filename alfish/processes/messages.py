"""Messages between the trainer and its workers: a `Setup` at the start, then messages over a `Channel`."""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np


class EnvironmentCall(NamedTuple):
    """A call of a method of all environments; see `Environment.call`."""

    number: int  # later calls of a run have higher numbers
    name: str  # name of the method
    arguments: tuple[Any, ...]


class Stepping(NamedTuple):
    """Settings of stepping and acting; see the arguments of `AsyncUnroller`."""

    num_envs: int | None  # number of environments that the factory is to make; None means the factory's default
    stagger: int
    step_interval: float  # seconds
    tolerates_errors: bool
    numpy_policy: int | None
    overwrites: bool


class Plan(NamedTuple):
    """Settings that all workers of a run share. The plan can be pickled, and does not depend on the machine."""

    num_workers: int  # number of workers of the run
    envs_per_worker: int
    num_slots: int  # total number of slots of the pool's workers
    stepping: Stepping
    program: str  # name of the module whose `main` runs in each worker process
    make_environment: bytes  # pickled `EnvironmentMaker`
    length: int  # rows of a segment
    seed: int  # seed of the run
    first_generation: int  # first generation of workers since the last resume
    policies: bytes  # pickled `SentPolicies`, and shape and dtype of each leaf of a slot
    slot_words: int  # length of a slot in words of 8 bytes
    calls: tuple[EnvironmentCall, ...] = ()  # calls that workers make before the first reset
    first_worker: int = 0  # index of this pool's first worker among all workers of the run

    def part(self, first: int, count: int, generation: int) -> "Plan":
        """Returns the plan of a pool that has only some workers of the run.

        Args:
          first: index of the pool's first worker among all workers of the run.
          count: number of workers in the pool.
          generation: number of earlier processes of each of these workers. Episodes are staggered only if it is 0.
        """
        return self._replace(
            num_slots=self.num_slots // self.num_workers * count,
            stepping=self.stepping._replace(stagger=0) if generation else self.stepping,
            first_generation=self.first_generation + generation,
            first_worker=first,
        )

    def setup(self, worker_index: int, generation: int, cpu: int | None = None) -> "Setup":
        """Returns the setup of one process.

        Args:
          worker_index: index of the worker in its pool.
          generation: number of earlier processes of this worker.
          cpu: processor core to which the worker is pinned; None means no core.
        """
        index = self.first_worker + worker_index
        first = index * self.envs_per_worker
        columns = range(first, first + self.envs_per_worker)
        num_columns = self.envs_per_worker * self.num_workers
        process = index, self.first_generation + generation
        return Setup(
            plan=self,
            worker_index=worker_index,
            seed=seed_of(self.seed, *process),
            process=process,
            first_env_id=first,
            starts=[0 if generation else self.stepping.stagger * column // num_columns for column in columns],
            cpu=cpu,
        )


def seed_of(seed: int, worker: int, generation: int) -> int:
    """Returns the seed of a worker process; it differs from the seeds of the trainer and all other processes.

    Args:
      seed: seed of the run, or of one of several policies.
      worker: index of the worker among all workers of the run.
      generation: number of earlier processes of this worker in the run.
    """
    return int(np.random.SeedSequence(seed, spawn_key=(1, worker, generation)).generate_state(1)[0] >> 1)


class Setup(NamedTuple):
    """Settings with which a worker process starts."""

    plan: Plan
    worker_index: int  # index of the worker in its pool
    seed: int
    process: tuple[int, int]  # index of the worker among all workers of the run, and number of its earlier processes
    first_env_id: int
    starts: list[int]  # for each column, vector steps until its first episode is truncated; 0 if it is not
    cpu: int | None


# From the trainer to a worker.


class Grant(NamedTuple):
    """Permission to fill a slot. The worker owns the slot until it sends the `Segment`."""

    slot: int
    # Whether to act with the algorithm's `random_action`; with several policies, the names of the policies that do.
    at_random: Any
    publication: int | None  # number of the publication of weights to act with; None means the newest
    calls: tuple[EnvironmentCall, ...] = ()  # the last call of each method; the worker skips calls that it has made


# From a worker to the trainer.


class Started(NamedTuple):
    """Sent when the environments are built and reset."""

    num_envs: int


class Seconds(NamedTuple):
    """Seconds that a worker spent on a segment."""

    wait: float  # seconds of waiting for the slot
    env: float
    policy: float
    copy: float  # seconds of copying into the slot


class Segment(NamedTuple):
    """Sent when a slot is filled; the trainer then owns the slot."""

    worker_index: int  # index of the worker in its pool
    slot: int  # index of the slot among the pool's slots
    sequence: int  # number of segments that the process filled earlier
    version: int  # `policy_version` of the weights
    num_records: Sequence[int]  # for each policy, number S of rows of its `StepRecords`
    infos: Sequence[list[tuple[int, dict[str, Any]]]]  # for each policy, `StepRecords.infos`
    seconds: Seconds


class EnvironmentReplaced(NamedTuple):
    """Sent when an environment failed and was replaced; the worker continues."""

    env_id: int
    sentence: str  # the error in one sentence
    traceback: str


class EnvironmentFailed(NamedTuple):
    """Sent when an environment failed and cannot be replaced. The worker ends; a restart may help."""

    sentence: str
    traceback: str


class Failed(NamedTuple):
    """Sent when the worker ends because of an error that would recur after a restart."""

    sentence: str  # the error in one sentence; '' if the traceback is shown instead
    traceback: str
    missing: str = ""  # name of the module that could not be imported; '' for other errors


class Refused(NamedTuple):
    """Sent when the worker ends because of a mistake of the user."""

    sentence: str


# From a `Transport` to `AsyncUnroller`.


class Died(NamedTuple):
    """Yielded when the process of a worker has ended, as its last message."""


FromWorker: TypeAlias = Started | Segment | EnvironmentReplaced | EnvironmentFailed | Failed | Refused | Died
