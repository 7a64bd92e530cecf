"""Behavioural cloning: maximum likelihood of recorded actions, in any action space.

Pomerleau, 1991, https://doi.org/10.1162/neco.1991.3.1.88, with one distribution per leaf of the action.

Box actions have a normal distribution that is not squashed: recorded actions often lie at the bounds, where a squashed
normal has no finite log-density. Samples beyond the bounds are clipped when they are executed. The standard deviation
does not depend on the observation. It has a lower bound, because the likelihood of constant actions would otherwise be
unbounded. `PolicyHead.learn_std = False` makes this a regression with squared error.

Training does not use rewards. The loss uses only row 0 of a window; with memory, it uses every row but the last.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import gin
import torch
from gymnasium import spaces

from alfish import nest
from alfish.algorithms.rl_algorithm import ReplayNeeds, RLAlgorithm
from alfish.data import AlgStep, Experience, LossInfo, TimeStep
from alfish.functional.distributions import Distribution
from alfish.nest import Nest
from alfish.networks import FLOORED_HEAD, Torso, Window, head_masks, policy_of
from alfish.parameters import checked
from alfish.parameters.parts import build_network, build_torso


class BCTrain(NamedTuple):
    """Outputs at the T' rows that the loss uses; T' is 1, or L - 1 with memory."""

    policy: Distribution  # [T', N] policy in training
    action: Nest  # [T', N, ...] action to clone


@gin.configurable(module="alfish.algorithms")
@checked
class BC(RLAlgorithm):
    """Behavioural cloning; see the module's docstring.

    Args:
      torso: class or factory of the torso; called with the observation spec. The torso may have memory.
      policy_head: class or factory of the head; called with the torso's output size and the action spec.
    """

    on_policy = False
    feature_module = "torso"

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
        self.torso: Any = build_torso(torso, f"{type(self).__name__}.torso", observation_spec)
        size = self.torso.output_size
        self.policy_head: Any = build_network(
            policy_head, f"{type(self).__name__}.policy_head", size, action_spec, has=()
        )
        self.action_masks = head_masks(self.policy_head, observation_spec, action_spec)
        self.replay_needs = ReplayNeeds(recurrent_state=bool(nest.leaves(self.torso.initial_state(1))))

    def initial_state(self, batch_size: int) -> Nest:
        return self.torso.initial_state(batch_size)

    def rollout_step(self, time_step: TimeStep, state: Nest) -> AlgStep:
        features, state = self.torso(time_step, state)
        return AlgStep(self._policy(features, time_step).sample(), state)

    def predict_step(self, time_step: TimeStep, state: Nest) -> AlgStep:
        features, state = self.torso(time_step, state)
        return AlgStep(self._policy(features, time_step).mode(), state)

    def train_step(self, experience: Experience, state: Nest) -> AlgStep:
        features = Window(experience, self.replay_needs.recurrent_state).trained(self.torso)
        rows = experience.time_step, self.cloned_action(experience)
        step, action = nest.at(rows, slice(0, features.shape[0]))
        return AlgStep(info=BCTrain(self._policy(features, step), action))

    def cloned_action(self, experience: Experience) -> Nest:
        """Returns the actions to clone, `[L, N, ...]`. Default: the executed actions."""
        return experience.action

    def calc_loss(self, experience: Experience, info: BCTrain) -> LossInfo:
        log_prob = info.policy.log_prob(info.action)
        with torch.no_grad():
            extra = {"log_prob": log_prob, "entropy": info.policy.entropy()}
            specs, modes, actions = map(nest.leaves, (self.action_spec, info.policy.mode(), info.action))
            errors = [mode - a for spec, mode, a in zip(specs, modes, actions) if isinstance(spec, spaces.Box)]
            if errors:
                extra["squared_error"] = torch.cat(errors, -1).square().mean(-1)
        return LossInfo(-log_prob, extra=extra)

    def _policy(self, features: torch.Tensor, time_step: TimeStep) -> Distribution:
        return policy_of(self.policy_head, features, self.action_masks, time_step.observation)
