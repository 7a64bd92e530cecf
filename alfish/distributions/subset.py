"""Random subsets, such as critics of an ensemble."""

from collections.abc import Sequence

import torch


def random_subset(each: Sequence[torch.Tensor], size: int | None) -> Sequence[torch.Tensor]:
    """Returns `size` random entries of the first dimension, the same of each tensor; None: all.

    Args:
      each: on one device, with first dimensions of the same length.
      size: at most that length.
    """
    if size is None:
        return each
    count, device = len(each[0]), each[0].device
    if device.type == "cpu":
        members = torch.randperm(count)[:size]
    else:  # `randperm` draws so few numbers for a GPU on the CPU, which a CUDA graph cannot record
        members = torch.rand(count, device=device).topk(size).indices
    return [tensor[members] for tensor in each]
