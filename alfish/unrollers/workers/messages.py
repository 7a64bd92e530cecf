"""What the trainer and a worker tell one another: a `Setup` when it starts, and then messages over a `Channel`."""

from typing import Any, NamedTuple, TypeAlias

from alfish.unrollers.workers.pickling import EnvironmentMaker


class Setup(NamedTuple):
    """What a worker is told when it starts."""

    worker_index: int
    make_environment: EnvironmentMaker
    num_envs: int | None  # None: as many as the factory makes
    seed: int
    first_env_id: int
    starts: list[int]  # vector steps after which each environment's first episode is broken off; 0: never
    modules: bytes  # the algorithm and the transforms
    forms: list  # shape and dtype of each leaf of a segment
    num_slots: int  # of all workers
    length: int  # rows a segment
    step_interval: float  # seconds
    numpy_policy: int | None
    overwrites: bool
    keeps_infos: bool
    shown: tuple[str, ...]  # see `Unroller`
    tolerates_errors: bool
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
