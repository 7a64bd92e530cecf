"""Tasks whose present observation does not tell what to do."""

from typing import Annotated, Any, Literal

import gin
import gymnasium
import numpy as np
from gymnasium import spaces

from alfish.parameters import NonNegativeInt, PositiveInt, Range, checked


@gin.configurable(module="alfish.environments.toy")
@checked
class Recall(gymnasium.Env):
    """A memory task: the first observation shows a cue, and `delay` steps later the matching action has reward 1.

    The first observation has the cue's one-hot code, later ones zeros; the last entry is 1 where the action counts. The
    best average return without memory is 1 / num_cues; 0.5 for two cues and a Box action.

    Args:
      num_cues: number of cues, equally likely, and of actions.
      delay: number of actions before the one that counts; 0: the cue is still visible then.
      action: 'discrete', the cue; 'box', a number in [-1, 1], in which cues have equal distances. The reward is then 1
        minus half the distance to the cue.
    """

    def __init__(
        self,
        num_cues: Annotated[int, Range(2)] = 4,
        delay: NonNegativeInt = 8,
        action: Literal["discrete", "box"] = "discrete",
    ):
        self.observation_space = spaces.Box(0, 1, (num_cues + 1,), np.float32)
        self.action_space = spaces.Discrete(num_cues) if action == "discrete" else spaces.Box(-1, 1, (1,), np.float32)
        self._num_cues, self._delay, self._step, self._cue, self._kind = num_cues, delay, 0, 0, action

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
    """One arm has reward 1 throughout an episode, drawn uniformly, and the others 0; the observation never changes.

    Only the last action and its reward tell what to do: to repeat what was rewarded. With two arms the best return is
    `length` - 0.5, without either of the two it is `length` / 2.

    Args:
      num_arms: number of actions.
      length: actions per episode, which is then truncated.
    """

    def __init__(self, num_arms: Annotated[int, Range(2)] = 2, length: PositiveInt = 8):
        self.observation_space = spaces.Box(1, 1, (1,), np.float32)
        self.action_space = spaces.Discrete(num_arms)
        self._num_arms, self._length, self._step, self._arm = num_arms, length, 0, 0

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self._step, self._arm = 0, int(self.np_random.integers(self._num_arms))
        return np.ones(1, np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self._step += 1
        return np.ones(1, np.float32), float(action == self._arm), False, self._step >= self._length, {}
