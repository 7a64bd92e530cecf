"""The interface between `AsyncUnroller` and worker processes, and its implementation on one machine."""

import abc
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import gin
import torch
from absl import logging

from alfish.errors import UsageError
from alfish.parameters import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, checked
from alfish.processes.messages import FromWorker, Grant, Plan, Segment
from alfish.processes.pool import Limits, Pool
from alfish.unrollers.workers.shared_tensors import Form, SharedWeights
from alfish.unrollers.workers.slots import PolicyRows, Slots


class Transport(abc.ABC):
    """Starts and supervises workers, sends them grants and weights, and receives their segments.

    `AsyncUnroller` decides which slots are granted and which segments are taken; a transport only carries them.

    Attributes:
      all: all workers, by index. Each has an `index` in the run, and a `generation`, the number of its earlier
        processes.
      num_left: number of workers that run or will be restarted.
      num_restarts: number of restarts.
      place: text for the log that says where the workers run, such as 'on this machine'.
      shrinks: setting that allows the run to continue without some workers; '' if the run needs all workers.
      newest: number of the newest publication of weights, see `Grant.publication`.
      log: function that receives lines for the user.
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
          structure: structure of these leaves, see `Slots`.
          tensors: tensors of the weights. `publish` copies their values.
          version: `policy_version` of the tensors' current values.
        """

    @abc.abstractmethod
    def publish(self, version: int) -> None:
        """Publishes the current weights as `version`, which segments made with these weights report."""

    @abc.abstractmethod
    def grant(self, worker: Any, grant: Grant) -> bool:
        """Grants a slot to a worker. Returns False if the worker has not started, or has ended."""

    def send(self) -> None:
        """Sends the grants that `grant` has collected. Default: does nothing, because `grant` sends at once."""

    @abc.abstractmethod
    def wait(self, timeout: float) -> Iterator[tuple[Any, FromWorker]]:
        """Yields messages of workers; waits for at most `timeout` seconds if there are none.

        `Died` is the last message of a process. This method also restarts workers whose restart is due.

        Raises:
          RunError: a worker failed in a way that a restart cannot repair, or too many workers died.
          UsageError: a worker refused its environment or settings.
        """

    @abc.abstractmethod
    def read(self, segment: Segment) -> list[PolicyRows]:
        """Returns rows and records of each policy in a segment as views, valid until its slot is granted again.

        Call this once for each segment, and do not write to the views.
        """

    @abc.abstractmethod
    def activities(self) -> str:
        """Returns a clause about what each worker is doing."""

    @abc.abstractmethod
    def close(self) -> None:
        """Ends all workers at the same time."""


@gin.configurable(module="alfish.unrollers")
@checked
class Workers(Pool, Transport):
    """Pool of worker processes on this machine.

    Receives messages of workers, kills workers that hang, and restarts workers that have died.

    Args:
      count: number of workers.
      start_timeout: maximum time in seconds for the imports, and for building and first resetting the environments.
      step_timeout: maximum time in seconds for one vector step, for one call of the policy, and for the answer to a
        grant.
      close_timeout: maximum time in seconds for closing the environments at the end.
      max_deaths: largest number of deaths within `death_window` for which workers are restarted; `on_failure` applies
        to a further death. If the process that forks workers ends, all workers end; this counts as one death.
      death_window: seconds of the window in which deaths are counted.
      on_failure: action after more than `max_deaths` deaths: 'raise' ends the run; 'shrink' continues with the other
        workers.
      cpus: indices of the processor cores to which workers are pinned in turn, such as [0, 1]; None means no pinning.
    """

    # Set by `start`.
    _slots: Slots
    _weights: SharedWeights

    def __init__(
        self,
        count: PositiveInt,
        *,
        start_timeout: PositiveFloat = 300.0,
        step_timeout: PositiveFloat = 60.0,
        close_timeout: NonNegativeFloat = 5.0,
        max_deaths: NonNegativeInt = 5,
        death_window: PositiveFloat = 600.0,
        on_failure: Literal["raise", "shrink"] = "raise",
        cpus: Sequence[NonNegativeInt] | None = None,
    ):
        limits = start_timeout, step_timeout, close_timeout, max_deaths, death_window, on_failure, cpus
        super().__init__(count, Limits(*limits))

    @property
    def newest(self) -> int:
        return self._weights.newest

    def start(
        self, plan: Plan, forms: list[Form], structure: Any, tensors: Sequence[torch.Tensor], version: int
    ) -> None:
        cpus = self.limits.cpus or ()
        here = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(cpus)
        if away := sorted(set(cpus) - here):
            raise UsageError(
                f"Workers.cpus has the core {away[0]}, but this process may run only on the cores {sorted(here)}; list "
                "only these cores, or leave cpus out"
            )
        self._slots, self._weights = Slots(forms, plan.num_slots, structure), SharedWeights(tensors)
        self.publish(version)
        header, weights = self._weights.fds
        self.launch(plan, {"slots": self._slots.fd, "weights_header": header, "weights": weights})

    def publish(self, version: int) -> None:
        self._weights.publish(version)

    def read(self, segment: Segment) -> list[PolicyRows]:
        return self._slots.read(segment)
