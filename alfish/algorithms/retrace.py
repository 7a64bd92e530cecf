"""Retrace for SAC and DQN: multi-step returns with an off-policy correction.

Munos et al., 2016, https://arxiv.org/abs/1606.02647. At each later row of a return, the difference between the return
from that row on and the value of the row's action is multiplied by min(1, pi / mu) of the action. For SAC, replay
stores log mu of each action. DQN's learned policy is greedy, so the factor is 1 or 0, and Retrace equals Watkins'
Q(lambda).
"""

from typing import Any, ClassVar, NamedTuple

import gin
import torch
from gymnasium import spaces

from alfish import nest
from alfish.algorithms.dqn import DQN
from alfish.algorithms.recurrent_sac import RecurrentSAC
from alfish.algorithms.sac import SAC
from alfish.data import Experience
from alfish.functional.targets import NextValues, behaviour_trace
from alfish.nest import Nest
from alfish.networks import Features
from alfish.networks.hybrid import Choice, HybridAction, HybridPolicy
from alfish.parameters import checked


class DrawnAction(NamedTuple):
    """A sampled action with its log-probability."""

    log_prob: torch.Tensor  # [B] log-probability of the sample, all leaves together
    action: Nest  # the sample; log_prob is invalid where a different action was executed


@gin.configurable(module="alfish.algorithms")
@checked
class RetraceSAC(SAC):
    """SAC with Retrace, for windows of more than two rows.

    A return ends at a row whose action the policy did not draw, or whose stored log-probability is nan.

    Args:
      sac_arguments: settings of `SAC`; `lambda_` is 1 by default.
    """

    default_lambda: ClassVar[float] = 1.0
    needs_every_row: ClassVar[bool] = True

    def __init__(self, observation_spec: Nest, action_spec: Nest, reward_spec: spaces.Box, **sac_arguments: Any):
        super().__init__(observation_spec, action_spec, reward_spec, **sac_arguments)
        self.replay_needs = self.replay_needs._replace(info=DrawnAction._fields)
        self.values.check(self, self._lambda, retrace=True)

    def explore(self, policy: HybridPolicy, state: Nest) -> tuple[HybridAction, Nest, DrawnAction]:
        sample, state, _ = super().explore(policy, state)
        return sample, state, DrawnAction(policy.log_prob(sample), self.action_space.join(sample))

    def next_values(
        self, experience: Experience, features: Features, policy: HybridPolicy, drawn: Choice
    ) -> NextValues:
        following = super().next_values(experience, features, policy, drawn)
        later = self.action_space.split(nest.at(experience.action, slice(1, None)))
        q = self.values.each(later.select, self.target_q(self.target_critic(features.next_critic, later.box)))
        return following._replace(q=q, trace=behaviour_trace(experience, policy.log_prob(later)))


@gin.configurable(module="alfish.algorithms")
@checked
class RecurrentRetraceSAC(RetraceSAC, RecurrentSAC):
    """SAC with memory and Retrace.

    Args:
      sac_arguments: settings of `RecurrentSAC`; `lambda_` is 1 by default.
    """


@gin.configurable(module="alfish.algorithms")
@checked
class RetraceDQN(DQN):
    """DQN with Retrace, for windows of more than two rows.

    Args:
      dqn_arguments: settings of `DQN`; `lambda_` is 1 by default.
    """

    default_lambda: ClassVar[float | None] = 1.0
    needs_every_row: ClassVar[bool] = True

    def __init__(self, observation_spec: Nest, action_spec: Nest, reward_spec: spaces.Box, **dqn_arguments: Any):
        super().__init__(observation_spec, action_spec, reward_spec, **dqn_arguments)
        self.values.check(self, self._lambda, one_critic=True, retrace=True)

    def next_values(self, q: torch.Tensor, greedy: torch.Tensor, taken: torch.Tensor) -> NextValues:
        following = super().next_values(q, greedy, taken)
        later = taken[1:]
        return following._replace(q=self.values.of_choice(q, later), trace=(later == greedy).to(q.dtype))
