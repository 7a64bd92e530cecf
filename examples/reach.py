"""An environment of your own: a point on a line that has to reach a target."""

import gin
import gymnasium
import numpy as np
from gymnasium import spaces


@gin.configurable
class Reach(gymnasium.Env):
    """A point moves by at most 0.1 a step, and pays its distance from the target until it is there."""

    def __init__(self, length: float = 1.0):
        self.observation_space = spaces.Box(-length, length, (2,), np.float32)  # position and target
        self.action_space = spaces.Box(-0.1, 0.1, (1,), np.float32)
        self._length = length

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)  # makes self.np_random
        self._state = self.np_random.uniform(-self._length, self._length, 2).astype(np.float32)
        return self._state.copy(), {}

    def step(self, action):
        self._state[0] = np.clip(self._state[0] + action[0], -self._length, self._length)
        distance = abs(float(self._state[0] - self._state[1]))
        terminated = distance < 0.05  # the end of the task; a time limit is not one
        return self._state.copy(), -distance, terminated, False, {}
