"""Base of algorithms in which a student acts, an expert labels the student's rows with actions, and the student learns
to reproduce these labels."""

from collections.abc import Callable
from typing import Any, NamedTuple

from gymnasium import spaces

from alfish.algorithms.bc import BC
from alfish.algorithms.contract import check_action, return_error
from alfish.algorithms.imitation.expert import AbsentExpert, Expert, make_expert
from alfish.data import AlgStep, Experience, TimeStep
from alfish.nest import Nest


class LabelledRollout(NamedTuple):
    label: Nest  # [B, ...] action of the expert


class Apprentice(BC):
    """Base class of students that act while an expert labels their rows; subclasses describe the arguments.

    The policy's state contains the state of the student and of the expert, because an expert with memory must see all
    rows of the student's episodes.
    """

    def __init__(
        self,
        observation_spec: Nest,
        action_spec: Nest,
        reward_spec: spaces.Box,
        *,
        expert: Callable[[], Expert],
        torso: Callable[[Nest], Any],
        policy_head: Callable[[int, Nest], Any],
    ):
        super().__init__(observation_spec, action_spec, reward_spec, torso=torso, policy_head=policy_head)
        self.expert = make_expert(expert, f"{type(self).__name__}.expert")
        self.expert.check_specs(observation_spec, action_spec)
        self.replay_needs = self.replay_needs._replace(info=("label",))

    def initial_state(self, batch_size: int) -> Nest:
        return super().initial_state(batch_size), self.expert.initial_state(batch_size)

    def rollout_step(self, time_step: TimeStep, state: Nest) -> AlgStep:
        of_student, of_expert = state
        student = super().rollout_step(time_step, of_student)
        if isinstance(self.expert, AbsentExpert):
            return student._replace(state=(student.state, of_expert))
        label, of_expert = self._label(time_step, of_expert)
        action = self.executed_action(time_step, student.output, label)
        return AlgStep(action, (student.state, of_expert), LabelledRollout(label))

    def predict_step(self, time_step: TimeStep, state: Nest) -> AlgStep:
        of_student, of_expert = state
        student = super().predict_step(time_step, of_student)
        return student._replace(state=(student.state, of_expert))

    def train_step(self, experience: Experience, state: Nest) -> AlgStep:
        if experience.state is not None:
            experience = experience._replace(state=experience.state[0])
        return super().train_step(experience, experience.state)

    def _label(self, time_step: TimeStep, state: Nest) -> tuple[Nest, Nest]:
        """Returns the labels and the next state of the expert; raises UsageError if the expert's result is wrong."""
        result = self.expert(time_step, state)
        if not isinstance(result, tuple) or len(result) != 2:
            raise return_error(result, "(labels, state)", self.expert, "forward")
        check_action(result[0], self.expert, "forward", self.action_spec, len(time_step.reward))
        return result

    def executed_action(self, time_step: TimeStep, sampled: Nest, label: Nest) -> Nest:
        """Returns the actions `[B, ...]` to execute, from samples and labels. Default: the student's samples."""
        return sampled
