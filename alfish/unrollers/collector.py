"""Whole episodes for a program without a trainer: `SyncUnroller.generate_episodes`."""

from typing import Protocol

import numpy as np

from alfish import nest
from alfish.data import AlgStep, StepType, TimeStep
from alfish.environments import Environment
from alfish.errors import RunError
from alfish.nest import Nest, as_array
from alfish.unrollers.episodes import StartedEpisodes


class Stepper(Protocol):
    """Steps environments with a policy.

    Attributes:
      environment: the environments.
      time_step: the row to act from, `[B]`.
      start_state: the policy's state at an episode's start, and the transforms' state before the row to act from.
    """

    environment: Environment
    time_step: TimeStep

    @property
    def start_state(self) -> tuple[Nest, Nest]: ...

    def act(self) -> tuple[AlgStep, Nest]:
        """Returns the policy's step from `time_step` and the transforms' next state."""

    def advance(self, step: AlgStep, transform_state: Nest) -> None:
        """Executes an action; the row that arrives becomes `time_step`."""


def run_episodes(stepper: Stepper, num_episodes: int) -> list[tuple[Nest, Nest]]:
    """Runs the first `num_episodes` episodes that start, each to its end.

    Args:
      stepper: its next rows are FIRST.
      num_episodes: at least 1.

    Returns:
      One pair per episode, in the order of their starts: `start_state` at the FIRST row, leaves `[1, ...]`, and the
      rows (time step, action, info), leaves `[T+1, 1, ...]`.

    Raises:
      RunError: an environment was rebuilt.
    """
    environment = stepper.environment
    episodes = StartedEpisodes(environment.num_envs, num_episodes)
    while not episodes.complete:
        start = stepper.start_state
        step, transform_state = stepper.act()
        record = step.output, step.info
        episodes.add(as_array(stepper.time_step.step_type), (stepper.time_step, *record), start)
        if episodes.complete:  # the LAST rows need no action
            break
        stepper.advance(step, transform_state)
        if environment.broken is not None:
            broken = np.flatnonzero(environment.broken).tolist()
            raise RunError(
                f"environments {broken} raised and were rebuilt, so their episodes are not whole; fix them, or "
                "collect with generate_batch"
            )
        resets = environment.take_resets()
        if resets is not None:
            ended, first = resets
            step_type = np.where(as_array(ended), as_array(stepper.time_step.step_type), StepType.PAD)
            episodes.add(step_type, (stepper.time_step, *record), start)
            stepper.time_step = nest.where(ended, first, stepper.time_step)
    return [episodes.whole[k] for k in range(num_episodes)]
