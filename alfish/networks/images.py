"""Encoders of images: convolutions and a linear layer. `specs.has_channels_last` tells where the channels are."""

import math
from collections.abc import Sequence

import gin
import numpy as np
import torch
from gymnasium import spaces
from torch import nn

from alfish import specs
from alfish.errors import UsageError
from alfish.networks.layers import orthogonal
from alfish.parameters import PositiveInt, checked

# Numbers in images that are encoded at a time without gradient on a CPU, 148 stacks of Atari's frames: larger
# intermediate tensors leave the processor's caches, and a row takes three quarters more time.
BLOCK = 1 << 22


def is_image(spec: spaces.Space) -> bool:
    """Returns True if a leaf is a Box of three dimensions, of uint8 or with at least 36 x 36 pixels."""
    if not isinstance(spec, spaces.Box) or len(spec.shape) != 3:
        return False
    return spec.dtype == np.uint8 or sorted(spec.shape)[1] >= 36


def encoder_by_size(spec: spaces.Space) -> type["_ImageEncoder"] | None:
    """Returns the encoder of an image of this size; None for less than 3 x 3 pixels."""
    height, width = _image_shape(spec)[1:]
    if min(height, width) >= 36:
        return NatureCNN
    return SmallCNN if min(height, width) >= 3 else None


class _ImageEncoder(nn.Module):
    """Reshapes `[*, H, W, C]` or `[*, C, H, W]` to `[N, C, H, W]`, scales it to [0, 1], and encodes it."""

    body: nn.Module

    def __init__(self, spec: spaces.Box, output_size: int):
        super().__init__()
        if len(spec.shape) != 3:
            raise UsageError(f"{type(self).__name__} encodes images [H, W, C] or [C, H, W], not a leaf of {spec.shape}")
        self._channels_last = specs.has_channels_last(spec.shape)
        self._scale = integer_scale(spec)
        self.output_size = output_size
        self.image_shape = _image_shape(spec)

    def with_linear(self, convolutions: list[nn.Module]) -> nn.Sequential:
        """Returns the layers, followed by a linear layer of `output_size` features, as the encoder's body."""
        layers = nn.Sequential(*convolutions, nn.Flatten())
        with torch.no_grad():
            flat_size = layers(torch.zeros(1, *self.image_shape)).numel()
        return nn.Sequential(layers, orthogonal(nn.Linear(flat_size, self.output_size)), nn.ReLU())

    def forward(self, leaf: torch.Tensor) -> torch.Tensor:
        images = leaf.reshape(-1, *leaf.shape[-3:])
        rows = max(1, BLOCK // math.prod(self.image_shape))
        if len(images) > rows and images.device.type == "cpu" and not torch.is_grad_enabled():
            features = torch.cat([self._encode(block) for block in images.split(rows)])
        else:
            features = self._encode(images)
        return features.reshape(*leaf.shape[:-3], self.output_size)

    def _encode(self, images: torch.Tensor) -> torch.Tensor:
        if self._channels_last:
            images = images.movedim(-1, -3)
        # Convolutions on a CPU take a third less time where a pixel's channels are neighbours in memory. The layout is
        # changed first, because bytes move faster than floats.
        if images.device.type == "cpu":
            images = images.contiguous(memory_format=torch.channels_last)
        return self.body(images.to(torch.float32) * self._scale)


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
        layers: list[nn.Module] = []
        for inputs, outputs, kernel, stride in ((channels, 32, 8, 4), (32, 64, 4, 2), (64, 64, 3, 1)):
            layers += [orthogonal(nn.Conv2d(inputs, outputs, kernel, stride)), nn.ReLU()]
        self.body = self.with_linear(layers)


@gin.configurable(module="alfish.networks")
@checked
class SmallCNN(_ImageEncoder):
    """3 x 3 convolutions, of stride 2 after the first, and a linear layer, for small images.

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
        self.body = self.with_linear(layers)


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
        layers: list[nn.Module] = []
        for inputs, outputs in zip((self.image_shape[0], *channels), channels):
            layers += [orthogonal(nn.Conv2d(inputs, outputs, 3, padding=1)), nn.MaxPool2d(3, 2, padding=1)]
            layers += [_Residual(outputs), _Residual(outputs)]
        self.body = self.with_linear([*layers, nn.ReLU()])


class _Residual(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        convolutions = [orthogonal(nn.Conv2d(channels, channels, 3, padding=1)) for _ in range(2)]
        self.body = nn.Sequential(nn.ReLU(), convolutions[0], nn.ReLU(), convolutions[1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(x)


def _image_shape(spec: spaces.Space) -> tuple[int, ...]:
    """Returns channels, height and width."""
    assert spec.shape is not None
    return (spec.shape[2], *spec.shape[:2]) if specs.has_channels_last(spec.shape) else tuple(spec.shape)


def integer_scale(spec: spaces.Space) -> float:
    """Returns the factor that scales a bounded integer Box to [-1, 1], or to [0, 1] if its low is 0; else 1."""
    if not isinstance(spec, spaces.Box) or not np.issubdtype(spec.dtype, np.integer) or not spec.is_bounded("both"):
        return 1.0
    largest = max(abs(float(np.max(spec.high))), abs(float(np.min(spec.low))))
    return 1.0 / largest if 0 < largest < np.iinfo(np.int32).max else 1.0
