"""DAgger: clones the actions of an expert in the states that the student reaches.

Ross et al., 2011, https://arxiv.org/abs/1011.0686, algorithm 3.1. In each step of a round, the student or the expert
acts, chosen at random. The expert labels every row. The student clones the labels of all rounds.

Differences from the paper: The student keeps its weights from one round to the next, instead of starting from new
initial weights. The result is the last student, not the best student of all rounds. Labels of Box actions are cloned by
maximum likelihood, as in BC.

A round is an iteration of `Trainer.unroll_length` steps. Replay must be large enough for all rows of the run.
"""

from collections.abc import Callable
from typing import Any

import gin
import torch
from gymnasium import spaces

from alfish import nest
from alfish.algorithms.imitation.apprentice import Apprentice
from alfish.algorithms.imitation.expert import Expert
from alfish.data import Experience, TimeStep
from alfish.nest import Nest
from alfish.networks import FLOORED_HEAD, Torso
from alfish.parameters import UnitInterval, checked
from alfish.parameters.schedules import Schedule, as_schedule


@gin.configurable(module="alfish.algorithms")
@checked
class DAgger(Apprentice):
    """Dataset aggregation; see the module's docstring for the paper and the differences from it.

    Args:
      expert: class or factory of the expert, which labels rows: `@saved_policy`, or an `Expert` of your own.
      beta: probability that the expert's label is executed, drawn for each environment and step; a number or a schedule
        of progress.
      torso: class or factory of the torso; called with the observation spec. The torso may have memory.
      policy_head: class or factory of the head; called with the torso's output size and the action spec.
    """

    def __init__(
        self,
        observation_spec: Nest,
        action_spec: Nest,
        reward_spec: spaces.Box,
        *,
        expert: Callable[[], Expert] = gin.REQUIRED,
        beta: UnitInterval | Schedule = 0.0,
        torso: Callable[[Nest], Any] = Torso,
        policy_head: Callable[[int, Nest], Any] = FLOORED_HEAD,
    ):
        super().__init__(
            observation_spec, action_spec, reward_spec, expert=expert, torso=torso, policy_head=policy_head
        )
        self._beta = as_schedule(beta)

    def executed_action(self, time_step: TimeStep, sampled: Nest, label: Nest) -> Nest:
        size = time_step.step_type.shape
        is_expert = torch.rand(size, device=self.progress.device) < self._beta(self.progress)
        return nest.where(is_expert, label, sampled)

    def cloned_action(self, experience: Experience) -> Nest:
        return experience.info["label"]
