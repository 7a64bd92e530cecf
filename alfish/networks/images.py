"""Encoders of images: convolutions and a linear layer.

`specs.has_channels_last` determines the dimension of the channels.

An image is [H, W, C] or [C, H, W], or [H, W] if it is grey. A stack [S, ...] of images with channels counts as one
image with S * C channels.
"""

import itertools
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

# Largest number of pixel values that are encoded at once without gradient on a CPU: 148 stacks of Atari frames. Larger
# intermediate tensors do not fit into the processor's caches, and the time per row rises by three quarters.
BLOCK = 1 << 22


# Smallest height and width of grey images [H, W]; a smaller Box is treated as a vector.
SMALLEST_GREY = 8


def is_image(spec: spaces.Space) -> bool:
    """Returns whether a leaf is an image.

    A Box of three or four dimensions is an image if it has pixels, or at least 36 x 36 entries. A Box of two dimensions
    is an image if it has at least 8 x 8 pixels. A Box has pixels if it has dtype uint8, or floats from 0 to 255.
    """
    if not isinstance(spec, spaces.Box) or len(spec.shape) not in (2, 3, 4):
        return False
    if len(spec.shape) == 2:
        return _has_pixels(spec) and min(spec.shape) >= SMALLEST_GREY
    return _has_pixels(spec) or sorted(spec.shape[-3:])[1] >= 36


def _has_pixels(spec: spaces.Box) -> bool:
    return spec.dtype == np.uint8 or (specs.is_float(spec) and bool(np.all(spec.low == 0) and np.all(spec.high == 255)))


def encoder_by_size(spec: spaces.Space) -> type["ImageEncoder"] | None:
    """Returns the class of the encoder for images of this spec; None if height or width is below 3 pixels."""
    height, width = _image_shape(spec)[1:]
    if min(height, width) >= 36:
        return NatureCNN
    return SmallCNN if min(height, width) >= 3 else None


class ImageEncoder(nn.Module):
    """Encodes images, after reshaping them to `[N, C, H, W]` and dividing pixels by their largest bound."""

    body: nn.Module

    def __init__(self, spec: spaces.Box, output_size: int):
        super().__init__()
        self._ndim = len(spec.shape)
        if self._ndim not in (2, 3, 4):
            raise UsageError(
                f"{type(self).__name__} encodes images [H, W, C], [C, H, W] or [H, W], and stacks [S, ...] of images "
                f"with channels, not a leaf of shape {spec.shape}"
            )
        self._channels_last = self._ndim > 2 and specs.has_channels_last(spec.shape[-3:])
        self._scale = 1 / 255 if specs.is_float(spec) and _has_pixels(spec) else float(np.min(bound_scale(spec)))
        self.output_size = output_size
        self.image_shape = _image_shape(spec)

    def with_linear(self, convolutions: list[nn.Module]) -> nn.Sequential:
        """Returns the convolutions followed by a linear layer of `output_size` features."""
        layers = nn.Sequential(*convolutions, nn.Flatten())
        with torch.no_grad():
            flat_size = layers(torch.zeros(1, *self.image_shape)).numel()
        return nn.Sequential(layers, orthogonal(nn.Linear(flat_size, self.output_size)), nn.ReLU())

    def forward(self, leaf: torch.Tensor) -> torch.Tensor:
        images = leaf.reshape(-1, *leaf.shape[-self._ndim :])
        rows = max(1, BLOCK // math.prod(self.image_shape))
        if len(images) > rows and images.device.type == "cpu" and not torch.is_grad_enabled():
            features = torch.cat([self._encode(block) for block in images.split(rows)])
        else:
            features = self._encode(images)
        return features.reshape(*leaf.shape[: -self._ndim], self.output_size)

    def channels_first(self, images: torch.Tensor) -> torch.Tensor:
        """Returns images `[N, *shape]` of the space's shape as `[N, C, H, W]`."""
        if self._ndim == 2:
            images = images.unsqueeze(1)
        if self._channels_last:
            images = images.movedim(-1, -3)
        return images.flatten(1, 2) if self._ndim == 4 else images

    def _encode(self, images: torch.Tensor) -> torch.Tensor:
        images = self.channels_first(images)
        # Convolutions on a CPU take a third less time if the channels of a pixel are adjacent in memory. The layout is
        # changed before conversion to float, because bytes move faster.
        if images.device.type == "cpu":
            images = images.contiguous(memory_format=torch.channels_last)
        return self.body(images.to(torch.float32) * self._scale)


@gin.configurable(module="alfish.networks")
@checked
class NatureCNN(ImageEncoder):
    """Three convolutions and a linear layer. Source: Mnih et al., 2015, Methods.

    For images larger than 99 x 99, 3 x 3 convolutions of stride 2 follow until a channel has at most 8 x 8 entries.
    """

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
            height, width = ((side - kernel) // stride + 1 for side in (height, width))
        while max(height, width) > 8:
            layers += [orthogonal(nn.Conv2d(64, 64, 3, 2, padding=1)), nn.ReLU()]
            height, width = (-(-side // 2) for side in (height, width))
        self.body = self.with_linear(layers)


@gin.configurable(module="alfish.networks")
@checked
class SmallCNN(ImageEncoder):
    """A convolution of the image, followed by 3 x 3 convolutions of stride 2 and a linear layer, for small images.

    The first convolution is 3 x 3 of stride 1 for images of up to 14 x 14 pixels. Larger images are cut into patches of
    4 x 4 pixels, which takes half the time (Liu et al., 2022, section 2.3, https://arxiv.org/abs/2201.03545).

    Args:
      spec: space of the image, of any size.
      channels: number of channels of each convolution.
      output_size: number of features.
    """

    def __init__(self, spec: spaces.Box, channels: Sequence[PositiveInt] = (16, 32), output_size: PositiveInt = 128):
        super().__init__(spec, output_size)
        inputs, height, width = self.image_shape
        if max(height, width) > 14:
            margins = ((-height % 4 + 1) // 2, (-width % 4 + 1) // 2)  # every pixel is in a patch
            first = nn.Conv2d(inputs, channels[0], 4, 4, margins)
        else:
            first = nn.Conv2d(inputs, channels[0], 3, padding=1)
        layers: list[nn.Module] = [orthogonal(first), nn.ReLU()]
        for inputs, outputs in itertools.pairwise(channels):
            layers += [orthogonal(nn.Conv2d(inputs, outputs, 3, 2, padding=1)), nn.ReLU()]
        self.body = self.with_linear(layers)


@gin.configurable(module="alfish.networks")
@checked
class ImpalaCNN(ImageEncoder):
    """Residual stages of one convolution, a max-pool and two residual blocks. Source: Espeholt et al., 2018, fig. 3.

    Args:
      spec: space of the image.
      channels: number of channels of each stage; each stage halves height and width.
      output_size: number of features.
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
    if len(spec.shape) == 2:
        return (1, *spec.shape)
    *stack, first, middle, last = spec.shape
    shape = (last, first, middle) if specs.has_channels_last((first, middle, last)) else (first, middle, last)
    return (math.prod(stack) * shape[0], *shape[1:])


def bound_scale(spec: spaces.Space) -> np.ndarray:
    """Returns factors that scale each entry of an integer Box to [-1, 1], or to [0, 1] if its low is 0.

    The factor is 1 for entries without two bounds, and for leaves other than integer Boxes.
    """
    if not isinstance(spec, spaces.Box) or not np.issubdtype(spec.dtype, np.integer):
        return np.ones(spec.shape or ())
    bound = np.maximum(np.abs(spec.low.astype(np.float64)), np.abs(spec.high.astype(np.float64)))
    is_bounded = spec.bounded_below & spec.bounded_above & (bound > 0) & (bound < np.iinfo(np.int32).max)
    return np.where(is_bounded, 1.0 / np.where(is_bounded, bound, 1.0), 1.0)
