"""Deep Q-learning, Double by default: off-policy, for Discrete actions.

Mnih et al., 2015, https://doi.org/10.1038/nature14236; Double: van Hasselt et al., 2016, https://arxiv.org/abs/1509.06461.
The window length of replay, less one, is the n of n-step returns (uncorrected, as in Rainbow: Hessel et al., 2018).

Differs from the paper: epsilon is tossed for each environment; a truncated episode is bootstrapped from its true final
observation; the Huber loss has its threshold as a setting.
"""

from collections.abc import Callable
from typing import NamedTuple

import gin
import torch
from gymnasium import spaces
from torch import nn

from alfish import losses, nest, returns
from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.data import AlgStep, Experience, LossInfo, TimeStep
from alfish.errors import UsageError
from alfish.nest import Nest
from alfish.networks import QNetwork, Target
from alfish.schedules import Schedule, as_schedule


class DQNTrain(NamedTuple):
    q: torch.Tensor  # [1, N] of the taken action at row 0
    next_value: torch.Tensor  # [L, N] what later rows are worth; row 0 is not read


@gin.configurable(module="alfish.algorithms")
class DQN(RLAlgorithm):
    """Args:
    q_network: takes (observation_spec, number of actions).
    gamma: discount per environment step.
    epsilon: chance of a uniform action in rollout, for each environment; number or schedule of progress.
    double: the online network chooses the action that the target network values.
    target_period: updates between moves of the target network.
    target_rate: share of the way that it moves; 1 copies.
    huber_delta: error beyond which the loss is linear, in units of return; None: squared.
    """

    on_policy = False

    def __init__(
        self,
        observation_spec: Nest,
        action_spec: Nest,
        reward_spec: spaces.Box,
        *,
        q_network: Callable[..., nn.Module] = QNetwork,
        gamma: float = 0.99,
        epsilon: float | Schedule = 0.1,
        double: bool = True,
        target_period: int = 1000,
        target_rate: float = 1.0,
        huber_delta: float | None = 1.0,
    ):
        super().__init__(observation_spec, action_spec, reward_spec)
        self.num_actions = int(action_spec.n)
        self.q_network = q_network(observation_spec, self.num_actions)
        self.target = Target(self.q_network, target_rate, target_period)
        self._gamma, self._epsilon, self._double, self._huber_delta = gamma, as_schedule(epsilon), double, huber_delta

    @classmethod
    def check_specs(cls, observation_spec: Nest, action_spec: Nest, reward_spec: spaces.Box) -> None:
        if not isinstance(action_spec, spaces.Discrete):
            raise UsageError(
                f"{cls.__name__} takes a Discrete action, and this one is {action_spec}; SAC or PPO may do"
            )
        if reward_spec.shape:
            raise UsageError(
                f"{cls.__name__} takes a scalar reward, and this one is a vector of {reward_spec.shape[0]}"
            )

    def rollout_step(self, time_step: TimeStep, state: Nest) -> AlgStep:
        greedy = self.q_network(time_step.observation).argmax(-1)
        explore = torch.rand(greedy.shape, device=greedy.device) < self._epsilon(self.progress)
        return AlgStep(torch.where(explore, torch.randint_like(greedy, self.num_actions), greedy), state)

    def predict_step(self, time_step: TimeStep, state: Nest) -> AlgStep:
        return AlgStep(self.q_network(time_step.observation).argmax(-1), state)

    def train_step(self, experience: Experience, state: Nest) -> AlgStep:
        observation = experience.time_step.observation
        now, later = nest.at(observation, slice(0, 1)), nest.at(observation, slice(1, None))
        q = self.q_network(now).gather(-1, experience.action[:1].unsqueeze(-1)).squeeze(-1)
        with torch.no_grad():
            value = self.next_value(later)
        return AlgStep(state=state, info=DQNTrain(q, torch.cat([torch.zeros_like(q), value])))

    def next_value(self, observation: Nest) -> torch.Tensor:
        """What the target network says of the greedy action."""
        q = self.target(observation)
        if not self._double:
            return q.amax(-1)
        choice = self.q_network(observation).argmax(-1, keepdim=True)
        return q.gather(-1, choice).squeeze(-1)

    def calc_loss(self, experience: Experience, info: DQNTrain) -> LossInfo:
        step = experience.time_step  # [L, N]
        target = returns.discounted_return(step.reward, self._gamma * step.discount, info.next_value, step.step_type)
        error = target[:1] - info.q  # row 0 of each window trains
        loss = losses.squared(error) if self._huber_delta is None else losses.huber(error, self._huber_delta)
        extra = {"q": info.q.detach(), "td_error": error.detach().abs()}
        return LossInfo(loss, extra=extra, priority=error.detach().abs()[0])

    def after_update(self) -> None:
        self.target.follow(self.q_network)
