"""An expert inside the environment: it takes over where the policy is about to go wrong, and the policy clones it.

alfish train --gin_file=examples/interventions.gin --root_dir=runs/interventions
"""

from typing import Any

import gin
import gymnasium
import numpy as np
from gymnasium import spaces


@gin.configurable
class Steering(gymnasium.Env):
    """Steers back to the middle of a road. A safety driver (a person, a planner) takes the wheel when it must.

    The observation is the position in [-1, 1], and the right action is its negative. The info `executed_action` is the
    action that was executed, in the environment's units: the driver's, or the policy's. The info `takes_over` is 1
    where the driver acts.

    Args:
      tolerance: error of an action from which the driver takes over.
      length: actions of an episode.
    """

    def __init__(self, tolerance: float = 0.1, length: int = 20):
        self.observation_space = spaces.Box(-1, 1, (1,), np.float32)
        self.action_space = spaces.Box(-1, 1, (1,), np.float32)
        self._tolerance, self._length = tolerance, length

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._step = 0
        return self._drift(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        right = -self._position
        takes_over = bool(np.abs(action - right).max() > self._tolerance)
        executed = right if takes_over else np.asarray(action, np.float32)
        self._step += 1
        info = {"executed_action": executed, "takes_over": float(takes_over)}
        return self._drift(), float(-takes_over), False, self._step >= self._length, info

    def _drift(self) -> Any:
        self._position = self.np_random.uniform(-1, 1, 1).astype(np.float32)
        return self._position
