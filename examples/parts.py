"""A metric, a transform and a listener of your own; parts_cartpole.gin adds them to a run of PPO."""

from typing import Any

import gin
import numpy as np
import torch
from gymnasium import spaces

from alfish.data import TimeStep
from alfish.metrics import Metric
from alfish.metrics.step_batch import StepBatch
from alfish.nest import Nest
from alfish.training.listener import Listener, Report, Run
from alfish.transforms import Transform


@gin.configurable
class LargestReward(Metric):
    """The largest reward so far. Metrics receive raw rows, `[T, B]`, without transforms."""

    name = "largest_reward"

    def __init__(self) -> None:
        self._largest = -np.inf

    def update(self, rows: StepBatch) -> None:
        self._largest = max(self._largest, rows.reward[rows.arrived].max(initial=-np.inf))

    def result(self) -> dict[str, float]:
        return {self.name: float(self._largest)} if np.isfinite(self._largest) else {}

    def state_dict(self) -> dict[str, Any]:
        return {"largest": float(self._largest)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._largest = state["largest"]


@gin.configurable
class Squares(Transform):
    """Appends the squares of a vector's entries. A transform that changes the observation also changes its spec."""

    def __init__(self, observation_spec: spaces.Box, reward_spec: spaces.Box):
        super().__init__(observation_spec, reward_spec)
        self.observation_spec = spaces.Box(-np.inf, np.inf, (2 * observation_spec.shape[0],), np.float32)

    def transform(self, time_step: TimeStep, state: Nest) -> TimeStep:
        observation = time_step.observation  # [B, D] while acting, [T, N, D] in training; never in place
        return time_step._replace(observation=torch.cat([observation, observation.square()], -1))


@gin.configurable
class Announce(Listener):
    """Logs a line when training episodes first last `length` steps on average."""

    def __init__(self, length: float = 100.0):
        self._length, self._said = length, False

    def after_iteration(self, run: Run, report: Report) -> None:
        if not self._said and report.scalars.get("metrics/average_episode_length", 0) >= self._length:
            self._said = True
            run.log(f"Episodes are {self._length:.0f} steps long after {report.env_steps:,} steps")

    def state_dict(self) -> dict[str, Any]:
        return {"said": self._said}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._said = state["said"]
