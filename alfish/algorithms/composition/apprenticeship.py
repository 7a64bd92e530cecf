"""Apprenticeship learning: a linear reward under which a policy matches an expert's discounted sums of features.

Abbeel & Ng, 2004, https://ai.stanford.edu/~ang/papers/icml04-apprentice.pdf, the projection method (section 3.1). The
listener `alfish.training.apprenticeship.ApprenticeshipRounds` measures the policy, and ends each round.

Differences from the paper: any algorithm may train the policy, and each round continues with the policy of the previous
round; reward and expectations use the features of the observation after a step; the projection stays within the segment
from the mixture to the new expectation, because a policy that is not optimal could move the mixture away from the
expert. The result is not the mixture of the policies, but the policy whose expectation is nearest to the expert's.
"""

from collections.abc import Callable, Sequence
from typing import Any

import gin
import torch
from torch import nn

from alfish import nest, specs
from alfish.algorithms.composition.learned_reward import Demonstrations
from alfish.algorithms.composition.part import RewardPart, Transitions
from alfish.data import Experience, StepType, TimeStep
from alfish.errors import UsageError
from alfish.nest import Nest
from alfish.networks import Encoder
from alfish.offline import OfflineBuffer
from alfish.parameters import FiniteFloat, PositiveFloat, UnitInterval, checked
from alfish.parameters.parts import build_network
from alfish.parameters.schedules import Schedule
from alfish.processes import replicas
from alfish.transforms import ObservationNormalizer


@gin.configurable(module="alfish.composition")
@checked
class SigmoidFeatures(nn.Module):
    """The logistic function of each entry of a normalized observation, and a constant 1.

    The constant lets the reward contain a fixed amount per step.

    Args:
      observation_spec: spec of normalized observations.
      encoder: class or factory of the encoder; called with the spec. The encoder is not trained. The default joins
        vectors and one-hot codes.
    """

    def __init__(self, observation_spec: Nest, encoder: Callable[[Nest], Any] = Encoder):
        super().__init__()
        self.encoder: Any = build_network(encoder, "SigmoidFeatures.encoder", observation_spec)
        self.output_size: int = self.encoder.output_size + 1

    def forward(self, observation: Nest) -> torch.Tensor:
        squashed = self.encoder(observation).sigmoid()
        return torch.cat([squashed, torch.ones_like(squashed[..., :1])], -1)


@gin.configurable(module="alfish.composition")
@checked
class ApprenticeshipLearning(RewardPart):
    """A reward that is linear in features and changes after each round; see the module's docstring for the paper.

        r(s, a, s') = w . phi(s'),     mu = mean over episodes of the sum over steps t of gamma^t phi(s_{t+1})
        mixture <- mixture + share (mu - mixture),     w = d / |d| with d = mu of the expert - mixture

    The share, in [0, 1], is computed so that the new mixture is the point between the old mixture and mu that is
    nearest to the expert's mu.
    The reward of the action at row t reads the observation of row t + 1. The reward is 0 before the first round.

    Args:
      observation_spec, action_spec: specs of observations and actions, see `Part`. Observations must have the format of
        the data, so no transform may change them.
      demonstrations: class or factory of the expert's episodes, an `OfflineBuffer`.
      coef: weight of the reward; a number or a schedule of progress.
      features: class or factory of phi; called with the spec of observations normalized by the expert's mean and
        deviation; returns `[..., output_size]`, and is not trained.
      gamma: discount per environment step of the sums of features. Steps long after the first 1 / (1 - gamma) steps
        count little: with 0.99, an episode of 300 steps looks almost like one of 500.
      clip: largest absolute entry of a normalized observation.

    Attributes:
      expert: expected discounted sum of the expert's features, `[k]` float64.
      mixture: expected discounted sum of the mixture of all rounds, `[k]` float64.
      weights: weights w of the features, `[k]` float32.
      num_rounds: number of finished rounds, each of which measured one policy, 0-d int64.
    """

    name = "appl"
    expert: torch.Tensor
    mixture: torch.Tensor
    weights: torch.Tensor
    num_rounds: torch.Tensor

    def __init__(
        self,
        observation_spec: Nest,
        action_spec: Nest,
        *,
        demonstrations: Callable[..., OfflineBuffer] = OfflineBuffer,
        coef: FiniteFloat | Schedule = 1.0,
        features: Callable[[Nest], Any] = SigmoidFeatures,
        gamma: UnitInterval = 0.9,
        clip: PositiveFloat = 10.0,
    ):
        super().__init__(observation_spec, action_spec, coef)
        self._gamma, self._has_rounds = gamma, False
        name = "ApprenticeshipLearning.demonstrations"
        self.demonstrations = Demonstrations(demonstrations, name, observation_spec, action_spec)
        sees, self.normalizer = observation_spec, None
        if any(map(specs.is_float, nest.leaves(sees))):
            self.normalizer = ObservationNormalizer(sees, specs.reward_spec(), leaves=("*",), clip=clip, epsilon=1e-8)
            sees = self.normalizer.observation_spec
        made = build_network(features, "ApprenticeshipLearning.features", sees)
        self.features: Any = made.requires_grad_(False)
        for buffer in ("expert", "mixture"):
            self.register_buffer(buffer, torch.zeros(made.output_size, dtype=torch.float64))
        self.register_buffer("weights", torch.zeros(made.output_size))
        self.register_buffer("num_rounds", torch.zeros((), dtype=torch.int64))
        if self.demonstrations.lengths:
            self._begin()

    def reward(self, transitions: Transitions) -> torch.Tensor:
        return self._phi(transitions.next_observation) @ self.weights

    def after_iteration(self, experience: Experience, num_seen: int) -> None:
        """Checks in the first iteration that a listener ends the rounds.

        Raises:
          UsageError: no policy was measured before the iteration.
        """
        if not self._has_rounds and int(self.num_rounds) == 0:
            raise UsageError(
                "the reward of ApprenticeshipLearning would always be 0, because nothing closes its rounds; bind "
                "Trainer.extra_listeners = [@ApprenticeshipRounds()]"
            )
        self._has_rounds = True

    @torch.no_grad()
    def expectation(self, arrived: Nest, lengths: Sequence[int]) -> torch.Tensor:
        """Returns the mean over episodes of the discounted sum of features, `[k]` float64.

        Args:
          arrived: observation after each step, `[sum of lengths, ...]`, episode after episode.
          lengths: number of steps of each episode. Episodes must be complete.
        """
        phi = self._phi(arrived).double()
        step = torch.cat([torch.arange(length, device=phi.device) for length in lengths])
        return (self._gamma ** step.double() @ phi) / len(lengths)

    @torch.no_grad()
    def close_round(self, found: torch.Tensor) -> tuple[float, float]:
        """Adds the expectation `found` `[k]` of a policy to the mixture, and updates the reward.

        The first call sets the mixture to the first policy's expectation.

        Returns:
          The distances of the policy's and the mixture's expectations from the expert's expectation.
        """
        step, goal = found - self.mixture, self.expert - self.mixture
        share = (step @ goal / (step @ step).clamp(min=1e-30)).clamp(0.0, 1.0)
        self.mixture.add_(torch.where(self.num_rounds == 0, 1.0, share) * step)
        left = self.expert - self.mixture
        distance = left.norm()
        self.weights.copy_(left / distance.clamp(min=1e-30))
        self.num_rounds.add_(1)
        return float((self.expert - found).norm()), float(distance)

    def _phi(self, observation: Nest) -> torch.Tensor:
        return self.features(observation if self.normalizer is None else self.normalizer.normalize(observation))

    def _begin(self) -> None:
        """Computes the moments of the expert's observations, and the expert's expectation."""
        arrived, lengths = self.demonstrations.steps.next_observation, self.demonstrations.lengths
        if self.normalizer is not None:
            kinds = torch.full((1, sum(lengths)), StepType.MID, dtype=torch.int32)
            rows = TimeStep(kinds, None, None, nest.map(lambda leaf: leaf.unsqueeze(0), arrived), None, None)
            with replicas.apart(), torch.no_grad():  # no sums over learners, because all have the same data
                self.normalizer.observe(rows)
        self.expert.copy_(self.expectation(arrived, lengths))
