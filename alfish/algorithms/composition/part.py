"""Parts of a composed algorithm: rewards that are computed from rows, representations, and auxiliary losses.

A part has networks and its own loss. The loss trains the part's parameters only; an auxiliary loss (`auxiliary`) also
trains the algorithm's features. The hooks of a part are pure, except `after_update` and `after_iteration`, like those
of an algorithm. Statistics are buffers, so that checkpoints, workers and graphs receive them. With several learners,
`replicas.total` computes sums over the rows of all learners.
"""

import abc
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import gin
import torch
from torch import nn

from alfish import nest, specs
from alfish.data import Experience, LossInfo, TimeStep
from alfish.nest import Nest
from alfish.networks import Encoder
from alfish.parameters import PositiveFloat, checked
from alfish.parameters.parts import build_network
from alfish.parameters.schedules import Schedule, as_schedule
from alfish.transforms import ObservationNormalizer


class Transitions(NamedTuple):
    """Steps of environments, `[...]`: a row, the action that was executed at the row, and the next row.

    Steps that are not trainable (`data.trainable`) may hold any finite numbers; their rewards and losses are masked.
    """

    observation: Nest  # [...]
    action: Nest  # [...] in the algorithm's units, clipped to its bounds
    next_observation: Nest  # [...]
    next_discount: torch.Tensor  # [...] 0 where the environment terminated
    trains: torch.Tensor | None = None  # [...] bool, mask of the trainable steps; None if no part `reads_policy`


def transitions_of(time_step: TimeStep) -> Transitions:
    """Returns the T - 1 steps between T consecutive rows `[T, N]`."""
    now, later = nest.at(time_step.observation, slice(0, -1)), nest.at(time_step, slice(1, None))
    return Transitions(now, later.prev_action, later.observation, later.discount)


LogProb: TypeAlias = Callable[[Nest, Nest], torch.Tensor]  # called with observations and actions, both `[...]`


class Part(nn.Module, abc.ABC):
    """Networks with their own loss, used together with an algorithm.

    Args:
      observation_spec: nest of spaces, after transforms.
      action_spec: canonical spec of the actions, see `alfish.specs`.
    """

    reads_policy = False  # whether the loss is `loss_given_policy`, which reads log-probabilities of actions

    def __init__(self, observation_spec: Nest, action_spec: Nest):
        super().__init__()
        self.observation_spec, self.action_spec = observation_spec, action_spec

    @property
    def name(self) -> str:
        """Name of the parameter group and prefix of names in summaries: the class's name in lower case."""
        return type(self).__name__.lower()

    def loss(self, transitions: Transitions) -> LossInfo | None:
        """Returns a loss for each step, `[...]`; None if the part has nothing to train.

        The learner masks and averages the loss, and differentiates it for this part's parameters.
        """
        return None

    def loss_given_policy(self, transitions: Transitions, log_prob: LogProb) -> LossInfo | None:
        """Returns the loss of a part with `reads_policy`; see `loss`.

        Args:
          transitions: steps `[...]`; the learner averages the loss over the mask `trains`.
          log_prob: function from observations and actions, `[...]` each, to the actions' log-probability under the
            current policy, `[...]` without gradient.
        """
        return self.loss(transitions)

    def after_update(self) -> None:
        """Updates buffers after every gradient step, under no_grad. Default: does nothing."""

    def after_iteration(self, experience: Experience, num_seen: int) -> None:
        """Updates statistics with the rows of an iteration, under no_grad. Default: does nothing.

        Args:
          experience: rows `[T, B]`, after transforms.
          num_seen: number of first rows that were already in the previous call; statistics must not count them twice.
        """


class RewardPart(Part):
    """A reward that is computed from steps of the environment.

    Args:
      observation_spec, action_spec: specs of the transformed observations and of the actions, see `Part`.
      coef: weight of the reward; a number or a schedule of progress.
      episodic: whether returns of this reward end with the episode. Otherwise returns continue: they bootstrap from the
        value of the episode's last observation. This requires a separate value for the reward
        (`Composed.separate_values`).
    """

    def __init__(self, observation_spec: Nest, action_spec: Nest, coef: float | Schedule = 1.0, episodic: bool = True):
        super().__init__(observation_spec, action_spec)
        self.coef, self.episodic = as_schedule(coef), episodic

    @abc.abstractmethod
    def reward(self, transitions: Transitions) -> torch.Tensor:
        """Returns the unweighted reward `[...]` of arriving at the next rows; called without gradients."""


class Representation(Part):
    """Features that replace an algorithm's observations; only `loss` trains the features.

    Attributes:
      output_size: number of features.
    """

    output_size: int

    @abc.abstractmethod
    def forward(self, observation: Nest) -> Any:
        """Returns the features `[..., output_size]` of observations `[...]`."""


@gin.configurable(module="alfish.composition")
@checked
class NormalizedObservation(Representation):
    """Normalizes float leaves to mean 0 and standard deviation 1 over all rows so far, clips them, and joins leaves.

    The algorithm receives these features, while other parts of `Composed` receive the observations themselves.

    Args:
      observation_spec, action_spec: specs of the transformed observations and of the actions, see `Part`.
      encoder: class or factory of the encoder; called with the spec of normalized observations. The encoder is not
        trained.
      clip: largest absolute entry of a normalized observation.
    """

    def __init__(
        self,
        observation_spec: Nest,
        action_spec: Nest,
        encoder: Callable[[Nest], Any] = Encoder,
        clip: PositiveFloat = 10.0,
    ):
        super().__init__(observation_spec, action_spec)
        self.normalizer = ObservationNormalizer(observation_spec, specs.reward_spec(), ("*",), clip, 1e-8)
        seen = self.normalizer.observation_spec
        self.encoder: Any = build_network(encoder, "NormalizedObservation.encoder", seen).requires_grad_(False)
        self.output_size: int = self.encoder.output_size

    def forward(self, observation: Nest) -> torch.Tensor:
        return self.encoder(self.normalizer.normalize(observation))

    def after_iteration(self, experience: Experience, num_seen: int) -> None:
        self.normalizer.observe(nest.at(experience.time_step, slice(num_seen, None)))
