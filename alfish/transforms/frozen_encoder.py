"""An encoder that does not train; its features are stored instead of its input."""

from collections.abc import Callable
from typing import Any

import gin
import numpy as np
import torch
from gymnasium import spaces

from alfish import nest, specs
from alfish.errors import UsageError
from alfish.nest import Nest
from alfish.networks.images import encoder_by_size, is_image
from alfish.parameters import checked
from alfish.parameters.parts import build_network
from alfish.transforms.transform import Transform


@gin.configurable(module="alfish.transforms")
@checked
class FrozenEncoder(Transform):
    """Encodes one leaf of each observation once, when its row arrives. The leaf becomes a vector of features.

    Unrolls and replay store the features instead of the leaf, an exception to the rule that stored rows are raw. Other
    transforms cannot change the leaf before it is encoded, so this transform must precede them. Environments and saved
    policies receive the leaf itself. Recorded data contain the leaf, so training on them is refused.

    Checkpoints contain the encoder's parameters. The parameters do not train, and the encoder is in evaluation mode.

    Args:
      observation_spec, reward_spec: specs of the input rows.
      encoder: class or factory of the encoder; called with the leaf's space. The encoder maps `[N, *shape]` to features
        `[N, F]`. None means the encoder that `networks.Encoder` chooses by the size of the image.
      leaf: path of the leaf; None means the only leaf, or the only image.
      source: part of another run from which a new run reads the encoder's parameters,
        `'network.actor_torso.encoder.encoders.0@runs/x'`; see `transfer`. None keeps the initial parameters.
    """

    encodes = True

    def __init__(
        self,
        observation_spec: Nest,
        reward_spec: spaces.Box,
        encoder: Callable[..., Any] | None = None,
        leaf: str | None = None,
        source: str | None = None,
    ):
        super().__init__(observation_spec, reward_spec)
        self.source = source
        paths, leaves = nest.paths(observation_spec), nest.leaves(observation_spec)
        images = [path for path, space in zip(paths, leaves) if is_image(space) or len(paths) == 1]
        if leaf is None and len(images) != 1:
            raise UsageError(f"the observation has {len(images)} images; set FrozenEncoder.leaf to one of {paths}")
        path = images[0] if leaf is None else leaf
        if path not in paths:
            found = specs.leaves_in_words("the observation", observation_spec)
            raise UsageError(f"FrozenEncoder.leaf is {path!r}; {found}")
        self._index = paths.index(path)
        space = leaves[self._index]
        factory: Any = encoder or (encoder_by_size(space) if is_image(space) else None)
        if factory is None:
            raise UsageError(f"FrozenEncoder has no encoder for {space}; set FrozenEncoder.encoder")
        self.encoder = build_network(factory, "FrozenEncoder.encoder", space, has=()).requires_grad_(False)
        self.train()
        features = self._features(specs.zeros(space, (1,)))
        if features.ndim != 2:
            raise UsageError(f"FrozenEncoder.encoder returns {list(features.shape)} for one {space}; it must be [1, F]")
        leaves[self._index] = spaces.Box(-np.inf, np.inf, features.shape[1:], np.float32)
        self.observation_spec = nest.unflatten(nest.flatten(observation_spec)[1], leaves)

    def encode(self, observation: Nest) -> Nest:
        leaves, structure = nest.flatten(observation)
        leaves[self._index] = self._features(leaves[self._index])
        return nest.unflatten(structure, leaves)

    def train(self, mode: bool = True) -> "FrozenEncoder":
        """Sets the mode, but keeps the encoder in evaluation mode."""
        return super().train(False)

    @torch.no_grad()
    def _features(self, leaf: torch.Tensor) -> torch.Tensor:
        """Returns the features `[N, F]` of a leaf `[N, ...]`."""
        return self.encoder(leaf).to(torch.float32)
