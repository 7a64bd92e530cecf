"""Deep Q-learning: off-policy, for one Discrete action.

Mnih et al., 2015, https://doi.org/10.1038/nature14236. Double: van Hasselt et al., 2016, https://arxiv.org/abs/1509.06461.
Memory: Kapturowski et al., 2019, https://openreview.net/forum?id=r1lyTjAqYX. Retrace: Munos et al., 2016,
https://arxiv.org/abs/1606.02647. Lower bounds: He et al., 2017, https://arxiv.org/abs/1611.01606. Munchausen: Vieillard
et al., 2020, https://arxiv.org/abs/2007.14430. C51 and QR-DQN are settings: `values = @Bins`, `values = @Quantiles`.

Windows of L rows give (L-1)-step returns, uncorrected as in Rainbow (Hessel et al., 2018). Row 0 of a window trains;
with memory, every row but the last.

Differences from the paper: each environment explores independently; a truncated episode bootstraps from its true final
observation; the threshold of the Huber loss is a setting.
"""

import math
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import gin
import torch
from gymnasium import spaces

from alfish import nest
from alfish.algorithms.q_learning import QLearning, allowed_q, greedy_choice
from alfish.algorithms.rl_algorithm import ReplayNeeds
from alfish.data import AlgStep, Experience, LossInfo
from alfish.errors import UsageError
from alfish.nest import Nest
from alfish.networks import QNetwork, TargetNetwork, Window, transitions
from alfish.parameters import NonNegativeFloat, PositiveFloat, PositiveInt, Range, Rate, UnitInterval, checked
from alfish.schedules import Schedule
from alfish.targets import NextValues
from alfish.values import Discount, RewardWeights, values_of


class DQNTrain(NamedTuple):
    q: torch.Tensor  # [T', N] or [T', N, K] of the taken action; T' is 1, or L - 1 with memory
    following: NextValues  # of rows 1 to L-1 or of `transitions`, [L-1, N] or [L-1, N, K], by the target network


@gin.configurable(module="alfish.algorithms")
@checked
class DQN(QLearning):
    """Deep Q-learning; the module's docstring has the papers and the differences from them.

    Args:
      q_network: takes (observation_spec, number of actions).
      gamma: discount per environment step; a list: one for each entry of a vector reward.
      lambda_: of the return within a window; 1 bootstraps at the last row only, 0 is the one-step return; None: 1, or 0
        with memory and without Retrace.
      epsilon: probability of a uniform action in rollout; number or schedule of progress.
      double: the online network chooses the next action, the target network values it.
      target_period: updates of the online network between updates of the target network.
      target_rate: of the target network's update; 1 copies.
      huber_delta: error beyond which the loss is linear, in units of return; None: half the squared error.
        Distributions have a loss of their own.
      retrace: returns of several steps end at actions that are not greedy. The learned policy is greedy, so that
        min(1, pi / mu) is 1 or 0, and Retrace is Watkins' Q(lambda).
      lower_bound: targets are at least the return to the end of the episode. Correct only in deterministic environments
        and, for truncated episodes, with rewards that are not negative.
      reward_weights: of the entries of a vector reward; the buffer `values.weights` begins with them. None: 1.
      values: a distribution of the return as the value (`@Bins`, `@Quantiles`), for a scalar reward; takes gamma. None:
        the expected return.
      entropy_temperature: the next value is that of the softmax policy of the target network at this temperature, in
        units of return, with its entropy (soft Q-learning); `double` is then not used. None: that of the greedy policy.
      munchausen: weight of the taken action's log-probability under that policy, times the temperature, in the reward.
      log_policy_floor: the least such product that is added.
    """

    on_policy = False

    def __init__(
        self,
        observation_spec: Nest,
        action_spec: Nest,
        reward_spec: spaces.Box,
        *,
        q_network: Callable[..., Any] = QNetwork,
        gamma: Discount = 0.99,
        lambda_: UnitInterval | None = None,
        epsilon: UnitInterval | Schedule = 0.1,
        double: bool = True,
        target_period: PositiveInt = 1000,
        target_rate: Rate = 1.0,
        huber_delta: PositiveFloat | None = 1.0,
        retrace: bool = False,
        lower_bound: bool = False,
        reward_weights: RewardWeights | None = None,
        values: Callable[..., Any] | None = None,
        entropy_temperature: PositiveFloat | None = None,
        munchausen: NonNegativeFloat = 0.0,
        log_policy_floor: Annotated[float, Range(-math.inf, 0)] = -1.0,
    ):
        super().__init__(observation_spec, action_spec, reward_spec)
        kind = values_of(self, reward_spec, gamma, reward_weights, huber_delta=huber_delta, distribution=values)
        self.make_network(q_network, kind, epsilon)
        self.target = TargetNetwork(self.q_network, target_rate, target_period)
        self.replay_needs = ReplayNeeds(return_gamma=kind.return_gamma(lower_bound), recurrent_state=self.has_state)
        self._lambda = float(retrace or not self.has_state) if lambda_ is None else lambda_
        kind.check(self, self._lambda, one_critic=True, retrace=retrace, memory=self.has_state)
        self._double, self._retrace, self._lower_bound = double, retrace, lower_bound
        self._temperature, self._munchausen, self._floor = entropy_temperature, munchausen, log_policy_floor
        if munchausen and (entropy_temperature is None or lower_bound):
            raise UsageError(
                "DQN.munchausen needs DQN.entropy_temperature, for example 0.03, and lower_bound = False; set them so"
            )
        if entropy_temperature is not None and (retrace or kind.num_values is not None):
            raise UsageError(
                "DQN.entropy_temperature takes values of one number, without Retrace; leave out DQN.values and "
                "DQN.retrace, and train on a scalar reward"
            )

    def train_step(self, experience: Experience, state: Nest) -> AlgStep:
        if not (self._retrace or self._munchausen or self.replay_needs.recurrent_state):
            experience = transitions(experience, self._lambda)
        window = Window(experience, self.replay_needs.recurrent_state)
        (taken,) = nest.leaves(experience.action)
        mask = self.mask(experience.time_step)
        if self._temperature is None:
            q, following = self._greedy(window, taken, None if mask is None else mask[1:])
        else:
            q, following = window.trained(self.q_network), self._soft(window, taken, mask, self._temperature)
        return AlgStep(info=DQNTrain(self.values.of_choice(q, taken[: q.shape[0]]), following))

    def calc_loss(self, experience: Experience, info: DQNTrain) -> LossInfo:
        target = self.values.target(experience, info.following, self._lambda, self._lower_bound)[: info.q.shape[0]]
        loss, error = self.values.loss(info.q, target)
        return LossInfo(loss, extra={**self.values.shown(info.q, target), "td_error": error}, priority=error)

    def after_update(self) -> None:
        self.target.update(self.q_network)

    def _greedy(
        self, window: Window, taken: torch.Tensor, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, NextValues]:
        """Returns the values of all actions at the rows that train, and those of the greedy policy at later rows."""
        target_q = window.later(self.target)  # [L-1, N, A] or [L-1, N, A, K]
        if self._double:
            q, chooser_q = window.both(self.q_network)
        else:
            q, chooser_q = window.trained(self.q_network), target_q
        greedy = greedy_choice(self.values.scalarized(chooser_q), mask)
        following = NextValues(self.values.of_choice(target_q, greedy))
        if self._retrace:
            later = taken[1:]
            trace = (later == greedy).to(target_q.dtype)
            following = following._replace(q=self.values.of_choice(target_q, later), trace=trace)
        return q, following

    def _soft(self, window: Window, taken: torch.Tensor, mask: torch.Tensor | None, temperature: float) -> NextValues:
        """Returns the values of the softmax policy at later rows, and a bonus for the actions before them."""
        with torch.no_grad():
            now, later = window.both(self.target)
        scaled = allowed_q(torch.cat([now[:1], later]), mask) / temperature  # [L, N, A]
        value = temperature * scaled.logsumexp(-1)[1:]
        if not self._munchausen:
            return NextValues(value)
        log_policy = self.values.of_choice(scaled.log_softmax(-1)[:-1], taken[:-1])
        return NextValues(value, bonus=self._munchausen * (temperature * log_policy).clamp(self._floor, 0))
