"""What the trainer and a worker tell one another: a `Setup` when it starts, and then messages over a `Channel`."""

from typing import Any, NamedTuple, TypeAlias

import numpy as np

from alfish.unrollers.workers.pickling import EnvironmentMaker


class Stepping(NamedTuple):
    """How workers step their environments; see the arguments of `AsyncUnroller`."""

    num_envs: int | None  # asked of the environment factory; None: as many as it makes
    stagger: int
    step_interval: float  # seconds
    tolerates_errors: bool
    numpy_policy: int | None
    overwrites: bool


class Plan(NamedTuple):
    """What the trainer tells all of its workers. It pickles, and no bit depends on where a worker runs."""

    num_workers: int
    envs_per_worker: int
    num_slots: int  # of all workers
    stepping: Stepping
    make_environment: EnvironmentMaker
    length: int  # rows a segment
    seed: int  # of the run
    first_generation: int  # added to a worker's own
    modules: bytes  # the algorithm and the transforms
    forms: list  # shape and dtype of each leaf of a segment
    shown: tuple[str, ...]  # see `Unroller`
    keeps_infos: bool = True

    def setup(self, worker_index: int, generation: int, cpu: int | None = None) -> "Setup":
        """Returns what one worker is told when it starts.

        Args:
          worker_index: index of the worker in the run.
          generation: number of times that it was started before.
          cpu: processor core to run on; None: any.
        """
        first = worker_index * self.envs_per_worker
        columns = range(first, first + self.envs_per_worker)
        num_columns = self.envs_per_worker * self.num_workers
        # Neither the trainer's seed, nor that of another worker, or of an earlier generation.
        key = (1, worker_index, self.first_generation + generation)
        return Setup(
            plan=self,
            worker_index=worker_index,
            seed=int(np.random.SeedSequence(self.seed, spawn_key=key).generate_state(1)[0] >> 1),
            first_env_id=first,
            starts=[0 if generation else self.stepping.stagger * column // num_columns for column in columns],
            cpu=cpu,
        )


class Setup(NamedTuple):
    """What a worker is told when it starts."""

    plan: Plan
    worker_index: int
    seed: int
    first_env_id: int
    starts: list[int]  # vector steps after which each environment's first episode is broken off; 0: never
    cpu: int | None


# From the trainer.


class Grant(NamedTuple):
    """A slot is the worker's, until it tells of the `Segment` there."""

    slot: int
    at_random: bool  # act by the algorithm's `random_action`
    publication: int | None  # of the weights to act with; None: the newest


# From a worker.


class Started(NamedTuple):
    """Environments are built and reset."""

    num_envs: int


class Seconds(NamedTuple):
    """What a worker spent on a segment."""

    wait: float  # for the slot
    env: float
    policy: float
    copy: float  # into the slot


class Segment(NamedTuple):
    """A slot is filled, and the trainer's again."""

    worker_index: int
    slot: int
    sequence: int  # how many the process filled before
    version: int  # of the weights, as `Unroller.policy_version` counts
    num_arrivals: int  # S of its `StepRecords`
    infos: list[tuple[int, dict[str, Any]]]  # of its `StepRecords`
    seconds: Seconds


class EnvironmentReplaced(NamedTuple):
    """An environment failed and is built anew; the worker goes on."""

    env_id: int
    traceback: str


class EnvironmentFailed(NamedTuple):
    """The worker ends with its environments; another one may do better."""

    traceback: str


class Failed(NamedTuple):
    """The worker ends with what another one would run into as well."""

    traceback: str


class Refused(NamedTuple):
    """The worker ends, because the user has to mend something."""

    sentence: str


# From `Workers` itself.


class Died(NamedTuple):
    """The worker's process has ended, and has said nothing after this."""


FromWorker: TypeAlias = Started | Segment | EnvironmentReplaced | EnvironmentFailed | Failed | Refused | Died
