"""A task of your own: hold the level of the lower of two tanks by a pump that fills the upper one."""

import gymnasium
import numpy as np
from gymnasium import spaces


class Tanks(gymnasium.Env):
    """Water runs from a pump into an upper tank, from there into a lower one, and out; levels are in cm."""

    def __init__(self):
        self.observation_space = spaces.Box(0, 60, (3,), np.float32)  # upper level, lower level, target
        self.action_space = spaces.Box(0, 1, (1,), np.float32)  # voltage of the pump, as a fraction of its largest

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)  # makes self.np_random
        self._levels = self.np_random.uniform(0, 30, 2)
        self._target = self.np_random.uniform(10, 40)
        self._num_steps = 0
        return self._observation(), {}

    def step(self, action):
        inflow = 4.0 * float(action[0])
        upper, lower = 0.5 * np.sqrt(self._levels)  # outflow of each tank, cm a step
        self._levels = np.clip(self._levels + [inflow - upper, upper - lower], 0, 60)
        self._num_steps += 1
        error = abs(self._levels[1] - self._target)
        truncated = self._num_steps >= 200  # time is up; terminated stays False, because the task has no end
        return self._observation(), -error / 10, False, truncated, {}

    def _observation(self):
        return np.array([*self._levels, self._target], np.float32)
