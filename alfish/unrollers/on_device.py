"""The unroller for off-policy training in environments on a GPU, without waits for records."""

from typing import Any

import gin
import torch

from alfish import host, nest
from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.data import Ends, TimeStep
from alfish.environments import Environment
from alfish.errors import RunError, UsageError
from alfish.parameters import checked
from alfish.transforms import Transforms
from alfish.unrollers.sync import Arrival, SyncUnroller
from alfish.unrollers.unroller import StepRecords


@gin.configurable(module="alfish.unrollers")
@checked
class DeviceUnroller(SyncUnroller):
    """`SyncUnroller` whose records arrive one unroll later, so that an off-policy iteration does not wait for them.

    Rows are those of `SyncUnroller`. Metrics do not count an unroll until the next unroll, or until the end of the run.
    A row that is not finite ends the run one unroll later. No checkpoint is saved then, because replay already contains
    the row. In checkpoints, the records that have not arrived lack their infos.

    Args:
      environment, algorithm, transforms: parts of the run, see `Unroller`; the environment returns tensors, and resets
        in the same step.

    Raises:
      UsageError: the algorithm is on-policy, or the environment returns arrays or does not reset in the same step.
    """

    def __init__(self, environment: Environment, algorithm: RLAlgorithm, transforms: Transforms):
        super().__init__(environment, algorithm, transforms, numpy_policy=None)
        has_tensors = isinstance(self.environment.convert(torch.zeros(1)), torch.Tensor)
        if algorithm.on_policy or not self.environment.uneven or not has_tensors:
            raise UsageError(
                "DeviceUnroller is for off-policy algorithms in environments of tensors that reset in the same step, "
                f"such as simulators, not for {type(algorithm).__name__} in {environment.name}; bind "
                "Trainer.unroller = @SyncUnroller"
            )
        self._waiting: Any = None  # function that returns the `Arrival` of the last unroll
        self._num_steps, self._resets_next = 0, False

    @property
    def num_steps(self) -> int:
        return self._num_steps

    def late_records(self) -> StepRecords | None:
        if self._waiting is None:
            return None
        self._arrive(self._waiting())
        self._waiting = None
        for rows, sign in self._signs:
            self._check(rows, sign)
        self._signs = []
        return self.records  # type: ignore[return-value]

    def truncate_episodes(self) -> None:
        super().truncate_episodes()
        self._resets_next = self.time_step is not None

    def _record(self, rows: TimeStep, newest: TimeStep | None, ends: Ends | None, unseen: bool, infos: Any) -> None:
        """Sets `records` to those of the previous unroll, and begins to read those of this unroll."""
        given, checked_rows = self._given(rows, newest, ends)
        read = host.read_later(given)
        self.records = None
        self.late_records()
        self._waiting = lambda: Arrival(read(), checked_rows, unseen, infos)
        # A step in which all environments reset is no environment step.
        self._num_steps = (len(rows.step_type) - self._resets_next) * self.num_envs
        self._resets_next = False

    def _check(self, time_step: TimeStep, sign: float) -> None:
        try:
            super()._check(time_step, sign)
        except RunError:
            self.may_save = False
            raise

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        if self._waiting is not None:
            arrival = self._waiting()
            for rows, sign in zip(arrival.checked, arrival.read[1]):
                self._check(rows, sign)
            state["arrival"] = nest.plain(nest.tensors(arrival.read[0])), arrival.unseen
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if "arrival" in state:
            found, unseen = state["arrival"]
            self._waiting = lambda: Arrival((nest.arrays(found), [], None), [], unseen, [])
