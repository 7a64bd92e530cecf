"""Metrics of single environment steps, which do not need whole episodes."""

from typing import Any

import gin
import numpy as np

from alfish.metrics.episode_sums import StepSums
from alfish.metrics.metric import Metric, MovingWindow
from alfish.metrics.step_batch import StepBatch
from alfish.parameters import PositiveInt, checked


@gin.configurable(module="alfish.metrics")
@checked
class EnvironmentSteps(Metric):
    """Number of environment steps since training began."""

    num_rewards = 0

    def __init__(self, name: str = "environment_steps"):
        self.name = name
        self._count = 0

    def update(self, rows: StepBatch) -> None:
        self._count += int(np.count_nonzero(rows.arrived))

    def add(self, sums: StepSums) -> None:
        self._count += sums.num_steps

    def result(self) -> dict[str, float]:
        return {self.name: float(self._count)}

    def state_dict(self) -> dict[str, Any]:
        return {"count": self._count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._count = state["count"]


@gin.configurable(module="alfish.metrics")
@checked
class AverageReward(Metric):
    """Mean reward of the last `window` steps of all environments; for vector rewards, also the mean of each entry."""

    def __init__(self, window: PositiveInt = 10_000, name: str = "average_reward"):
        self.name = name
        self._size, self._window = window, MovingWindow(window)
        self._by_objective: dict[str, MovingWindow] = {}

    def update(self, rows: StepBatch) -> None:
        self._window.extend(rows.reward[rows.arrived])
        for name, own in rows.by_objective.items():
            self._by_objective.setdefault(name, MovingWindow(self._size)).extend(own.reward[rows.arrived])

    @property
    def num_rewards(self) -> int:
        """Number of newest rewards that `add` reads."""
        return self._size

    def add(self, sums: StepSums) -> None:
        self._window.extend(sums.rewards[-self._size :])

    def windows(self) -> dict[str, MovingWindow]:
        return {self.name: self._window, **{f"{self.name}/{name}": own for name, own in self._by_objective.items()}}

    def result(self) -> dict[str, float]:
        result: dict[str, float] = {}
        for name, window in self.windows().items():
            result |= window.result(name)
        return result

    def state_dict(self) -> dict[str, Any]:
        state = self._window.state_dict()
        if self._by_objective:
            state["by_objective"] = {name: window.state_dict() for name, window in self._by_objective.items()}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._window.load_state_dict(state)
        self._by_objective = {name: MovingWindow(self._size) for name in state.get("by_objective", {})}
        for name, window in self._by_objective.items():
            window.load_state_dict(state["by_objective"][name])
