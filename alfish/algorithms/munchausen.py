"""Soft and Munchausen Q-learning: deep Q-learning with the softmax policy of the target network.

    pi = softmax(Q' / tau)
    soft:        y = r + gamma tau logsumexp(Q'(s', .) / tau),   the value of pi at s' with its entropy
    Munchausen:  y + m max(tau log pi(a | s), floor)

Vieillard et al., 2020, https://arxiv.org/abs/2007.14430. Soft: Haarnoja et al., 2017, https://arxiv.org/abs/1702.08165.
"""

import math
from typing import Annotated, Any, ClassVar

import gin
import torch
from gymnasium import spaces

from alfish.algorithms.dqn import DQN, DQNTrain
from alfish.algorithms.q_learning import allowed_q
from alfish.data import AlgStep, Experience
from alfish.errors import UsageError
from alfish.functional.targets import NextValues
from alfish.nest import Nest
from alfish.parameters import NonNegativeFloat, PositiveFloat, Range, checked


@gin.configurable(module="alfish.algorithms")
@checked
class SoftDQN(DQN):
    """Deep Q-learning of the values of a softmax policy, including its entropy. `DQN.double` has no effect.

    Args:
      entropy_temperature: temperature of the policy, in units of return.
      dqn_arguments: settings of `DQN`; the reward must be scalar, and `values` None or `@LowerBounded`.
    """

    def __init__(
        self,
        observation_spec: Nest,
        action_spec: Nest,
        reward_spec: spaces.Box,
        *,
        entropy_temperature: PositiveFloat = 0.03,
        **dqn_arguments: Any,
    ):
        super().__init__(observation_spec, action_spec, reward_spec, **dqn_arguments)
        self._temperature = entropy_temperature
        if self.values.num_values is not None:
            raise UsageError(
                f"{type(self).__name__} requires scalar values; leave out DQN.values, and train on a scalar reward"
            )

    def train_step(self, experience: Experience, state: Nest) -> AlgStep:
        window, (taken,) = self.window(experience)
        q = window.trained(self.q_network)
        with torch.no_grad():
            now, later = window.both(self.target)
        scaled = allowed_q(torch.cat([now[:1], later]), self.mask(window.time_step)) / self._temperature  # [L, N, A]
        following = self.soft_values(scaled, taken)
        return AlgStep(info=DQNTrain(self.values.of_choice(q, taken[: q.shape[0]]), following))

    def soft_values(self, scaled: torch.Tensor, taken: torch.Tensor) -> NextValues:
        """Returns the values of the softmax policy at rows 1 to L-1.

        Args:
          scaled: `[L, N, A]`, values of the target network divided by the temperature.
          taken: `[L, N]` int64, actions that were taken.
        """
        return NextValues(self._temperature * scaled.logsumexp(-1)[1:])


@gin.configurable(module="alfish.algorithms")
@checked
class MunchausenDQN(SoftDQN):
    """Soft Q-learning with a bonus on the reward, the scaled log-probability of the taken action.

    Args:
      munchausen: weight of the bonus; the bonus is the temperature times the taken action's log-probability.
      log_policy_floor: lower limit of the bonus before weighting, at most 0.
      soft_arguments: settings of `SoftDQN`; `values` must be None.
    """

    needs_every_row: ClassVar[bool] = True

    def __init__(
        self,
        observation_spec: Nest,
        action_spec: Nest,
        reward_spec: spaces.Box,
        *,
        munchausen: NonNegativeFloat = 0.9,
        log_policy_floor: Annotated[float, Range(-math.inf, 0)] = -1.0,
        **soft_arguments: Any,
    ):
        super().__init__(observation_spec, action_spec, reward_spec, **soft_arguments)
        self._munchausen, self._floor = munchausen, log_policy_floor
        if self.replay_needs.return_gamma is not None:
            raise UsageError(
                f"{type(self).__name__} cannot use @LowerBounded values, because their bounds are returns without the "
                "bonus; leave out DQN.values"
            )

    def soft_values(self, scaled: torch.Tensor, taken: torch.Tensor) -> NextValues:
        log_policy = self.values.of_choice(scaled.log_softmax(-1)[:-1], taken[:-1])
        bonus = self._munchausen * (self._temperature * log_policy).clamp(self._floor, 0)
        return super().soft_values(scaled, taken)._replace(bonus=bonus)
