"""Random shifts of images, an augmentation of sampled rows (DrQ).

    padded   = image with `pad` copies of its border pixels on each side
    shifted  = a random crop of `padded` that has the size of the image

Kostrikov et al., 2021, https://arxiv.org/abs/2004.13649: the paper's images have 84 x 84 pixels, and `pad` is 4. Each
row of a window is shifted by itself, so an observation and the next one have different shifts. This is the paper's
method with one augmentation of a target and one of a value (K = M = 1).
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
    """Shifts the images of sampled rows in training; a policy that acts sees images as they are.

    Replay keeps images without shifts, and each sample of a row draws a new shift. A compiled update computes the
    shifts in its graph. On-policy sources of batches refuse this transform, because the probabilities of an unroll are
    those of images without shifts. Normalizers should stand before it.

    Args:
      observation_spec, reward_spec: specs of the input rows. The observation has at least one image; other leaves stay
        unchanged.
      pad: largest shift in pixels, along both dimensions.
    """

    in_graphs = augments = True

    def __init__(self, observation_spec: Nest, reward_spec: spaces.Box, pad: PositiveInt = 4):
        super().__init__(observation_spec, reward_spec)
        self._pad = pad
        leaves = nest.leaves(observation_spec)
        # By the number of the leaf: the dimension of the image's height, counted from the end.
        self._heights = {k: _height_of(leaf) for k, leaf in enumerate(leaves) if is_image(leaf)}
        if not self._heights:
            raise UsageError(
                "RandomShift shifts images, but there is none among the observation's leaves "
                f"{list(map(str, leaves))}; leave the transform out"
            )

    def forward(self, time_step: TimeStep, state: Nest) -> tuple[TimeStep, Nest]:
        return time_step, state

    def transform(self, time_step: TimeStep, state: Nest) -> TimeStep:
        leaves, structure = nest.flatten(time_step.observation)
        num_rows = time_step.step_type.numel()
        for k, height in self._heights.items():
            # Numbers of [0, 1) and not integers, because a graph and torch draw these in the same order.
            numbers = torch.rand(2, num_rows, device=leaves[k].device)
            shift = (numbers * (2 * self._pad + 1)).long() - self._pad
            images = leaves[k].flatten(0, time_step.step_type.ndim - 1)
            leaves[k] = shifted(images, shift[0], shift[1], height).reshape(leaves[k].shape)
        return time_step._replace(observation=nest.unflatten(structure, leaves))


def shifted(images: torch.Tensor, down: torch.Tensor, right: torch.Tensor, height: int) -> torch.Tensor:
    """Returns images whose pixel (i, j) is the pixel (i + down, j + right) of the given image, or the nearest one.

    Args:
      images: `[M, ...]` images or stacks of images, of any dtype.
      down, right: `[M]` int64, shifts in pixels.
      height: dimension of the height, negative; the width is the next one.
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
