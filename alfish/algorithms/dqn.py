"""Deep Q-learning: off-policy, for one Discrete action.

Mnih et al., 2015, https://doi.org/10.1038/nature14236. Double: van Hasselt et al., 2016, https://arxiv.org/abs/1509.06461.
Memory: Kapturowski et al., 2019, https://openreview.net/forum?id=r1lyTjAqYX. Retrace: Munos et al., 2016,
https://arxiv.org/abs/1606.02647. Lower bounds: He et al., 2017, https://arxiv.org/abs/1611.01606.

Windows of L rows give (L-1)-step returns, uncorrected as in Rainbow (Hessel et al., 2018). Row 0 of a window trains;
with memory, every row but the last.

Differences from the paper: each environment explores independently; a truncated episode bootstraps from its true final
observation; the threshold of the Huber loss is a setting.
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
from alfish.objectives import Discount, RewardWeights, objectives_of
from alfish.parameters import PositiveFloat, PositiveInt, Rate, UnitInterval, checked
from alfish.parameters.parts import build_network
from alfish.schedules import Schedule, as_schedule
from alfish.targets import NextValues, td_target


class DQNTrain(NamedTuple):
    q: torch.Tensor  # [T', N] or [T', N, R] of the taken action; T' is 1, or L - 1 with memory
    following: NextValues  # [L-1, N] of rows 1 to L-1, by the target network


@gin.configurable(module="alfish.algorithms")
@checked
class DQN(RLAlgorithm):
    """Deep Q-learning; the module's docstring has the papers and the differences from them.

    Args:
      q_network: takes (observation_spec, number of actions).
      gamma: discount per environment step; a list: one for each entry of a vector reward.
      lambda_: of the return within a window; 1 bootstraps at the last row only, 0 is the one-step return. None: 1; with
        memory and without Retrace, 0.
      epsilon: probability of a uniform action in rollout; number or schedule of progress.
      double: the online network chooses the next action, the target network values it.
      target_period: updates of the online network between updates of the target network.
      target_rate: of the target network's update; 1 copies.
      huber_delta: error beyond which the loss is linear, in units of return; None: half the squared error.
      retrace: returns of several steps end at actions that are not greedy. The learned policy is greedy, so that
        min(1, pi / mu) is 1 or 0, and Retrace is Watkins' Q(lambda).
      lower_bound: targets are at least the return to the end of the episode. Correct only in deterministic environments
        and, for truncated episodes, with rewards that are not negative.
      reward_weights: of the entries of a vector reward; the buffer `objectives.weights` begins with them. None: 1.
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
    ):
        super().__init__(observation_spec, action_spec, reward_spec)
        self.num_actions = int(nest.leaves(action_spec)[0].n)
        self.objectives = objectives_of(self, reward_spec, gamma, reward_weights)
        make = self.objectives.sized(q_network)
        self.q_network: Any = build_network(
            make, "DQN.q_network", observation_spec, self.num_actions, has=("initial_state",), takes=2
        )
        self.target = TargetNetwork(self.q_network, target_rate, target_period)
        self.replay_needs = ReplayNeeds(
            return_gamma=self.objectives.return_gamma(lower_bound), recurrent_state=self.has_state
        )
        self._lambda = float(retrace or not self.has_state) if lambda_ is None else lambda_
        self._epsilon, self._double, self._huber_delta = as_schedule(epsilon), double, huber_delta
        self._retrace, self._lower_bound = retrace, lower_bound

    @classmethod
    def check_specs(cls, observation_spec: Nest, action_spec: Nest, reward_spec: spaces.Box) -> None:
        leaves = nest.leaves(action_spec)
        if len(leaves) != 1 or not isinstance(leaves[0], spaces.Discrete):
            raise UsageError(
                f"{cls.__name__} takes one Discrete action leaf, and the action is {action_spec}; train with SAC or PPO"
            )

    def initial_state(self, batch_size: int) -> Nest:
        return self.q_network.initial_state(batch_size)

    def rollout_step(self, time_step: TimeStep, state: Nest) -> AlgStep:
        q, state = self.q_network(time_step, state)
        mask = self._mask(time_step)
        greedy = _greedy(self.objectives.scalarized(q), mask)
        explore = torch.rand(greedy.shape, device=greedy.device) < self._epsilon(self.progress)
        uniform = torch.randint_like(greedy, self.num_actions) if mask is None else specs.uniform_choice(mask)
        return AlgStep(self._nested(torch.where(explore, uniform, greedy)), state)

    def predict_step(self, time_step: TimeStep, state: Nest) -> AlgStep:
        q, state = self.q_network(time_step, state)
        return AlgStep(self._nested(_greedy(self.objectives.scalarized(q), self._mask(time_step))), state)

    def state_value(self, time_step: TimeStep, state: Nest) -> torch.Tensor:
        """Returns the values `[B]` of rows `[B]`: those of the greedy actions."""
        q = self.objectives.scalarized(self.q_network(time_step, state)[0])
        return _of_action(q, _greedy(q, self._mask(time_step)))

    def train_step(self, experience: Experience, state: Nest) -> AlgStep:
        window = Window(experience, self.replay_needs.recurrent_state)
        target_q = window.later(self.target)  # [L-1, N, A] or [L-1, N, A, R]
        if self._double:
            all_q, chooser_q = window.both(self.q_network)
        else:
            all_q, chooser_q = window.trained(self.q_network), target_q
        (taken,) = nest.leaves(experience.action)
        mask = self._mask(experience.time_step)
        chosen_by = self.objectives.scalarized(chooser_q)
        greedy, later = _greedy(chosen_by, None if mask is None else mask[1:]), taken[1:]
        q = self.objectives.each(_of_action, all_q, taken[: all_q.shape[0]])
        following = NextValues(self.objectives.each(_of_action, target_q, greedy))
        if self._retrace:
            trace = (later == greedy).to(target_q.dtype)
            following = following._replace(q=self.objectives.each(_of_action, target_q, later), trace=trace)
        return AlgStep(info=DQNTrain(q, following))

    def calc_loss(self, experience: Experience, info: DQNTrain) -> LossInfo:
        target = td_target(experience, self.objectives, self._lambda, info.following, self._lower_bound)
        error = target[: info.q.shape[0]] - info.q
        loss = losses.squared(error) if self._huber_delta is None else losses.huber(error, self._huber_delta)
        td_error = self.objectives.magnitude(error)
        extra = {"q": self.objectives.scalarized(info.q), "td_error": td_error}
        return LossInfo(self.objectives.total(loss), extra=extra, priority=td_error)

    def after_update(self) -> None:
        self.target.update(self.q_network)

    def _mask(self, time_step: TimeStep) -> torch.Tensor | None:
        """Returns the allowed actions, `[..., A]` bool; None: all."""
        return None if self.action_masks is None else self.action_masks(time_step.observation)[0]

    def _nested(self, action: torch.Tensor) -> Nest:
        return nest.map(lambda _: action, self.action_spec)


def _greedy(q: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Returns the best action that `mask` allows; if it allows none, the best of all. Both are `[..., A]`."""
    if mask is not None:
        allows_none = mask.amax(-1, keepdim=True).logical_not()  # at the end of an episode
        q = torch.where(mask | allows_none, q, -torch.inf)
    return q.argmax(-1)


def _of_action(q: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
    """Returns the `[T, N]` values of `action` `[T, N]`; `q` is `[T, N, A]`."""
    return q.gather(-1, action.unsqueeze(-1)).squeeze(-1)
