"""Scalars that simulators log about the episodes that ended in a step, see `environments.SimulatorStep.log`."""

from typing import Any

import gin
import numpy as np
import torch

from alfish.metrics.metric import Metric, MovingWindow
from alfish.metrics.step_batch import StepBatch
from alfish.parameters import PositiveInt, checked


@gin.configurable(module="alfish.metrics")
@checked
class SimulatorLog(Metric):
    """Means of logged numbers over the steps that logged them, one scalar per key: `simulator/Episode_Reward/track`.

    Only single numbers are read; `EnvInfo` reads values with one number for each environment.

    Args:
      window: number of latest values of a key in the mean.
      name: first part of the results' names.
    """

    reads_infos = True

    def __init__(self, window: PositiveInt = 100, name: str = "simulator"):
        self.name, self._size = name, window
        self._windows: dict[str, MovingWindow] = {}

    def update(self, rows: StepBatch) -> None:
        found: dict[str, list[float]] = {}
        for _, info in rows.infos:
            for key, value in info.items():
                if isinstance(value, (int, float, np.number, np.ndarray, torch.Tensor)) and np.ndim(value) == 0:
                    found.setdefault(str(key).strip("/"), []).append(float(value))
        for key, values in found.items():
            self._windows.setdefault(key, MovingWindow(self._size)).extend(np.array(values))

    def result(self) -> dict[str, float]:
        result: dict[str, float] = {}
        for key in sorted(self._windows):
            result |= self._windows[key].result(f"{self.name}/{key}")
        return result

    def state_dict(self) -> dict[str, Any]:
        return {key: window.state_dict() for key, window in self._windows.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._windows = {}
        for key, window_state in state.items():
            self._windows[key] = MovingWindow(self._size)
            self._windows[key].load_state_dict(window_state)
