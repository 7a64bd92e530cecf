"""On-policy distillation of a teacher into a student, without replay.

The student acts, the teacher labels the rows, and the student is regressed on the labels of the unroll. With a memory,
gradients flow through all rows of an unroll, and the memory's state continues in the next unroll. This is DAgger (Ross
et al., 2011, https://arxiv.org/abs/1011.0686) with beta 0 and without replay; rsl_rl (Schwarke et al., 2025,
https://arxiv.org/abs/2509.10771) uses distillation for legged robots, where the teacher sees more than the student.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import gin
import torch
from gymnasium import spaces

from alfish import nest
from alfish.algorithms.bc import BCTrain
from alfish.algorithms.imitation.apprentice import Apprentice
from alfish.algorithms.imitation.expert import Expert
from alfish.algorithms.rl_algorithm import UnrollUse
from alfish.data import AlgStep, Experience, LossInfo
from alfish.functional import losses
from alfish.functional.distributions import is_distribution, sum_of
from alfish.nest import Nest
from alfish.networks import PolicyHead, Torso
from alfish.parameters import PositiveFloat, checked

# The standard deviation is fixed, because the squared error trains only the mean.
FIXED_HEAD = functools.partial(PolicyHead, initial_log_std=math.log(0.1), learn_std=False)


@gin.configurable(module="alfish.algorithms")
@checked
class Distillation(Apprentice):
    """Teacher-student distillation; see the module's docstring.

    For Box leaves, the loss is half the squared error, or the Huber loss, of the policy's mode, averaged over the
    entries. For other leaves, the loss is the cross-entropy.

    Args:
      expert: class or factory of the teacher: `@saved_policy`, or an `Expert` of your own.
      huber_delta: error beyond which the loss of Box leaves is linear; None means half the squared error.
      torso: class or factory of the torso; called with the observation spec. The torso may have memory.
      policy_head: class or factory of the head; called with the torso's output size and the action spec. By default
        actions have a standard deviation of 0.1, in units of half the action's range.
    """

    on_policy = True
    unroll_use = UnrollUse(single_epoch=False, handles_stale_policies=True)

    def __init__(
        self,
        observation_spec: Nest,
        action_spec: Nest,
        reward_spec: spaces.Box,
        *,
        expert: Callable[[], Expert] = gin.REQUIRED,
        huber_delta: PositiveFloat | None = None,
        torso: Callable[[Nest], Any] = Torso,
        policy_head: Callable[[int, Nest], Any] = FIXED_HEAD,
    ):
        super().__init__(
            observation_spec, action_spec, reward_spec, expert=expert, torso=torso, policy_head=policy_head
        )
        self._huber_delta = huber_delta

    def train_step(self, experience: Experience, state: Nest) -> AlgStep:
        of_student = None if state is None else state[0]
        features, _ = self.torso(experience.time_step, of_student)
        return AlgStep(info=BCTrain(self._policy(features, experience.time_step), experience.info.label))

    def calc_loss(self, experience: Experience, info: BCTrain) -> LossInfo:
        parts = nest.leaves(info.policy, is_leaf=is_distribution)
        leaves = zip(nest.leaves(self.action_spec), parts, nest.leaves(info.action))
        loss = sum_of(
            self._regression(part.mode() - label) if isinstance(spec, spaces.Box) else -part.log_prob(label)
            for spec, part, label in leaves
        )
        with torch.no_grad():
            extra = {"log_prob": info.policy.log_prob(info.action)}
        return LossInfo(loss, extra=extra)

    def _regression(self, error: torch.Tensor) -> torch.Tensor:
        loss = losses.half_squared(error) if self._huber_delta is None else losses.huber(error, self._huber_delta)
        return loss.mean(-1)
