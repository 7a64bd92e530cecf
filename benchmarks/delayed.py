"""Environments with slow steps."""

import math
import time
from typing import Any

import gin
import gymnasium
import numpy as np
from gymnasium import spaces

from alfish.environments.toy import Catch
from alfish.parameters import NonNegativeFloat, PositiveInt, checked


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


def unequal(env_id: str, seconds: float) -> gymnasium.Env:
    """Returns an environment whose steps wait for log-normal times with this mean, sigma 1."""
    return Delayed(gymnasium.make(env_id), seconds, 1.0)


def slow_frames(seconds: float) -> gymnasium.Env:
    """Returns an environment with frames of 84 x 84 bytes whose steps all wait for this time."""
    return Delayed(Catch(rows=12, columns=12, scale=7), seconds, 0.0)


@gin.configurable(module="benchmarks.delayed")
@checked
class Stamped(gymnasium.Env):
    """Observations are (env, episode, step), so that a lost, duplicated or shifted row can be detected.

    Step k of an episode has reward k. The number of the environment is drawn from the seed; episodes count up from 0.

    Args:
      lengths: numbers of actions of successive episodes, repeated cyclically.
      truncates: whether episodes end by truncation instead of termination.
      seconds: duration of a step.
    """

    def __init__(
        self, lengths: tuple[PositiveInt, ...] = (3, 5, 1, 8), truncates: bool = False, seconds: NonNegativeFloat = 0
    ):
        self.observation_space = spaces.Box(0, 2**31, (3,), np.float32)
        self.action_space = spaces.Discrete(3)
        self._lengths, self._truncates, self._seconds = lengths, truncates, seconds
        self._stamp, self._episode, self._step = -1, -1, 0

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        if self._stamp < 0:
            self._stamp = int(self.np_random.integers(1 << 20))
        self._episode, self._step = self._episode + 1, 0
        return self._observation(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        if self._seconds:
            time.sleep(self._seconds)
        self._step += 1
        ends = self._step >= self._lengths[self._episode % len(self._lengths)]
        info = {"episode": self._episode, "note": "text"}
        return self._observation(), float(self._step), ends and not self._truncates, ends and self._truncates, info

    def _observation(self) -> np.ndarray:
        return np.array([self._stamp, self._episode, self._step], np.float32)
