"""Transforms of rewards without statistics."""

import gin
from gymnasium import spaces

from alfish.data import TimeStep
from alfish.errors import UsageError
from alfish.nest import Nest
from alfish.parameters import FiniteFloat, checked
from alfish.transforms.transform import Transform


@gin.configurable(module="alfish.transforms")
@checked
class RewardClip(Transform):
    """Clips rewards to [low, high], in units of reward."""

    changes_rewards = in_graphs = True

    def __init__(
        self, observation_spec: Nest, reward_spec: spaces.Box, low: FiniteFloat = -1.0, high: FiniteFloat = 1.0
    ):
        super().__init__(observation_spec, reward_spec)
        if low >= high:
            raise UsageError(f"RewardClip.low must be below RewardClip.high, but got {low} and {high}")
        self._low, self._high = low, high

    def transform(self, time_step: TimeStep, state: Nest) -> TimeStep:
        return time_step._replace(reward=time_step.reward.clamp(self._low, self._high))


@gin.configurable(module="alfish.transforms")
@checked
class RewardScale(Transform):
    """Multiplies rewards by `scale`."""

    changes_rewards = in_graphs = True

    def __init__(self, observation_spec: Nest, reward_spec: spaces.Box, scale: FiniteFloat = gin.REQUIRED):
        super().__init__(observation_spec, reward_spec)
        self._scale = scale

    def transform(self, time_step: TimeStep, state: Nest) -> TimeStep:
        return time_step._replace(reward=time_step.reward * self._scale)
