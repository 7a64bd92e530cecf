"""Normalized observations as a representation, where parts beside the algorithm need the raw ones."""

from collections.abc import Callable
from typing import Any

import gin
import torch

from alfish import nest, specs
from alfish.composition.parts import Representation
from alfish.data import Experience
from alfish.nest import Nest
from alfish.networks import Encoder
from alfish.parameters import PositiveFloat, checked
from alfish.parameters.parts import build_network
from alfish.transforms import ObservationNormalizer


@gin.configurable(module="alfish.composition")
@checked
class NormalizedObservation(Representation):
    """Shifts and scales float leaves to mean 0 and deviation 1 over all observed rows, clips, and joins all leaves.

    The algorithm gets these features, and other parts of `Composed` the observations themselves.

    Args:
      observation_spec, action_spec: see `Part`.
      encoder: of normalized observations, takes their spec; nothing trains it.
      clip: largest absolute entry.
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
