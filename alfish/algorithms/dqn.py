"""Deep Q-learning, Double by default: off-policy, for Discrete actions.

Mnih et al., 2015, https://doi.org/10.1038/nature14236; Double: van Hasselt et al., 2016, https://arxiv.org/abs/1509.06461.
The window length of replay, less one, is the n of n-step returns (uncorrected, as in Rainbow: Hessel et al., 2018).
With memory, every row of a window trains (Kapturowski et al., 2019, https://openreview.net/forum?id=r1lyTjAqYX).
Retrace: Munos et al., 2016, https://arxiv.org/abs/1606.02647. Lower bounds: He et al., 2017,
https://arxiv.org/abs/1611.01606.

Differs from the paper: epsilon is tossed for each environment; a truncated episode is bootstrapped from its true final
observation; the Huber loss has its threshold as a setting.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import gin
import torch
from gymnasium import spaces

from alfish import losses, nest, specs
from alfish.algorithms.rl_algorithm import ReplayNeeds, RLAlgorithm
from alfish.data import AlgStep, Experience, LossInfo, TimeStep
from alfish.errors import UsageError
from alfish.nest import Nest
from alfish.networks import QNetwork, TargetNetwork, Window
from alfish.parameters import PositiveFloat, PositiveInt, Rate, UnitInterval, checked
from alfish.schedules import Schedule, as_schedule
from alfish.targets import NextValues, td_target


class DQNTrain(NamedTuple):
    q: torch.Tensor  # [T', N] of the taken action; T' is 1, row 0 alone; with memory L - 1, all rows but the last
    following: NextValues  # [L-1, N] of later rows, by the target network


@gin.configurable(module="alfish.algorithms")
@checked
class DQN(RLAlgorithm):
    """Deep Q-learning; papers, and how it differs from them, are in the module's docstring.

    Args:
      q_network: takes (observation_spec, number of actions).
      gamma: discount per environment step.
      lambda_: of the return, within the window; 1 reaches to its end, 0 is one step. None: 0 with memory and without
        Retrace, else 1.
      epsilon: chance of a uniform action in rollout, for each environment; number or schedule of progress.
      double: the online network chooses the action that the target network values.
      target_period: updates between moves of the target network.
      target_rate: share of the way that it moves; 1 copies.
      huber_delta: error beyond which the loss is linear, in units of return; None: squared.
      retrace: returns of more than one step end where an action is not the greedy one. The policy that is learned is
        greedy, so that min(1, pi / mu) is 1 or 0, whatever acted: Retrace is Watkins' Q(lambda) then.
      lower_bound: targets are no less than what was earned to the episode's end. Right where environment and rewards
        are deterministic; and a truncated episode's return is a lower bound only where rewards are not negative.
    """

    on_policy = False

    def __init__(
        self,
        observation_spec: Nest,
        action_spec: Nest,
        reward_spec: spaces.Box,
        *,
        q_network: Callable[..., Any] = QNetwork,
        gamma: UnitInterval = 0.99,
        lambda_: UnitInterval | None = None,
        epsilon: UnitInterval | Schedule = 0.1,
        double: bool = True,
        target_period: PositiveInt = 1000,
        target_rate: Rate = 1.0,
        huber_delta: PositiveFloat | None = 1.0,
        retrace: bool = False,
        lower_bound: bool = False,
    ):
        super().__init__(observation_spec, action_spec, reward_spec)
        self.num_actions = int(nest.leaves(action_spec)[0].n)
        self.q_network: Any = q_network(observation_spec, self.num_actions)
        self.target = TargetNetwork(self.q_network, target_rate, target_period)
        self.replay_needs = ReplayNeeds(return_gamma=gamma if lower_bound else None, recurrent_state=self.has_state)
        self._lambda = float(retrace or not self.has_state) if lambda_ is None else lambda_
        self._gamma, self._epsilon, self._double, self._huber_delta = gamma, as_schedule(epsilon), double, huber_delta
        self._retrace, self._lower_bound = retrace, lower_bound

    @classmethod
    def check_specs(cls, observation_spec: Nest, action_spec: Nest, reward_spec: spaces.Box) -> None:
        leaves = nest.leaves(action_spec)
        if len(leaves) != 1 or not isinstance(leaves[0], spaces.Discrete):
            raise UsageError(
                f"{cls.__name__} takes a Discrete action, and this one is {action_spec}; SAC or PPO may do"
            )
        specs.check_scalar_reward(cls.__name__, reward_spec)

    def initial_state(self, batch_size: int) -> Nest:
        return self.q_network.initial_state(batch_size)

    def rollout_step(self, time_step: TimeStep, state: Nest) -> AlgStep:
        q, state = self.q_network(time_step, state)
        greedy = q.argmax(-1)
        explore = torch.rand(greedy.shape, device=greedy.device) < self._epsilon(self.progress)
        action = torch.where(explore, torch.randint_like(greedy, self.num_actions), greedy)
        return AlgStep(self._nested(action), state)

    def predict_step(self, time_step: TimeStep, state: Nest) -> AlgStep:
        q, state = self.q_network(time_step, state)
        return AlgStep(self._nested(q.argmax(-1)), state)

    def train_step(self, experience: Experience, state: Nest) -> AlgStep:
        window = Window(experience, self.replay_needs.recurrent_state)
        target_q = window.later(self.target)  # [L-1, N, A]
        if self._double:
            all_q, chooser_q = window.both(self.q_network)
        else:
            all_q, chooser_q = window.trained(self.q_network), target_q
        (taken,) = nest.leaves(experience.action)
        greedy, later = chooser_q.argmax(-1), taken[1:]
        q = _of_action(all_q, taken[: all_q.shape[0]])
        following = NextValues(_of_action(target_q, greedy))
        if self._retrace:
            trace = (later == greedy).to(target_q.dtype)
            following = following._replace(q=_of_action(target_q, later), trace=trace)
        return AlgStep(info=DQNTrain(q, following))

    def calc_loss(self, experience: Experience, info: DQNTrain) -> LossInfo:
        target = td_target(experience, self._gamma, self._lambda, info.following, self._lower_bound)
        error = target[: info.q.shape[0]] - info.q
        loss = losses.squared(error) if self._huber_delta is None else losses.huber(error, self._huber_delta)
        td_error = error.abs()
        return LossInfo(loss, extra={"q": info.q, "td_error": td_error}, priority=td_error)

    def after_update(self) -> None:
        self.target.update(self.q_network)

    def _nested(self, action: torch.Tensor) -> Nest:
        return nest.map(lambda _: action, self.action_spec)


def _of_action(q: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
    """`[T, N]` from the values `[T, N, A]` of all actions, and the actions `[T, N]`."""
    return q.gather(-1, action.unsqueeze(-1)).squeeze(-1)
