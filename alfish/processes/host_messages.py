"""Messages between the trainer and a host: arguments and results of the methods of `Host`."""

import importlib.metadata
import os
import platform
import socket
from typing import NamedTuple

import numpy as np

import alfish
from alfish.processes.messages import FromWorker, Grant, Plan
from alfish.processes.pool import Limits


class Greeting(NamedTuple):
    """A host has a process."""

    machine: str  # name of its machine
    pid: int
    versions: dict[str, str]  # of the packages that must be those of the trainer


class Publication(NamedTuple):
    """Numbers of one publication of the weights. Their values travel beside it, as `[weight_words]` int64."""

    number: int  # see `Grant.publication`; the same on all machines
    version: int  # `policy_version`


class HostPlan(NamedTuple):
    """All that hosts share."""

    num_workers: int  # of a host
    limits: Limits
    plan: Plan  # of the run
    weight_words: int  # length of the weights in words of 8 bytes
    patience: float  # seconds without a call of the trainer, after which a host ends itself


class Order(NamedTuple):
    """A grant to one process of a host."""

    worker_index: int  # in the host
    generation: int  # of the process in the host; a successor does not receive the grant
    grant: Grant  # with a slot of the host


class Event(NamedTuple):
    """A message of a worker."""

    worker_index: int  # in the host
    message: FromWorker
    words: np.ndarray | None = None  # of a `Segment`: its slot `[slot_words]` int64


class Reply(NamedTuple):
    """All that happened in a host since the reply before."""

    events: list[Event]
    lines: list[str]  # for the user
    newest: int  # number of the newest publication that workers can read


class Refusal(NamedTuple):
    """The host ends, because one of its workers has failed in a way that a restart cannot mend."""

    text: str
    by_user: bool  # the user has to correct a mistake
    missing: str = ""  # the module that could not be imported
    trace: str = ""  # traceback of an error of code outside alfish


def versions() -> dict[str, str]:
    """Returns versions that must be equal on all machines, because pickles and the policy's numbers depend on them."""
    torch = importlib.metadata.version("torch").partition("+")[0]  # without its import
    python = ".".join(platform.python_version_tuple()[:2])
    return {"Python": python, "alfish": alfish.__version__, "torch": torch}


def greeting() -> Greeting:
    """Returns the greeting of this process."""
    return Greeting(socket.gethostname(), os.getpid(), versions())
