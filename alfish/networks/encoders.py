"""Encoders map an observation nest to one feature vector. A torso maps time steps to features for heads.

The space of a leaf determines its encoder. Discrete and MultiDiscrete leaves become one-hot. Images (`networks.images`)
get a CNN that depends on their size: `NatureCNN` from 36 x 36 pixels on, `SmallCNN` from 3 x 3. All other leaves are
flattened to float. Each entry of a bounded integer Box is divided by its largest absolute value; all pixels of an image
are divided by the same number.
"""

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import gin
import numpy as np
import torch
from absl import logging
from gymnasium import spaces
from torch import nn

from alfish import nest
from alfish.data import TimeStep
from alfish.errors import UsageError
from alfish.nest import Nest
from alfish.networks.images import bound_scale, encoder_by_size, is_image
from alfish.networks.layers import MLP
from alfish.parameters import checked
from alfish.parameters.parts import build_memory, build_network, check_features
from alfish.specs import ActionMask, leaves_in_words, torch_dtype

# Function from a leaf's space to a module with `output_size` that maps [*, *shape] to [*, output_size].
LeafEncoder = Callable[..., Any]


@gin.configurable(module="alfish.networks")
@checked
class Encoder(nn.Module):
    """Encodes every leaf and concatenates the features in the order of the leaves.

    Args:
      observation_spec: nest of spaces.
      image: encoder of image leaves; None means a choice by the size of the image.
      vector: encoder of every other Box and MultiBinary leaf; None means `Flat`.
      discrete: encoder of Discrete and MultiDiscrete leaves; None means `OneHot`.
      leaves: encoders of single leaves by path (`{'camera.left': @ImpalaCNN}`); they take precedence over `image`,
        `vector` and `discrete`. None drops a leaf. The path of a Dict or Tuple means all its leaves.
      sees_mask: whether an action mask is encoded like other leaves. If not, it is left out.
    """

    def __init__(
        self,
        observation_spec: Nest,
        image: LeafEncoder | None = None,
        vector: LeafEncoder | None = None,
        discrete: LeafEncoder | None = None,
        leaves: Mapping[str, LeafEncoder | None] | None = None,
        sees_mask: bool = False,
    ):
        super().__init__()
        specs, paths = nest.leaves(observation_spec), nest.paths(observation_spec)
        _check_spaces(observation_spec, image)
        overrides = _by_leaf(leaves or {}, observation_spec)

        def choose(path: str, spec: spaces.Space) -> tuple[str, LeafEncoder | None]:
            if path in overrides or (isinstance(spec, ActionMask) and not sees_mask):
                return f"Encoder.leaves[{path!r}]", overrides.get(path)
            if isinstance(spec, (spaces.Discrete, spaces.MultiDiscrete)):
                return "Encoder.discrete", discrete or OneHot
            if is_image(spec):
                return "Encoder.image", image or encoder_by_size(spec) or Flat
            return "Encoder.vector", vector or Flat

        chosen = [choose(path, spec) for path, spec in zip(paths, specs)]
        self._sees = [make is not None for _, make in chosen]
        if not any(self._sees):
            if overrides:
                raise UsageError(f"Encoder.leaves drops every leaf of the observation, {paths}; keep at least one")
            raise UsageError("the observation consists of an action mask only; set Encoder.sees_mask = True")
        seen = [*itertools.compress(specs, self._sees)]
        encoders = [build_network(make, name, spec) for (name, make), spec in zip(chosen, specs) if make]
        for encoder, (name, _), spec in zip(encoders, itertools.compress(chosen, self._sees), seen):
            if not type(encoder).__module__.startswith("alfish."):
                check_features(encoder, name, spec.shape or (), torch_dtype(spec))
        self.encoders = nn.ModuleList(encoders)
        self.output_size: int = sum(encoder.output_size for encoder in encoders)

        # A fast path for a single vector leaf, because rollouts encode many small batches.
        self._is_plain = isinstance(observation_spec, spaces.Box) and type(self.encoders[0]).forward is Flat.forward
        self._is_plain = self._is_plain and observation_spec.dtype == np.float32 and len(observation_spec.shape) == 1

    def forward(self, observation: Nest) -> torch.Tensor:
        if self._is_plain:
            return observation
        leaves = itertools.compress(nest.leaves(observation), self._sees)
        features = [encoder(leaf) for encoder, leaf in zip(self.encoders, leaves)]
        return features[0] if len(features) == 1 else torch.cat(features, -1)


def _check_spaces(observation_spec: Any, image: LeafEncoder | None) -> None:
    """Raises UsageError if an encoder was called with something other than spaces, such as a number of features.

    Logs a warning if an encoder of images was given, but there is no image.
    """
    if not all(isinstance(spec, spaces.Space) for spec in nest.leaves(observation_spec)):
        raise UsageError(
            f"Encoder encodes observations, but was called with {observation_spec!r} in place of their spaces; where "
            "features are the input, give a class such as MLP, or GRU for a memory"
        )
    if image and not any(map(is_image, nest.leaves(observation_spec))):
        logging.warning("Encoder.image is not used: %s has no image; set Encoder.leaves", observation_spec)


def _by_leaf(given: Mapping[str, LeafEncoder | None], observation_spec: Nest) -> dict[str, LeafEncoder | None]:
    """Returns the encoder of each leaf. A key is the path of a leaf or of a Dict; the longest match counts."""
    paths = nest.paths(observation_spec)
    found: dict[str, LeafEncoder | None] = {}
    for name, make in sorted(given.items()):  # a leaf comes after the Dict that it is in
        named = [path for path in paths if path == name or path.startswith(f"{name}.")]
        if not named:
            raise UsageError(f"Encoder.leaves names {name!r}; {leaves_in_words('the observation', observation_spec)}")
        found |= dict.fromkeys(named, make)
    return found


@gin.configurable(module="alfish.networks")
@checked
class Flat(nn.Module):
    """Flattens a leaf to float32; each entry of a bounded integer Box is scaled to lie in [-1, 1]."""

    def __init__(self, spec: spaces.Space):
        super().__init__()
        self._ndim = len(spec.shape or ())
        scale = bound_scale(spec)
        if np.all(scale == scale.flat[0]):
            self._scale = float(scale.flat[0])
        else:
            self.register_buffer("_scale", torch.from_numpy(scale.astype(np.float32)), persistent=False)
        self.output_size = int(np.prod(spec.shape or ()))

    def forward(self, leaf: torch.Tensor) -> torch.Tensor:
        if leaf.dtype != torch.float32:
            leaf = leaf.to(torch.float32) * self._scale
        return leaf if self._ndim == 1 else leaf.reshape(*leaf.shape[: leaf.ndim - self._ndim], self.output_size)


@gin.configurable(module="alfish.networks")
@checked
class OneHot(nn.Module):
    """One-hot code of a Discrete or MultiDiscrete leaf; an entry outside its range has a code of zeros."""

    def __init__(self, spec: spaces.Discrete | spaces.MultiDiscrete):
        super().__init__()
        if not isinstance(spec, (spaces.Discrete, spaces.MultiDiscrete)):
            raise UsageError(f"OneHot encodes Discrete and MultiDiscrete leaves, not {spec}; use Flat for this leaf")
        self._sizes = [int(spec.n)] if isinstance(spec, spaces.Discrete) else [int(n) for n in spec.nvec.reshape(-1)]
        self._ndim = len(spec.shape or ())
        self.output_size = sum(self._sizes)

    def forward(self, leaf: torch.Tensor) -> torch.Tensor:
        digits = leaf.reshape(*leaf.shape[: leaf.ndim - self._ndim], -1).long()
        # F.one_hot is not used, because it reads values to check them, which has no translation to numpy.
        codes = [
            digit == torch.arange(size, device=leaf.device) for digit, size in zip(digits.split(1, -1), self._sizes)
        ]
        return torch.cat(codes, -1).to(torch.float32)


@gin.configurable(module="alfish.networks")
@checked
class Torso(nn.Module):
    """An encoder, followed by an MLP, and optionally by a memory.

    Args:
      observation_spec: nest of spaces.
      encoder: class or factory of the encoder; called with the spec.
      mlp: class or factory of the MLP; called with the encoder's output size.
      memory: class or factory of the memory (`@GRU`, `@LSTM`, `@MinGRU`, `@AttentionWindow`, `@StackedMemory`); called
        with the MLP's output size. None means no memory.
    """

    def __init__(
        self,
        observation_spec: Nest,
        encoder: Callable[[Nest], Any] = Encoder,
        mlp: Callable[[int], Any] = MLP,
        memory: Callable[[int], Any] | None = None,
    ):
        super().__init__()
        self.encoder: Any = build_network(encoder, "Torso.encoder", observation_spec)
        self.mlp: Any = build_network(mlp, "Torso.mlp", self.encoder.output_size)
        self.memory: Any = memory and build_memory(memory, "Torso.memory", self.mlp.output_size)
        self.output_size: int = (self.memory or self.mlp).output_size

    def initial_state(self, batch_size: int) -> Nest:
        """Returns the memory's initial state; None without memory."""
        return None if self.memory is None else self.memory.initial_state(batch_size)

    def forward(self, time_step: TimeStep, state: Nest) -> tuple[torch.Tensor, Nest]:
        """Returns features `[..., output_size]`, and the next state."""
        features = self.mlp(self.encoder(time_step.observation))
        return (features, state) if self.memory is None else self.memory(features, state, time_step.step_type)
