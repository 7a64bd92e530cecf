"""Environments that need exploration or a memory."""

from typing import Annotated, Any, Literal

import gin
import gymnasium
import numpy as np
from gymnasium import spaces

from alfish.parameters import NonNegativeInt, PositiveInt, Range, checked


@gin.configurable(module="alfish.environments.toy")
@checked
class Corridor(gymnasium.Env):
    """A row of rooms with reward 1 in the last room, which random actions almost never reach.

    In each room, one action leads to the next room, and the other actions lead back to the previous room. The correct
    action differs between rooms, but not between episodes. The observation is the room's one-hot code. The best return
    is 1; a policy that does not explore earns 0.

    Args:
      num_rooms: number of rooms; an episode ends in the last room.
      num_actions: number of actions in each room.
      length: number of actions after which an episode is truncated; None means 3 num_rooms.
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


@gin.configurable(module="alfish.environments.toy")
@checked
class Recall(gymnasium.Env):
    """A memory task: the first observation shows a cue, and `delay` steps later the matching action has reward 1.

    The first observation contains the one-hot code of the cue; later observations contain zeros. The last entry of an
    observation is 1 in the step whose action is rewarded. The best average return without memory is 1 / num_cues, or
    0.5 for two cues and a Box action.

    Args:
      num_cues: number of equally likely cues, and of actions.
      delay: number of actions before the rewarded action; with 0, the cue is visible in the step of this action.
      action: kind of action: 'discrete' is the index of the cue; 'box' is a number in [-1, 1], with cues at equal
        distances. The reward of 'box' is 1 minus half the distance to the cue.
    """

    def __init__(
        self,
        num_cues: Annotated[int, Range(2)] = 4,
        delay: NonNegativeInt = 8,
        action: Literal["discrete", "box"] = "discrete",
    ):
        self.observation_space = spaces.Box(0, 1, (num_cues + 1,), np.float32)
        self.action_space = spaces.Discrete(num_cues) if action == "discrete" else spaces.Box(-1, 1, (1,), np.float32)
        self._num_cues = num_cues
        self._delay = delay
        self._step = 0
        self._cue = 0
        self._kind = action

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self._step, self._cue = 0, int(self.np_random.integers(self._num_cues))
        return self._observation(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        counts = self._step == self._delay
        self._step += 1
        if self._kind == "discrete":
            reward = float(action == self._cue)
        else:
            reward = 1 - abs(float(action[0]) - np.linspace(-1, 1, self._num_cues)[self._cue]) / 2
        return self._observation(), counts * reward, counts, False, {}

    def _observation(self) -> np.ndarray:
        observation = np.zeros(self._num_cues + 1, np.float32)
        observation[self._cue] = self._step == 0
        observation[-1] = self._step == self._delay
        return observation


@gin.configurable(module="alfish.environments.toy")
@checked
class HiddenArm(gymnasium.Env):
    """A bandit: one random arm per episode has reward 1, and all other arms have reward 0. The observation is constant.

    The best policy repeats a rewarded action, so it needs the last action and its reward. With two arms, its return is
    `length` - 0.5; without the last action or its reward, the best return is `length` / 2.

    Args:
      num_arms: number of actions.
      length: number of actions after which an episode is truncated.
    """

    def __init__(self, num_arms: Annotated[int, Range(2)] = 2, length: PositiveInt = 8):
        self.observation_space = spaces.Box(1, 1, (1,), np.float32)
        self.action_space = spaces.Discrete(num_arms)
        self._num_arms = num_arms
        self._length = length
        self._step = 0
        self._arm = 0

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self._step, self._arm = 0, int(self.np_random.integers(self._num_arms))
        return np.ones(1, np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self._step += 1
        return np.ones(1, np.float32), float(action == self._arm), False, self._step >= self._length, {}
