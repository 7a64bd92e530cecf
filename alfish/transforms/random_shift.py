"""Random shifts of images: the data augmentation of DrQ.

    padded   = image with `pad` copies of its border pixels on each side
    shifted  = a random crop of `padded` that has the size of the image

Kostrikov et al., 2021, https://arxiv.org/abs/2004.13649: in the paper, images have 84 x 84 pixels, and `pad` is 4. Each
row of a window has a separate shift, so an observation and its next observation are shifted differently. This is the
paper's method with one augmentation for the target and one for the value (K = M = 1).
"""

import gin
import torch
from gymnasium import spaces

from alfish import nest, specs
from alfish.data import TimeStep
from alfish.errors import UsageError
from alfish.nest import Nest
from alfish.networks.images import is_image
from alfish.parameters import PositiveInt, checked
from alfish.transforms.transform import Transform


@gin.configurable(module="alfish.transforms")
@checked
class RandomShift(Transform):
    """Shifts the images of sampled rows in training. A policy that acts receives images without shifts.

    Replay stores images without shifts, and each sample of a row draws a new shift. A compiled update computes the
    shifts in its graph. On-policy sources of batches do not accept this transform, because the stored probabilities of
    an unroll belong to images without shifts. Normalizers should precede this transform.

    Args:
      observation_spec, reward_spec: specs of the input rows. At least one leaf of the observation must be an image;
        other leaves do not change.
      pad: largest shift in pixels, along both dimensions.
    """

    in_graphs = augments = True

    def __init__(self, observation_spec: Nest, reward_spec: spaces.Box, pad: PositiveInt = 4):
        super().__init__(observation_spec, reward_spec)
        self._pad = pad
        leaves = nest.leaves(observation_spec)
        # Dimension of the height of each image, counted from the end, by the index of the image's leaf.
        self._heights = {k: _height_of(leaf) for k, leaf in enumerate(leaves) if is_image(leaf)}
        if not self._heights:
            raise UsageError(
                "RandomShift shifts images, but there is no image among the observation's leaves "
                f"{list(map(str, leaves))}; leave the transform out"
            )

    def forward(self, time_step: TimeStep, state: Nest) -> tuple[TimeStep, Nest]:
        return time_step, state

    def transform(self, time_step: TimeStep, state: Nest) -> TimeStep:
        leaves, structure = nest.flatten(time_step.observation)
        num_rows = time_step.step_type.numel()
        for k, height in self._heights.items():
            # Draws from [0, 1) instead of integers, because compiled and uncompiled updates then draw the same numbers.
            numbers = torch.rand(2, num_rows, device=leaves[k].device)
            shift = (numbers * (2 * self._pad + 1)).long() - self._pad
            images = leaves[k].flatten(0, time_step.step_type.ndim - 1)
            leaves[k] = shifted(images, shift[0], shift[1], height).reshape(leaves[k].shape)
        return time_step._replace(observation=nest.unflatten(structure, leaves))


def shifted(images: torch.Tensor, down: torch.Tensor, right: torch.Tensor, height: int) -> torch.Tensor:
    """Returns images whose pixel (i, j) is pixel (i + down, j + right) of the given images.

    Outside of the image, the nearest border pixel is taken.

    Args:
      images: `[M, ...]` images or stacks of images, of any dtype.
      down, right: `[M]` int64, shifts in pixels.
      height: dimension of the height, negative; the width is the next dimension.
    """
    images = images.movedim((height, height + 1), (1, 2))
    row = torch.arange(images.shape[1], device=images.device) + down[:, None]  # [M, H]
    column = torch.arange(images.shape[2], device=images.device) + right[:, None]  # [M, W]
    row, column = row.clamp(0, images.shape[1] - 1), column.clamp(0, images.shape[2] - 1)
    number = torch.arange(len(images), device=images.device)[:, None, None]
    return images[number, row[:, :, None], column[:, None, :]].movedim((1, 2), (height, height + 1))


def _height_of(space: spaces.Box) -> int:
    """Returns the dimension of an image's height, counted from the end."""
    return -3 if len(space.shape) > 2 and specs.has_channels_last(space.shape[-3:]) else -2
