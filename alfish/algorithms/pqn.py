"""Parallelised Q-network: on-policy Q-learning without replay and without a target network, for one Discrete action.

Gallici et al., 2025, https://arxiv.org/abs/2407.04811. Layer norm in the network keeps learning stable, and many
parallel environments make the rows of a minibatch nearly independent.

Differences from the authors' code: a truncated episode bootstraps from its true final observation, while the code
treats it as terminated; sequences for a memory begin with the stored state, without burn-in.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import gin
import torch
from gymnasium import spaces

from alfish import nest
from alfish.algorithms.q_learning import QLearning, greedy_choice
from alfish.algorithms.rl_algorithm import UnrollUse
from alfish.data import AlgStep, Experience, LossInfo
from alfish.functional.targets import NextValues
from alfish.functional.values import Discount, RewardWeights, values_of
from alfish.nest import Nest
from alfish.networks import QNetwork
from alfish.parameters import UnitInterval, checked
from alfish.parameters.schedules import Schedule


class PQNTarget(NamedTuple):
    target: torch.Tensor  # [T, B] or [T, B, R] target of the action's value


class PQNTrain(NamedTuple):
    q: torch.Tensor  # [T, N] or [T, N, R] value of the taken action


@gin.configurable(module="alfish.algorithms")
@checked
class PQN(QLearning):
    """Parallelised Q-network; see the module's docstring for the paper and the differences from it.

    Targets are lambda-returns of greedy values, computed once for each unroll with the network that acted. As in Peng's
    Q(lambda), exploratory actions do not end a return.

    Args:
      q_network: class or factory of the Q network; called with (observation_spec, number of actions).
      gamma: discount per environment step, in [0, 1]; a list has one discount for each entry of a vector reward.
      lambda_: weight of longer returns, in [0, 1]; 1 bootstraps only at the end of the unroll, and 0 gives the one-step
        return.
      epsilon: probability of a uniform action in rollout, in [0, 1]; number or schedule of progress.
      reward_weights: initial weight of each reward entry, kept in the buffer `values.weights`; None means 1 for all.
    """

    on_policy = True
    unroll_use = UnrollUse(single_epoch=False)

    def __init__(
        self,
        observation_spec: Nest,
        action_spec: Nest,
        reward_spec: spaces.Box,
        *,
        q_network: Callable[..., Any] = QNetwork,
        gamma: Discount = 0.99,
        lambda_: UnitInterval = 0.65,
        epsilon: UnitInterval | Schedule = 0.1,
        reward_weights: RewardWeights | None = None,
    ):
        super().__init__(observation_spec, action_spec, reward_spec)
        self.make_network(q_network, values_of(self, reward_spec, gamma, reward_weights), epsilon)
        self._lambda = lambda_

    def preprocess_experience(self, experience: Experience) -> Experience:
        step = experience.time_step  # [T+1, B]
        q, _ = self.q_network(step, experience.state)
        best = self.values.of_choice(q, greedy_choice(self.values.scalarized(q), self.mask(step)))
        target = self.values.target(experience, NextValues(best[1:]), self._lambda)
        return experience._replace(info=PQNTarget(target))

    def train_step(self, experience: Experience, state: Nest) -> AlgStep:
        q, _ = self.q_network(experience.time_step, state)
        return AlgStep(info=PQNTrain(self.values.of_choice(q, nest.leaves(experience.action)[0])))

    def calc_loss(self, experience: Experience, info: PQNTrain) -> LossInfo:
        target = experience.info.target
        loss, error = self.values.loss(info.q, target)
        return LossInfo(loss, extra={**self.values.shown(info.q, target), "td_error": error})
