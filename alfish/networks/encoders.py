"""Encoders: an observation nest in, one feature vector out.

The encoder of a leaf is chosen from its space: images go through a CNN, Discrete and MultiDiscrete become one-hot,
everything else is flattened to float. An image is a Box of three dimensions whose two larger ones are at least 36, or
any three-dimensional uint8 Box; its channels are its smallest end, first or last. Its size chooses the CNN: `NatureCNN`
for 36 x 36 or more, `SmallCNN` for 3 x 3 or more; a smaller one is flattened. A bounded integer Box is scaled to [0, 1]
by its space's high.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gin
import numpy as np
import torch
import torch.nn.functional as F
from gymnasium import spaces
from torch import nn

from alfish import nest
from alfish.errors import UsageError
from alfish.nest import Nest
from alfish.networks.initializers import orthogonal
from alfish.parameters import PositiveInt, checked

# Takes a leaf's space, and makes a module that has `output_size` and maps [*, *shape] to [*, output_size].
LeafEncoder = Callable[..., Any]


@gin.configurable(module="alfish.networks")
@checked
class Encoder(nn.Module):
    """Encodes every leaf and concatenates the features in the order of the leaves.

    Args:
      observation_spec: nest of spaces.
      image: encoder of image leaves; None: chosen by their size.
      vector: encoder of every other Box and MultiBinary leaf.
      discrete: encoder of Discrete and MultiDiscrete leaves.
      leaves: encoders for single leaves by path (`{'camera.left': @ImpalaCNN}`), before any rule.
    """

    def __init__(
        self,
        observation_spec: Nest,
        image: LeafEncoder | None = None,
        vector: LeafEncoder | None = None,
        discrete: LeafEncoder | None = None,
        leaves: Mapping[str, LeafEncoder] | None = None,
    ):
        super().__init__()
        specs, paths, overrides = nest.leaves(observation_spec), nest.paths(observation_spec), dict(leaves or {})
        unknown = sorted(set(overrides) - set(paths))
        if unknown:
            raise UsageError(f"Encoder.leaves names {unknown[0]!r}; the observation's leaves are {sorted(paths)}")

        def choose(path: str, spec: spaces.Space) -> LeafEncoder:
            if path in overrides:
                return overrides[path]
            if isinstance(spec, (spaces.Discrete, spaces.MultiDiscrete)):
                return discrete or OneHot
            return (image or _encoder_by_size(spec)) if is_image(spec) else (vector or Flat)

        encoders = [choose(path, spec)(spec) for path, spec in zip(paths, specs)]
        self.encoders = nn.ModuleList(encoders)
        self.output_size: int = sum(encoder.output_size for encoder in encoders)

        # Rollout asks for one small batch at a time: a bare vector leaf goes through without a walk or a call.
        self._is_plain = isinstance(observation_spec, spaces.Box) and isinstance(self.encoders[0], Flat)
        self._is_plain = self._is_plain and observation_spec.dtype == np.float32 and len(observation_spec.shape) == 1

    def forward(self, observation: Nest) -> torch.Tensor:
        if self._is_plain:
            return observation
        features = [encoder(leaf) for encoder, leaf in zip(self.encoders, nest.leaves(observation))]
        return features[0] if len(features) == 1 else torch.cat(features, -1)


def is_image(spec: spaces.Space) -> bool:
    if not isinstance(spec, spaces.Box) or len(spec.shape) != 3:
        return False
    return spec.dtype == np.uint8 or sorted(spec.shape)[1] >= 36


def _encoder_by_size(spec: spaces.Space) -> LeafEncoder:
    height, width = _image_shape(spec)[1:]
    if min(height, width) >= 36:
        return NatureCNN
    return SmallCNN if min(height, width) >= 3 else Flat


@gin.configurable(module="alfish.networks")
@checked
class Flat(nn.Module):
    """Flattens a leaf to float32; a bounded integer Box is scaled to [0, 1]."""

    def __init__(self, spec: spaces.Space):
        super().__init__()
        self._ndim = len(spec.shape or ())
        self._scale = _integer_scale(spec)
        self.output_size = int(np.prod(spec.shape or ()))

    def forward(self, leaf: torch.Tensor) -> torch.Tensor:
        if leaf.dtype != torch.float32:
            leaf = leaf.to(torch.float32) * self._scale
        return leaf if self._ndim == 1 else leaf.reshape(*leaf.shape[: leaf.ndim - self._ndim], self.output_size)


@gin.configurable(module="alfish.networks")
@checked
class OneHot(nn.Module):
    """One-hot code of a Discrete or MultiDiscrete leaf."""

    def __init__(self, spec: spaces.Discrete | spaces.MultiDiscrete):
        super().__init__()
        self._sizes = [int(spec.n)] if isinstance(spec, spaces.Discrete) else [int(n) for n in spec.nvec.reshape(-1)]
        self._ndim = len(spec.shape or ())
        self.output_size = sum(self._sizes)

    def forward(self, leaf: torch.Tensor) -> torch.Tensor:
        digits = leaf.reshape(*leaf.shape[: leaf.ndim - self._ndim], -1).long()
        codes = [F.one_hot(digit, size) for digit, size in zip(digits.unbind(-1), self._sizes)]
        return torch.cat(codes, -1).to(torch.float32)


class _ImageEncoder(nn.Module):
    """Brings `[*, H, W, C]` or `[*, C, H, W]` of any dtype to `[N, C, H, W]` in [0, 1], and the features back."""

    body: nn.Module

    def __init__(self, spec: spaces.Box, output_size: int):
        super().__init__()
        if len(spec.shape) != 3:
            raise UsageError(f"{type(self).__name__} encodes images [H, W, C] or [C, H, W], not a leaf of {spec.shape}")
        self._channels_last = _has_channels_last(spec)
        self._scale = _integer_scale(spec)
        self.output_size = output_size
        self.image_shape = _image_shape(spec)

    def flat_size(self, convolutions: nn.Module) -> int:
        with torch.no_grad():
            return convolutions(torch.zeros(1, *self.image_shape)).numel()

    def forward(self, leaf: torch.Tensor) -> torch.Tensor:
        images = leaf.reshape(-1, *leaf.shape[-3:]).to(torch.float32) * self._scale
        if self._channels_last:
            images = images.movedim(-1, -3)
        return self.body(images).reshape(*leaf.shape[:-3], self.output_size)


@gin.configurable(module="alfish.networks")
@checked
class NatureCNN(_ImageEncoder):
    """Three convolutions and a linear layer. Source: Mnih et al., 2015, Methods."""

    def __init__(self, spec: spaces.Box, output_size: PositiveInt = 512):
        super().__init__(spec, output_size)
        channels, height, width = self.image_shape
        if min(height, width) < 36:
            raise UsageError(
                f"NatureCNN needs images of 36 x 36 or more, got {height} x {width}; bind SmallCNN, ImpalaCNN or Flat"
            )
        convolutions = nn.Sequential(
            orthogonal(nn.Conv2d(channels, 32, 8, 4)),
            nn.ReLU(),
            orthogonal(nn.Conv2d(32, 64, 4, 2)),
            nn.ReLU(),
            orthogonal(nn.Conv2d(64, 64, 3, 1)),
            nn.ReLU(),
            nn.Flatten(),
        )
        linear = orthogonal(nn.Linear(self.flat_size(convolutions), output_size))
        self.body = nn.Sequential(convolutions, linear, nn.ReLU())


@gin.configurable(module="alfish.networks")
@checked
class SmallCNN(_ImageEncoder):
    """Convolutions of 3 x 3, those behind the first of stride 2, and a linear layer, for images of few pixels.

    Args:
      spec: the image's space, of any size.
      channels: of each convolution.
      output_size: features.
    """

    def __init__(self, spec: spaces.Box, channels: Sequence[PositiveInt] = (16, 32), output_size: PositiveInt = 256):
        super().__init__(spec, output_size)
        layers: list[nn.Module] = []
        for inputs, outputs in zip((self.image_shape[0], *channels), channels):
            layers += [orthogonal(nn.Conv2d(inputs, outputs, 3, 2 if layers else 1, padding=1)), nn.ReLU()]
        convolutions = nn.Sequential(*layers, nn.Flatten())
        linear = orthogonal(nn.Linear(self.flat_size(convolutions), output_size))
        self.body = nn.Sequential(convolutions, linear, nn.ReLU())


@gin.configurable(module="alfish.networks")
@checked
class ImpalaCNN(_ImageEncoder):
    """Residual stages of one convolution, a max-pool and two residual blocks. Source: Espeholt et al., 2018, fig. 3.

    Args:
      spec: the image's space.
      channels: of each stage; each halves height and width.
      output_size: features.
    """

    def __init__(
        self, spec: spaces.Box, channels: Sequence[PositiveInt] = (16, 32, 32), output_size: PositiveInt = 256
    ):
        super().__init__(spec, output_size)
        stages, size = [], self.image_shape[0]
        for width in channels:
            stages += [orthogonal(nn.Conv2d(size, width, 3, padding=1)), nn.MaxPool2d(3, 2, padding=1)]
            stages += [_Residual(width), _Residual(width)]
            size = width
        convolutions = nn.Sequential(*stages, nn.ReLU(), nn.Flatten())
        linear = orthogonal(nn.Linear(self.flat_size(convolutions), output_size))
        self.body = nn.Sequential(convolutions, linear, nn.ReLU())


class _Residual(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        convolutions = [orthogonal(nn.Conv2d(channels, channels, 3, padding=1)) for _ in range(2)]
        self.body = nn.Sequential(nn.ReLU(), convolutions[0], nn.ReLU(), convolutions[1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(x)


def _has_channels_last(spec: spaces.Space) -> bool:
    assert spec.shape is not None
    return spec.shape[-1] <= spec.shape[0]


def _image_shape(spec: spaces.Space) -> tuple[int, ...]:
    """Channels, height, width."""
    assert spec.shape is not None
    return (spec.shape[2], *spec.shape[:2]) if _has_channels_last(spec) else tuple(spec.shape)


def _integer_scale(spec: spaces.Space) -> float:
    """What brings an integer leaf to [0, 1]: 1 / its space's high; 1 for floats, bits and unbounded integers."""
    if not isinstance(spec, spaces.Box) or not np.issubdtype(spec.dtype, np.integer):
        return 1.0
    high = float(np.max(spec.high))
    return 1.0 / high if 0 < high < np.iinfo(np.int32).max else 1.0
