"""Parts of a user, in a module of their own and without gin."""

import gymnasium
import numpy as np
from gymnasium import spaces
from torch import nn
from toys import OneState

from alfish.algorithms.ppo import PPO
from alfish.parameters import PositiveInt, checked


class Plain(gymnasium.Env):
    """`n` actions, each rewarded with itself."""

    def __init__(self, n):
        self.observation_space, self.action_space = spaces.Box(-1, 1, (2,)), spaces.Discrete(n)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        return np.ones(2, np.float32), float(action), False, False, {}


class Doubled(gymnasium.RewardWrapper):
    def reward(self, reward):
        return 2 * reward


class Mine(PPO):
    class Inner(OneState):
        pass


def torso(observation_spec, width, inner):
    """Takes part `inner` of its own kind."""
    made = nn.Flatten() if inner is None else inner(observation_spec)
    made.output_size = width
    return made


@checked
class Checked:
    def __init__(self, width: PositiveInt, *, inner=None):
        self.width, self.inner = width, inner


class CheckedByItsBase(Checked):
    pass


class OfOtherArguments(Checked):
    def __init__(self):
        super().__init__(1)


class SharedName:
    pass
