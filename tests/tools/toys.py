"""Environments whose right answer is known, beside those of `alfish.environments.toy`."""

import os
import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from alfish.environments.toy import Stamped


class TwoLengths(gymnasium.Env):
    """Episodes of 10 or 500 actions with equal odds: their mean length is 255, unless short ones are counted first."""

    def __init__(self) -> None:
        self.observation_space = spaces.Box(0, 1, (1,), np.float32)
        self.action_space = spaces.Discrete(2)
        self._length, self._step = 0, 0

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self._length, self._step = (10 if self.np_random.random() < 0.5 else 500), 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self._step += 1
        return np.zeros(1, np.float32), 1.0, self._step >= self._length, False, {}


class SlowSecond(Stamped):
    """Takes 20 ms a step in workers of the second learner."""

    def step(self, action):
        time.sleep(0.02 * (os.environ["RANK"] == "1"))
        return super().step(action)
