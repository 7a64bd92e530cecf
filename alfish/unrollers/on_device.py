"""The unroller of environments on a GPU that train off-policy: it does not wait for the GPU."""

from typing import Any

import gin

from alfish import host, nest
from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.data import Ends, TimeStep
from alfish.environments import Environment
from alfish.errors import UsageError
from alfish.parameters import checked
from alfish.transforms import Transforms
from alfish.unrollers import rollouts
from alfish.unrollers.sync import Arrival, SyncUnroller
from alfish.unrollers.unroller import StepRecords


@gin.configurable(module="alfish.unrollers")
@checked
class DeviceUnroller(SyncUnroller):
    """`SyncUnroller` whose records arrive one unroll later, so that an off-policy iteration does not wait for a GPU.

    Rows are those of `SyncUnroller`. Metrics do not count the last unroll until the next one, or until the end of the
    run. A row that is not finite ends the run one unroll later. In checkpoints, the records that have not arrived lack
    their infos.

    Args:
      environment, algorithm, transforms: parts of the run, see `Unroller`; the environment resets in the same step.

    Raises:
      UsageError: the algorithm is on-policy, or the environment does not reset in the same step.
    """

    def __init__(self, environment: Environment, algorithm: RLAlgorithm, transforms: Transforms):
        super().__init__(environment, algorithm, transforms, numpy_policy=None)
        if algorithm.on_policy or not self.environment.uneven:
            raise UsageError(
                "DeviceUnroller is for off-policy algorithms in environments that reset in the same step, such as "
                f"simulators, not for {type(algorithm).__name__} in {environment.name}; bind Trainer.unroller = "
                "@SyncUnroller"
            )
        self._waiting: Any = None  # function that returns the `Arrival` of the last unroll
        self._length = 0

    @property
    def num_steps(self) -> int:
        return self._length * self.num_envs

    def late_records(self) -> StepRecords | None:
        if self._waiting is None:
            return None
        self._arrive(self._waiting())
        self._waiting = None
        return self.records  # type: ignore[return-value]

    def _record(self, rows: TimeStep, newest: TimeStep | None, ends: Ends | None, unseen: bool, infos: Any) -> None:
        """Sets `records` to those of the previous unroll, and begins to read those of this unroll."""
        assert ends is not None
        checked_rows = [rows, ends.time_step]
        signs = list(map(self._sign, checked_rows)), self.environment.sign
        read = host.read_later((rollouts.recorded(rows, newest, ends, self.shown), *signs))
        self.records, self._signs = None, []
        self.late_records()
        self._waiting, self._length = lambda: Arrival(read(), checked_rows, unseen, infos), len(rows.step_type)

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        if self._waiting is not None:
            arrival = self._waiting()
            state["arrival"] = nest.plain(nest.tensors(arrival.read[0])), arrival.unseen
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if "arrival" in state:
            found, unseen = state["arrival"]
            self._waiting = lambda: Arrival((nest.arrays(found), [], None), [], unseen, [])
