"""Losses for each row: pure functions that keep the shape of their arguments. The learner masks and averages."""

import torch

from alfish import nest


def squared(error: torch.Tensor) -> torch.Tensor:
    """Returns `0.5 error^2`."""
    return 0.5 * error.square()


def huber(error: torch.Tensor, delta: float = 1.0) -> torch.Tensor:
    """Returns `0.5 error^2` for errors within `delta`, and a linear loss beyond, with a continuous slope."""
    size = error.abs()
    return torch.where(size <= delta, 0.5 * error.square(), delta * (size - 0.5 * delta))


def masked_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Returns the mean of `[T, N, ...]` values over the rows of a `[T, N]` bool mask; 0 for an empty mask."""
    mask = nest.widened(mask, values)
    # torch.where instead of a product, because a masked row may hold inf or nan.
    return torch.where(mask, values, 0).sum() / (mask.expand_as(values).sum().clamp(min=1))
