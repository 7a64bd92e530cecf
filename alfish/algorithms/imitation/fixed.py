"""A policy that never learns, for example an opponent: a saved policy of any algorithm, or a controller."""

from collections.abc import Callable

import gin
from gymnasium import spaces

from alfish.algorithms.imitation.expert import Expert, make_expert
from alfish.algorithms.imitation.external import opened_to_act
from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.data import AlgStep, Experience, LossInfo, TimeStep
from alfish.errors import UsageError
from alfish.nest import Nest
from alfish.parameters import checked


@gin.configurable(module="alfish.algorithms")
@checked
class Fixed(RLAlgorithm):
    """Acts as an expert does. Use it for one of several policies, with `PolicySettings.trains = False`.

    Args:
      expert: class or factory of the expert: `@saved_policy`, or an `Expert` of your own.
    """

    on_policy = True

    def __init__(
        self,
        observation_spec: Nest,
        action_spec: Nest,
        reward_spec: spaces.Box,
        *,
        expert: Callable[[], Expert] = gin.REQUIRED,
    ):
        super().__init__(observation_spec, action_spec, reward_spec)
        with opened_to_act(False):  # acting needs the expert, too, so the expert is always loaded
            self.expert = make_expert(expert, "Fixed.expert")
        self.expert.check_specs(observation_spec, action_spec)

    def initial_state(self, batch_size: int) -> Nest:
        return self.expert.initial_state(batch_size)

    def rollout_step(self, time_step: TimeStep, state: Nest) -> AlgStep:
        action, state = self.expert(time_step, state)
        return AlgStep(action, state)

    def train_step(self, experience: Experience, state: Nest) -> AlgStep:
        raise UsageError("Fixed does not train")

    def calc_loss(self, experience: Experience, info: Nest) -> LossInfo:
        raise UsageError("Fixed does not train")
