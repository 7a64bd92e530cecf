"""Environments whose right answer is known, beside those of `alfish.environments.toy`."""

import os
import time
from typing import Any, Literal

import gin
import gymnasium
import numpy as np
from gymnasium import spaces

from alfish.parameters import PositiveInt, checked
from benchmarks.delayed import Stamped as Stamped


@gin.configurable(module="toys")
@checked
class Bandit(gymnasium.Env):
    """The action must match the observation: reward 1 - |action - target| / scale. The best return is `length`.

    Args:
      action: kind of action: 'discrete' (4 arms), 'box' (a number in [-2, 6]), 'multi_discrete' or 'multi_binary'.
      length: number of actions per episode.
    """

    def __init__(
        self, action: Literal["discrete", "box", "multi_discrete", "multi_binary"] = "discrete", length: PositiveInt = 4
    ):
        spaces_of = {
            "discrete": spaces.Discrete(4, start=-1),
            "box": spaces.Box(-2, 6, (1,), np.float32),
            "multi_discrete": spaces.MultiDiscrete([4, 4]),
            "multi_binary": spaces.MultiBinary(2),
        }
        self.action_space = spaces_of[action]
        self.observation_space = spaces.Box(0, 1, (4,), np.float32)
        self._kind, self._length, self._step, self._target = action, length, 0, 0

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self._step = 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self._step += 1
        target = self._target
        if self._kind == "discrete":
            reward = float(action + 1 == target)
        elif self._kind == "box":
            reward = 1 - abs(float(np.asarray(action).reshape(-1)[0]) - target) / 4
        elif self._kind == "multi_discrete":
            reward = float(np.mean(np.asarray(action) == [target, 3 - target]))
        else:
            reward = float(np.mean(np.asarray(action) == [target // 2, target % 2]))
        return self._observe(), reward, self._step >= self._length, False, {}

    def _observe(self) -> np.ndarray:
        self._target = int(self.np_random.integers(4))
        return np.eye(4, dtype=np.float32)[self._target]


@gin.configurable(module="toys")
@checked
class NestedBandit(gymnasium.Env):
    """A bandit with the observation Dict(image, vector, Discrete). The best return is `length`.

    The image is bright in its left or right half. Each part of the action must match one part of the observation.

    Args:
      nested_action: whether the action is a Dict of a Discrete, a Tuple of a Box and a MultiBinary, instead of a
        MultiDiscrete.
      image_size: height and width of the image.
      length: number of actions per episode.
    """

    def __init__(self, nested_action: bool = False, image_size: PositiveInt = 36, length: PositiveInt = 4):
        self.observation_space = spaces.Dict(
            image=spaces.Box(0, 255, (image_size, image_size, 1), np.uint8),
            vector=spaces.Box(-1, 1, (2,), np.float64),
            digit=spaces.Discrete(3, start=2),
        )
        parts = spaces.Tuple([spaces.Box(-3, 1, (2,), np.float32), spaces.MultiBinary(2)])
        nested = spaces.Dict(choice=spaces.Discrete(3, start=1), parts=parts)
        self.action_space = nested if nested_action else spaces.MultiDiscrete([2, 2, 3])
        self._nested, self._size, self._length = nested_action, image_size, length
        self._step, self._hidden = 0, (0, 0, 0)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        super().reset(seed=seed)
        self._step = 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[dict, float, bool, bool, dict]:
        self._step += 1
        side, sign, digit = self._hidden
        if self._nested:
            right = [
                float(action["choice"] - 1 == digit),
                1 - abs(float(action["parts"][0][0]) - (2 * sign - 2)) / 4,  # target, -2 or 0
                float(action["parts"][1][0] == side),
            ]
        else:
            right = [float(a == b) for a, b in zip(action, self._hidden)]
        return self._observe(), float(np.mean(right)), self._step >= self._length, False, {}

    def _observe(self) -> dict:
        side, sign, digit = (int(self.np_random.integers(n)) for n in (2, 2, 3))
        self._hidden = side, sign, digit
        image = np.zeros((self._size, self._size, 1), np.uint8)
        half = self._size // 2
        image[:, half * side : half * (side + 1)] = 255
        return {"image": image, "vector": np.array([2 * sign - 1, 0.0]), "digit": np.int64(digit + 2)}


@gin.configurable(module="toys")
@checked
class OneState(gymnasium.Env):
    """One state with reward 1 per step and value 1 / (1 - gamma); episodes are truncated after `length` actions."""

    def __init__(self, length: PositiveInt = 7):
        self.observation_space = spaces.Box(1, 1, (1,), np.float32)
        self.action_space = spaces.Discrete(2)
        self._length, self._step = length, 0

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self._step = 0
        return np.ones(1, np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self._step += 1
        return np.ones(1, np.float32), 1.0, False, self._step >= self._length, {}


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
