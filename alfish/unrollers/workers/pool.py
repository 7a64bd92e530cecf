"""Worker processes of this machine, with which the trainer shares segments and weights as tensors."""

import os
from collections.abc import Sequence
from typing import Any, Literal

import gin
import torch

from alfish.data import Experience
from alfish.errors import UsageError
from alfish.parameters import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, checked
from alfish.processes.messages import Plan, Segment
from alfish.processes.pool import Limits, Pool
from alfish.unrollers.unroller import StepRecords
from alfish.unrollers.workers.shared_tensors import Form, SharedWeights
from alfish.unrollers.workers.slots import Slots
from alfish.unrollers.workers.transport import Transport


@gin.configurable(module="alfish.unrollers")
@checked
class Workers(Pool, Transport):
    """Pool of worker processes on this machine.

    Receives messages of workers, kills workers that hang, and restarts workers that have died.

    Args:
      count: number of workers.
      start_timeout: seconds for imports, building environments and their first reset.
      step_timeout: seconds for one vector step, for one call of the policy, and for the answer to a grant.
      close_timeout: seconds for closing environments at the end.
      max_deaths: deaths within `death_window` that are answered by a restart; `on_failure` answers the next one. The
        end of the process that forks workers, and of all workers with it, counts as one.
      death_window: seconds.
      on_failure: 'raise' ends the run; 'shrink' continues with the other workers.
      cpus: processor cores to pin workers to, in turn; None: workers are not pinned.
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
                f"Workers.cpus names the core {away[0]}, and this process may run on the cores {sorted(here)} only; "
                "name those, or leave it out"
            )
        self._slots, self._weights = Slots(forms, plan.num_slots, structure), SharedWeights(tensors)
        self.publish(version)
        header, weights = self._weights.fds
        self.launch(plan, {"slots": self._slots.fd, "weights_header": header, "weights": weights})

    def publish(self, version: int) -> None:
        self._weights.publish(version)

    def read(self, segment: Segment) -> tuple[Experience, StepRecords]:
        return self._slots.read(segment)
