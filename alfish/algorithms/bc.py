"""Behavioural cloning: maximum likelihood of the actions in the data, whatever their space.

Pomerleau, 1991, https://doi.org/10.1162/neco.1991.3.1.88, with a distribution for each leaf of the action. Box actions
have a normal that is not squashed: data often lie at the bounds, where a squashed one has no density. What it would do
beyond the bounds is clipped when it is executed. Its standard deviation does not depend on the observation and has a
floor, for else the likelihood of a policy without randomness would have no end. `PolicyHead.learn_std = False` makes
it regress by squared error.

Rewards are not read. With memory, every row of a window trains, else row 0 alone.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import gin
import torch
from gymnasium import spaces

from alfish import nest
from alfish.algorithms.rl_algorithm import ReplayNeeds, RLAlgorithm
from alfish.data import AlgStep, Experience, LossInfo, TimeStep
from alfish.distributions import Distribution
from alfish.nest import Nest
from alfish.networks import FLOORED_HEAD, Torso, Window
from alfish.parameters import checked


class BCTrain(NamedTuple):
    """T' is 1, row 0 alone; with memory L - 1, all rows but the last."""

    policy: Distribution  # [T', N]
    action: Nest  # [T', N, ...] of the data


@gin.configurable(module="alfish.algorithms")
@checked
class BC(RLAlgorithm):
    """Behavioural cloning; see the module's docstring.

    Args:
      torso: takes the observation spec; may have memory.
      policy_head: takes the torso's output size and the action spec.
    """

    on_policy = False

    def __init__(
        self,
        observation_spec: Nest,
        action_spec: Nest,
        reward_spec: spaces.Box,
        *,
        torso: Callable[[Nest], Any] = Torso,
        policy_head: Callable[[int, Nest], Any] = FLOORED_HEAD,
    ):
        super().__init__(observation_spec, action_spec, reward_spec)
        self.torso: Any = torso(observation_spec)
        self.policy_head: Any = policy_head(self.torso.output_size, action_spec)
        self.replay_needs = ReplayNeeds(recurrent_state=self.has_state)

    def initial_state(self, batch_size: int) -> Nest:
        return self.torso.initial_state(batch_size)

    def rollout_step(self, time_step: TimeStep, state: Nest) -> AlgStep:
        features, state = self.torso(time_step, state)
        return AlgStep(self.policy_head(features).sample(), state)

    def predict_step(self, time_step: TimeStep, state: Nest) -> AlgStep:
        features, state = self.torso(time_step, state)
        return AlgStep(self.policy_head(features).mode(), state)

    def train_step(self, experience: Experience, state: Nest) -> AlgStep:
        features = Window(experience, self.replay_needs.recurrent_state).trained(self.torso)
        action = nest.at(experience.action, slice(0, features.shape[0]))
        return AlgStep(info=BCTrain(self.policy_head(features), action))

    def calc_loss(self, experience: Experience, info: BCTrain) -> LossInfo:
        log_prob = info.policy.log_prob(info.action)
        with torch.no_grad():
            extra = {"log_prob": log_prob, "entropy": info.policy.entropy()}
            specs, modes, actions = map(nest.leaves, (self.action_spec, info.policy.mode(), info.action))
            errors = [mode - a for spec, mode, a in zip(specs, modes, actions) if isinstance(spec, spaces.Box)]
            if errors:
                extra["squared_error"] = torch.cat(errors, -1).square().mean(-1)
        return LossInfo(-log_prob, extra=extra)
