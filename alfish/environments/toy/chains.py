"""Episodes in which states follow each other in a known order."""

from typing import Annotated, Any

import gin
import gymnasium
import numpy as np
from gymnasium import spaces

from alfish.parameters import PositiveInt, Range, checked


@gin.configurable(module="alfish.environments.toy")
@checked
class Stamped(gymnasium.Env):
    """Observations are (env, episode, step), which reveal each row that was lost, doubled or shifted.

    Step k of an episode has reward k. The env stamp is drawn from the seed; episodes count from 0.

    Args:
      lengths: numbers of actions of the episodes, taken in turn.
      truncates: True: episodes end by truncation; False: by termination.
    """

    def __init__(self, lengths: tuple[PositiveInt, ...] = (3, 5, 1, 8), truncates: bool = False):
        self.observation_space = spaces.Box(0, 2**31, (3,), np.float32)
        self.action_space = spaces.Discrete(3)
        self._lengths, self._truncates = lengths, truncates
        self._stamp, self._episode, self._step = -1, -1, 0

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        if self._stamp < 0:
            self._stamp = int(self.np_random.integers(1 << 20))
        self._episode, self._step = self._episode + 1, 0
        return self._observation(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self._step += 1
        ends = self._step >= self._lengths[self._episode % len(self._lengths)]
        info = {"episode": self._episode, "note": "text"}
        return self._observation(), float(self._step), ends and not self._truncates, ends and self._truncates, info

    def _observation(self) -> np.ndarray:
        return np.array([self._stamp, self._episode, self._step], np.float32)


@gin.configurable(module="alfish.environments.toy")
@checked
class OneState(gymnasium.Env):
    """One state with reward 1 per step, truncated after `length` actions. Its value is 1 / (1 - gamma)."""

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


@gin.configurable(module="alfish.environments.toy")
@checked
class Corridor(gymnasium.Env):
    """A row of rooms with a reward of 1 in the last one, which random actions practically never reach.

    One action of each room leads to the next room, and the others lead back to the one before. Which one leads on
    differs from room to room, and is the same in all episodes. The observation is the room's one-hot code. The best
    return is 1; a policy that does not explore earns 0.

    Args:
      num_rooms: rooms; an episode ends in the last one.
      num_actions: actions in each room.
      length: actions after which an episode is truncated; None: 3 for each room.
    """

    def __init__(
        self,
        num_rooms: Annotated[int, Range(2)] = 20,
        num_actions: Annotated[int, Range(2)] = 4,
        length: PositiveInt | None = None,
    ):
        self.observation_space = spaces.Box(0, 1, (num_rooms,), np.float32)
        self.action_space = spaces.Discrete(num_actions)
        self._onward = np.random.default_rng(num_rooms).integers(num_actions, size=num_rooms)
        self._length = 3 * num_rooms if length is None else length
        self._step, self._room = 0, 0

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self._step, self._room = 0, 0
        return self._observation(), {"room": 0}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self._step += 1
        self._room = self._room + 1 if action == self._onward[self._room] else max(self._room - 1, 0)
        ends = self._room == len(self._onward) - 1
        return self._observation(), float(ends), ends, self._step >= self._length and not ends, {"room": self._room}

    def _observation(self) -> np.ndarray:
        observation = np.zeros(len(self._onward), np.float32)
        observation[self._room] = 1
        return observation
