"""Transforms as arguments of a graph, which takes their statistics as tensors."""

from collections.abc import Sequence

import torch
from torch.func import functional_call

from alfish import nest
from alfish.data import TimeStep
from alfish.transforms.transform import Transforms


class TransformsInGraph:
    """Transforms as a nest, whose leaves are their statistics.

    Args:
      transforms: that are `in_graphs`.
      statistics: in place of their buffers, in the same order.
    """

    def __init__(self, transforms: Transforms, statistics: Sequence[torch.Tensor]):
        self.transforms, self.statistics = transforms, tuple(statistics)

    def __call__(self, time_step: TimeStep) -> TimeStep:
        """Returns transformed rows `[T, N]`."""
        names = [name for name, _ in self.transforms.named_buffers()]
        states = (None,) * len(self.transforms)
        return functional_call(self.transforms, dict(zip(names, self.statistics, strict=True)), (time_step, states))[0]


nest.add_kind(
    TransformsInGraph,
    lambda this: (this.statistics, this.transforms),
    lambda transforms, statistics: TransformsInGraph(transforms, statistics),
)
