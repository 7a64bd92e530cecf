"""Parts of a composed algorithm: rewards that are computed from rows, and representations.

A part has networks and a loss of its own, which trains its parameters and no others. Its hooks are pure, but for
`after_update` and `after_iteration`, as those of an algorithm are. Statistics are buffers, so that checkpoints, workers
and graphs receive them; with several learners, sums over rows are `replicas.total`.
"""

import abc
from typing import Any, NamedTuple

import torch
from torch import nn

from alfish import nest
from alfish.data import Experience, LossInfo, TimeStep
from alfish.nest import Nest
from alfish.schedules import Schedule, as_schedule


class Transitions(NamedTuple):
    """Steps of environments, `[...]`: a row, the action that was executed there, and the row that it led to.

    Steps that do not train (`data.trainable`) may hold any finite numbers, because their rewards and losses are masked.
    """

    observation: Nest  # [...]
    action: Nest  # [...] in the algorithm's units, clipped to its bounds
    next_observation: Nest  # [...]
    next_discount: torch.Tensor  # [...] 0 where the environment terminated


def transitions_of(time_step: TimeStep) -> Transitions:
    """Returns the T - 1 steps between T consecutive rows `[T, N]`."""
    now, later = nest.at(time_step.observation, slice(0, -1)), nest.at(time_step, slice(1, None))
    return Transitions(now, later.prev_action, later.observation, later.discount)


class Part(nn.Module, abc.ABC):
    """Networks with a loss of their own, beside an algorithm.

    Args:
      observation_spec: nest of spaces, after transforms.
      action_spec: canonical action nest.
    """

    def __init__(self, observation_spec: Nest, action_spec: Nest):
        super().__init__()
        self.observation_spec, self.action_spec = observation_spec, action_spec

    @property
    def name(self) -> str:
        """Name of the parameter group, and prefix of what summaries show; the class's in small letters."""
        return type(self).__name__.lower()

    def loss(self, transitions: Transitions) -> LossInfo | None:
        """Returns a loss for each step, `[...]`; None: the part has nothing to train.

        The learner masks and averages it, and differentiates it for this part's parameters.
        """
        return None

    def after_update(self) -> None:
        """Changes buffers after every gradient step, under no_grad. Default: does nothing."""

    def after_iteration(self, experience: Experience, num_seen: int) -> None:
        """Updates statistics with the rows of an iteration, under no_grad. Default: does nothing.

        Args:
          experience: `[T, B]`, after transforms.
          num_seen: number of first rows that the call before had too.
        """


class RewardPart(Part):
    """A reward that is computed from steps of the environment.

    Args:
      observation_spec, action_spec: see `Part`.
      coef: weight of the reward; number or schedule of progress.
      episodic: False: returns of this reward go on after an episode's end, from the value of its last observation.
        This needs a value of its own (`Composed.separate_values`).
    """

    def __init__(self, observation_spec: Nest, action_spec: Nest, coef: float | Schedule = 1.0, episodic: bool = True):
        super().__init__(observation_spec, action_spec)
        self.coef, self.episodic = as_schedule(coef), episodic

    @abc.abstractmethod
    def reward(self, transitions: Transitions) -> torch.Tensor:
        """Returns the reward `[...]` of arriving at the next rows, before `coef`. It is called without gradients."""


class Representation(Part):
    """Features of observations, which an algorithm gets in their place; `loss` trains them, the algorithm does not.

    Attributes:
      output_size: number of features.
    """

    output_size: int

    @abc.abstractmethod
    def forward(self, observation: Nest) -> Any:
        """Returns the features `[..., output_size]` of observations `[...]`."""
