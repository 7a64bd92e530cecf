"""Environments with slow steps."""

import math
import time
from typing import Any

import gymnasium


class Delayed(gymnasium.Wrapper):
    """Environment whose steps wait for log-normal times, without work for the processor.

    Args:
      env: to wrap.
      mean: seconds a step.
      sigma: of the logarithm.
    """

    def __init__(self, env: gymnasium.Env, mean: float = 0.002, sigma: float = 0.5):
        super().__init__(env)
        self._mu, self._sigma = math.log(mean) - sigma**2 / 2, sigma

    def step(self, action: Any) -> Any:
        time.sleep(self.env.unwrapped.np_random.lognormal(self._mu, self._sigma))
        return self.env.step(action)
