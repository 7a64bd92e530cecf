"""Bit flipping, a small task that is hard without hindsight replay, and its reward function.

Source: Andrychowicz et al., 2017, section 3.1, https://arxiv.org/abs/1707.01495.
"""

from typing import Annotated, Any

import gin
import gymnasium
import numpy as np
import torch
from gymnasium import spaces

from alfish.parameters import Range, checked


@gin.configurable(module="alfish.environments.bit_flip")
@checked
class BitFlip(gymnasium.Env):
    """Each action flips one of `num_bits` bits; the reward is 0 if the bits equal the goal, else -1.

    The initial bits are uniform, and the goal is uniform among all other values. An episode terminates at the goal, or
    is truncated after `num_bits` steps, which always suffice. The best return is 1 - (number of bits that differ from
    the goal at the start); the return of a failed episode is -num_bits.

    Differences from the paper: reaching the goal ends the episode; no episode starts at its goal.

    Args:
      num_bits: number of bits n, in [1, 62].
    """

    def __init__(self, num_bits: Annotated[int, Range(1, 62)] = 15):
        bits = spaces.MultiBinary(num_bits)
        self.observation_space = spaces.Dict(observation=bits, achieved_goal=bits, desired_goal=bits)
        self.action_space = spaces.Discrete(num_bits)
        self._step = 0
        self._bits = self._goal = np.zeros(num_bits, np.int8)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        super().reset(seed=seed)
        num_bits = len(self._bits)
        differing = int(self.np_random.integers(1, 1 << num_bits)) >> np.arange(num_bits) & 1
        self._bits = self.np_random.integers(2, size=num_bits, dtype=np.int8)
        self._goal = self._bits ^ differing.astype(np.int8)
        self._step = 0
        return self._observation(), {}

    def step(self, action: Any) -> tuple[dict, float, bool, bool, dict]:
        self._step += 1
        self._bits[action] ^= 1
        reached = bool((self._bits == self._goal).all())
        ends = self._step >= len(self._bits)
        return self._observation(), float(reached) - 1, reached, ends and not reached, {}

    def _observation(self) -> dict:
        return {
            "observation": self._bits.copy(),
            "achieved_goal": self._bits.copy(),
            "desired_goal": self._goal.copy(),
        }


@gin.configurable(module="alfish.environments.bit_flip")
@checked
def bit_flip_reward(achieved: torch.Tensor, goal: torch.Tensor) -> torch.Tensor:
    """Returns BitFlip's rewards `[M]` float32, 0 or -1, for achieved bits `[M, n]` and goals `[M, n]`."""
    return bit_flip_reached(achieved, goal).to(torch.float32) - 1


@gin.configurable(module="alfish.environments.bit_flip")
@checked
def bit_flip_reached(achieved: torch.Tensor, goal: torch.Tensor) -> torch.Tensor:
    """Returns `[M]` bool, True where BitFlip terminates: the achieved bits `[M, n]` equal the goals `[M, n]`."""
    return (achieved == goal).all(-1)
