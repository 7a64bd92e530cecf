"""Encoder of grids of symbols: integers that stand for categories, such as objects in MiniGrid."""

import itertools
from collections.abc import Sequence

import gin
import numpy as np
import torch
from gymnasium import spaces
from torch import nn

from alfish.errors import UsageError
from alfish.networks.images import ImageEncoder
from alfish.networks.layers import orthogonal
from alfish.parameters import PositiveInt, checked


@gin.configurable(module="alfish.networks")
@checked
class OneHotGrid(ImageEncoder):
    """One-hot codes of the integers in each cell of a grid, followed by 3 x 3 convolutions and a linear layer.

    The first convolution has stride 1, and all others have stride 2. An integer outside its range has a code of zeros.

    Args:
      spec: integer Box `[H, W, C]`, `[C, H, W]` or `[H, W]`, or a stack of grids, as for images.
      sizes: number of different integers in each channel, counted from the space's lower bound, or from 0 without a
        lower bound. For stacked frames, the sizes are repeated. None means that the sizes follow from the bounds of the
        space.
      channels: number of channels of each convolution.
      output_size: number of features.

    Raises:
      UsageError: the space is not an integer Box, the number of channels is not a multiple of the number of sizes, or
        `sizes` is None and the upper bound is the largest number of the dtype.
    """

    def __init__(
        self,
        spec: spaces.Box,
        sizes: Sequence[PositiveInt] | None = None,
        channels: Sequence[PositiveInt] = (16, 32),
        output_size: PositiveInt = 128,
    ):
        if not isinstance(spec, spaces.Box) or not np.issubdtype(spec.dtype, np.integer):
            raise UsageError(f"OneHotGrid encodes a Box of integers, not {spec}; use another encoder for this leaf")
        super().__init__(spec, output_size)
        codes = _OneHotCodes(*self._ranges(spec, sizes))
        layers: list[nn.Module] = [codes]
        for k, (inputs, outputs) in enumerate(itertools.pairwise((codes.output_size, *channels))):
            layers += [orthogonal(nn.Conv2d(inputs, outputs, 3, 2 if k else 1, padding=1)), nn.ReLU()]
        self._scale = 1.0  # symbols keep their numbers
        self.body = self.with_linear(layers)

    def _ranges(self, spec: spaces.Box, sizes: Sequence[int] | None) -> tuple[list[int], list[int]]:
        """Returns the smallest integer of each channel, and the number of different integers of each channel."""
        limits = np.iinfo(str(spec.dtype))
        low = np.where(spec.low == limits.min, 0, spec.low).astype(np.int64)
        planes = self.channels_first(torch.from_numpy(np.stack([low, spec.high.astype(np.int64)])))
        first, last = planes[0].amin((1, 2)).tolist(), planes[1].amax((1, 2)).tolist()
        if sizes is None:
            if (spec.high == limits.max).any():
                raise UsageError(
                    f"OneHotGrid.sizes must be set, because the upper bound of this leaf, {limits.max}, is only the "
                    f"limit of its dtype {spec.dtype}; list the number of different integers in each of {len(first)} "
                    "channels"
                )
            return first, [high - low + 1 for low, high in zip(first, last)]
        if not sizes or len(first) % len(sizes):
            raise UsageError(
                f"OneHotGrid.sizes has {len(sizes)} entries, {tuple(sizes)}, but the leaf has {len(first)} channels; "
                "give one entry for each channel"
            )
        return first, [*sizes] * (len(first) // len(sizes))


class _OneHotCodes(nn.Module):
    """Maps integers `[N, C, H, W]` to codes of zeros and ones, `[N, output_size, H, W]`, channel after channel."""

    def __init__(self, first: Sequence[int], sizes: Sequence[int]):
        super().__init__()
        self._ranges = [(low, low + size) for low, size in zip(first, sizes)]
        self.output_size = sum(sizes)

    def forward(self, grids: torch.Tensor) -> torch.Tensor:
        codes = [
            plane == torch.arange(low, end, device=grids.device).reshape(-1, 1, 1)
            for plane, (low, end) in zip(grids.split(1, 1), self._ranges)
        ]
        return torch.cat(codes, 1).to(torch.float32)
