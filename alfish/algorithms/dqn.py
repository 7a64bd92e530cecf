"""Deep Q-learning: off-policy, for one Discrete action.

    y = r_1 + ... + gamma^(n-1) r_n + gamma^n Q'(s_n, argmax_a Q(s_n, a)),   loss = huber(y - Q(s_0, a_0))

Q' is the target network; its value counts as 0 if s_n is terminal. Without double Q-learning, the argmax also reads Q'.
`train_step` computes the next values; `calc_loss` computes the target y by `values.Scalar.target`, which calls
`targets.td_target` and `returns.lambda_return`. The learner takes the mean of the loss over trainable rows.

Mnih et al., 2015, https://doi.org/10.1038/nature14236. Double: van Hasselt et al., 2016, https://arxiv.org/abs/1509.06461.
Memory: Kapturowski et al., 2019, https://openreview.net/forum?id=r1lyTjAqYX. C51, QR-DQN and IQN are settings of
`values`. Variants are in `retrace` and `munchausen`.

Windows of L rows give (L-1)-step returns, without off-policy correction, as in Rainbow (Hessel et al., 2018). The loss
uses only row 0 of a window; with memory, it uses every row but the last.

Differences from the paper: double Q-learning is the default (`DQN.double`); each environment explores independently; a
truncated episode bootstraps from its true final observation; the threshold of the Huber loss is a setting.
"""

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import gin
import torch
from gymnasium import spaces

from alfish import nest
from alfish.algorithms.q_learning import QLearning, greedy_choice
from alfish.algorithms.rl_algorithm import ReplayNeeds
from alfish.data import AlgStep, Experience, LossInfo
from alfish.functional.targets import NextValues
from alfish.functional.values import Discount, RewardWeights, values_of
from alfish.nest import Nest
from alfish.networks import QNetwork, TargetNetwork, Window, first_and_bootstrap_rows
from alfish.parameters import PositiveFloat, PositiveInt, Rate, UnitInterval, checked
from alfish.parameters.schedules import Schedule


class DQNTrain(NamedTuple):
    """Outputs at the T' rows that the loss uses: row 0, or with memory all rows but the last."""

    q: torch.Tensor  # [T', N] or [T', N, K] value of the taken action
    following: NextValues  # values of rows 1 to L-1, or of the bootstrap row, by the target network


@gin.configurable(module="alfish.algorithms")
@checked
class DQN(QLearning):
    """Deep Q-learning; see the module's docstring for the papers and the differences from them.

    Args:
      q_network: class or factory of the network; called with (observation_spec, number of actions).
      gamma: discount per environment step, in [0, 1]; a list has one discount for each entry of a vector reward.
      lambda_: weight of longer returns within a window, in [0, 1]; 1 bootstraps only at the last row, and 0 gives the
        one-step return; None means 1 without memory and 0 with memory.
      epsilon: probability of a uniform action in rollout, in [0, 1]; a number or a schedule of progress.
      double: whether the online network chooses the next action, and the target network evaluates it.
      target_period: number of network updates for each update of the target network.
      target_rate: step size of the target network's update, in (0, 1]; 1 copies the network.
      huber_delta: error beyond which the loss is linear, in units of return; None means half the squared error.
        Has no effect if `values` is a distribution of the return, which has its own loss.
      reward_weights: initial weight of each reward entry, kept in the buffer `values.weights`; None means 1 for all.
      values: class or factory of the value representation, called with gamma; requires a scalar reward. `@Bins` and
        `@Quantiles` are distributions of the return; `@LowerBounded` is the expected return with lower bounds. None
        means the expected return.
    """

    on_policy = False
    default_lambda: ClassVar[float | None] = None  # None means 1 without memory and 0 with memory
    needs_every_row: ClassVar[bool] = False  # whether targets read all rows of a window, not only the first and last

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
        reward_weights: RewardWeights | None = None,
        values: Callable[..., Any] | None = None,
    ):
        super().__init__(observation_spec, action_spec, reward_spec)
        value_kind = values_of(self, reward_spec, gamma, reward_weights, huber_delta=huber_delta, kind=values)
        self.make_network(q_network, value_kind, epsilon)
        self.target = TargetNetwork(self.q_network, target_rate, target_period)
        self.replay_needs = ReplayNeeds(return_gamma=value_kind.return_gamma, recurrent_state=self.has_state)
        default = (0.0 if self.has_state else 1.0) if self.default_lambda is None else self.default_lambda
        self._lambda = default if lambda_ is None else lambda_
        value_kind.check(self, self._lambda, one_critic=True, memory=self.has_state)
        self._double = double

    def train_step(self, experience: Experience, state: Nest) -> AlgStep:
        window, (taken,) = self.window(experience)
        next_q = window.later(self.target)  # [L-1, N, A] or [L-1, N, A, K]
        if self._double:
            q, chooser_q = window.both(self.q_network)
        else:
            q, chooser_q = window.trained(self.q_network), next_q
        mask = self.mask(window.time_step)
        greedy = greedy_choice(self.values.scalarized(chooser_q), None if mask is None else mask[1:])
        following = self.next_values(next_q, greedy, taken)
        return AlgStep(info=DQNTrain(self.values.of_choice(q, taken[: q.shape[0]]), following))

    def window(self, experience: Experience) -> tuple[Window, list[torch.Tensor]]:
        """Returns the rows of a window `[L, N]` that targets read, and a list with the action leaf of these rows."""
        has_memory = self.replay_needs.recurrent_state
        if not (self.needs_every_row or has_memory):
            # From here L is 2 unless 0 < lambda < 1; `calc_loss` receives all rows.
            experience = first_and_bootstrap_rows(experience, self._lambda)
        return Window(experience, has_memory), nest.leaves(experience.action)

    def next_values(self, q: torch.Tensor, greedy: torch.Tensor, taken: torch.Tensor) -> NextValues:
        """Returns the values of rows 1 to L-1 from which the target y is computed.

        Args:
          q: `[L-1, N, A]` or `[L-1, N, A, K]`, values of the target network.
          greedy: `[L-1, N]` int64, greedy actions.
          taken: `[L, N]` int64, actions that were taken; `RetraceDQN` reads them.
        """
        return NextValues(self.values.of_choice(q, greedy))

    def calc_loss(self, experience: Experience, info: DQNTrain) -> LossInfo:
        target = self.values.target(experience, info.following, self._lambda)[: info.q.shape[0]]
        loss, error = self.values.loss(info.q, target)
        return LossInfo(loss, extra={**self.values.shown(info.q, target), "td_error": error}, priority=error)

    def after_update(self) -> None:
        self.target.update(self.q_network)
