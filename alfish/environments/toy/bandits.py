"""Tasks in which each action is rewarded immediately, with all kinds of actions and observations."""

from typing import Any, Literal

import gin
import gymnasium
import numpy as np
from gymnasium import spaces

from alfish.errors import UsageError
from alfish.parameters import NonNegativeInt, PositiveInt, checked


@gin.configurable(module="alfish.environments.toy")
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


@gin.configurable(module="alfish.environments.toy")
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


@gin.configurable(module="alfish.environments.toy")
@checked
class MaskedIdentity(gymnasium.Env):
    """The action must be the observed number; at each step, most other actions, newly chosen, are forbidden.

    The number is uniform. `action_masks()` and the info 'action_mask' return the mask, which always allows the right
    action. The best return is `length`; uniform allowed actions return length / (num_actions - num_forbidden).

    Args:
      num_actions: number of actions, n.
      num_forbidden: number of forbidden actions in each step, below n.
      action: kind of action: 'discrete'; 'multi_discrete', two numbers, each with its own mask; 'multi_binary', n bits,
        each of which has only one allowed value with probability num_forbidden / n.
      length: number of actions per episode, which is then truncated.

    Source: InvalidActionEnvDiscrete of sb3-contrib, which also draws a new mask at each step.
    """

    def __init__(
        self,
        num_actions: PositiveInt = 80,
        num_forbidden: NonNegativeInt = 60,
        action: Literal["discrete", "multi_discrete", "multi_binary"] = "discrete",
        length: PositiveInt = 100,
    ):
        if num_forbidden >= num_actions:
            raise UsageError(
                f"MaskedIdentity.num_forbidden is {num_forbidden}; it must be less than its number of actions, "
                f"{num_actions}"
            )
        spaces_of = {
            "discrete": spaces.Discrete(num_actions),
            "multi_discrete": spaces.MultiDiscrete([num_actions] * 2),
            "multi_binary": spaces.MultiBinary(num_actions),
        }
        self.observation_space = self.action_space = spaces_of[action]
        self._kind, self._size, self._num_forbidden, self._length = action, num_actions, num_forbidden, length
        self._step = 0
        self._target: Any = None
        self._mask = np.ones(0, np.int8)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self._step = 0
        return self._observe(), {"action_mask": self._mask}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        self._step += 1
        reward = float(np.mean(np.asarray(action) == self._target))
        return self._observe(), reward, False, self._step >= self._length, {"action_mask": self._mask}

    def action_masks(self) -> np.ndarray:
        return self._mask

    def _observe(self) -> Any:
        if self._kind == "multi_binary":
            self._target = self.np_random.integers(2, size=self._size, dtype=np.int8)
            is_free = self.np_random.random(self._size) * self._size >= self._num_forbidden
            self._mask = np.stack([is_free | (self._target == 0), is_free | (self._target == 1)], -1).reshape(-1)
            return self._target
        targets = self.np_random.integers(self._size, size=1 if self._kind == "discrete" else 2)
        self._mask = np.concatenate([self._allowed(target) for target in targets])
        self._target = targets[0] if self._kind == "discrete" else targets
        return self._target

    def _allowed(self, target: int) -> np.ndarray:
        order = self.np_random.permutation(self._size)
        mask = np.ones(self._size, np.int8)
        mask[order[order != target][: self._num_forbidden]] = 0
        return mask
