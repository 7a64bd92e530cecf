"""A task in which each action is rewarded immediately, and most actions are forbidden."""

from typing import Any, Literal

import gin
import gymnasium
import numpy as np
from gymnasium import spaces

from alfish.errors import UsageError
from alfish.parameters import NonNegativeInt, PositiveInt, checked


@gin.configurable(module="alfish.environments.toy")
@checked
class MaskedIdentity(gymnasium.Env):
    """The action must equal the observed number; each step forbids a random set of other actions.

    The observed number is uniform. `action_masks()` and the info 'action_mask' return the mask, which always allows the
    right action. The reward is the fraction of the action's entries that are right, so the best return is `length`.
    Uniformly random allowed actions earn length / (num_actions - num_forbidden), or length (1 + num_forbidden /
    num_actions) / 2 with 'multi_binary'.

    Args:
      num_actions: number of actions, n.
      num_forbidden: number of forbidden actions in each step, below n.
      action: kind of action: 'discrete'; 'multi_discrete', two numbers with separate masks; or 'multi_binary', n bits,
        where each bit has only one allowed value with probability num_forbidden / n.
      length: number of actions after which an episode is truncated.

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
        self._kind = action
        self._size = num_actions
        self._num_forbidden = num_forbidden
        self._length = length
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
