"""The interface of `AsyncUnroller` to the processes that collect, wherever they run."""

import abc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from absl import logging

from alfish.data import Experience
from alfish.processes.messages import FromWorker, Grant, Plan, Segment
from alfish.unrollers.unroller import StepRecords
from alfish.unrollers.workers.shared_tensors import Form


class Transport(abc.ABC):
    """Starts and supervises workers, sends them grants and weights, and receives their segments.

    `AsyncUnroller` decides what is granted and taken; a transport only carries it.

    Attributes:
      all: the workers, by index. Each has an `index` in the run and a `generation`, its number of processes before the
        present one.
      num_left: number of workers that run or will be restarted.
      num_restarts: number of restarts.
      place: where the workers run, in words that follow their number.
      shrinks: setting that lets the run continue without some of the workers; empty: it needs all of them.
      newest: number of the newest publication of weights, see `Grant.publication`.
      log: receives lines for the user.
    """

    all: Sequence[Any]
    num_restarts = 0
    place = "on this machine"
    shrinks = ""

    def __init__(self) -> None:
        self.log: Callable[[str], None] = logging.warning

    @property
    @abc.abstractmethod
    def num_left(self) -> int: ...

    @property
    @abc.abstractmethod
    def newest(self) -> int: ...

    @abc.abstractmethod
    def start(
        self, plan: Plan, forms: list[Form], structure: Any, tensors: Sequence[torch.Tensor], version: int
    ) -> None:
        """Starts all workers.

        Args:
          plan: settings that all workers share.
          forms: shape and dtype of each leaf of a slot, see `slot_forms`.
          structure: of these leaves, see `Slots`.
          tensors: the weights. `publish` copies their values.
          version: `policy_version` of the present values.
        """

    @abc.abstractmethod
    def publish(self, version: int) -> None:
        """Publishes the present values of the weights. Segments made with them have this version."""

    @abc.abstractmethod
    def grant(self, worker: Any, grant: Grant) -> bool:
        """Grants a slot to a worker. Returns False if the worker has not started, or has ended."""

    def send(self) -> None:
        """Sends the grants that `grant` has collected. Default: does nothing, because `grant` sends each at once."""

    @abc.abstractmethod
    def wait(self, timeout: float) -> Iterator[tuple[Any, FromWorker]]:
        """Yields messages of workers. Returns when there are some, or after `timeout` seconds.

        `Died` is the last message of a process. Restarts that are due happen here.

        Raises:
          RunError: a worker failed in a way that a restart cannot mend, or too many workers died.
          UsageError: a worker refused its environment or settings.
        """

    @abc.abstractmethod
    def read(self, segment: Segment) -> tuple[Experience, StepRecords]:
        """Returns the rows and the records of a segment, once. They are views, valid until its slot is granted again.

        A caller must not write into them.
        """

    @abc.abstractmethod
    def activities(self) -> str:
        """Returns a clause that says what each worker is doing."""

    @abc.abstractmethod
    def close(self) -> None:
        """Ends all workers at the same time."""
