"""Environments with slow steps."""

import math
import time
from typing import Any

import gymnasium

from alfish.environments.toy import Catch, Stamped


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


def slow(env_id: str, seconds: float) -> gymnasium.Env:
    """Returns an environment whose steps all wait for this time."""
    return Delayed(gymnasium.make(env_id), seconds, 0.0)


def slow_frames(seconds: float) -> gymnasium.Env:
    """Returns an environment with frames of 84 x 84 bytes whose steps all wait for this time."""
    return Delayed(Catch(rows=12, columns=12, scale=7), seconds, 0.0)


class SleepingStamped(Stamped):
    """`Stamped` whose steps wait.

    Args:
      seconds: of a step.
    """

    def __init__(self, seconds: float):
        super().__init__((30, 50, 10, 80))
        self._seconds = seconds

    def step(self, action: Any) -> Any:
        time.sleep(self._seconds)
        return super().step(action)
