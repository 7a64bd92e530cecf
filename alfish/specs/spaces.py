"""gymnasium's spaces as nests: their leaves, shapes and dtypes."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from alfish.nest import Nest

LEAF_SPACES = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
LARGEST_BOUND = 1e30  # a bound of at least this magnitude means no bound; some libraries declare the largest float


def map_space(function: Callable[..., Any], space: spaces.Space, *values: Any) -> Nest:
    """Returns the nest of `function(leaf, *values)` over the leaves of a space and the values at the same paths."""
    if isinstance(space, spaces.Dict):
        return {key: map_space(function, child, *(value[key] for value in values)) for key, child in space.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(map_space(function, *parts) for parts in zip(space.spaces, *values))
    return function(space, *values)


def batch_of_one(values: Any, space: spaces.Space) -> Nest:
    """Returns one element of a space with a leading dimension of 1."""
    return map_space(lambda _, value: np.asarray(value)[None], space, values)


def torch_dtype(spec: spaces.Space) -> torch.dtype:
    """Returns the torch dtype of a leaf's values in time steps."""
    return torch.from_numpy(np.empty(0, spec.dtype)).dtype


def is_bounded(spec: spaces.Space) -> bool:
    """Returns whether every entry of a leaf has two bounds, see `without_vast_bounds`; True if it is not a Box."""
    return not isinstance(spec, spaces.Box) or without_vast_bounds(spec).is_bounded("both")


def missing_bounds(spec: spaces.Box) -> str:
    """Returns a description of missing bounds, such as 'no upper bound'."""
    box = without_vast_bounds(spec)
    below, above = box.bounded_below.reshape(-1), box.bounded_above.reshape(-1)
    if below.any() or above.any():
        if below.all() and not above.any():
            return "no upper bound"
        if above.all() and not below.any():
            return "no lower bound"
        lacks = ~(below & above)
        return f"bounds missing in {lacks.sum()} of {lacks.size} entries (first [{lacks.argmax()}])"
    return "no bounds"


def without_vast_bounds(space: spaces.Box) -> spaces.Box:
    """Returns a Box with infinity in place of values that represent a missing bound.

    These values are floats of magnitude `LARGEST_BOUND` or more; the largest number of the dtype; and a positive lower
    bound below 1 / `LARGEST_BOUND` of an entry without an upper bound, such as the smallest positive float.
    """
    if not is_float(space):
        return space
    kind: Any = space.dtype
    limit = min(LARGEST_BOUND, float(np.finfo(kind).max))
    low, high = (bound.astype(np.float64) for bound in (space.low, space.high))
    no_high = np.abs(high) >= limit
    no_low = (np.abs(low) >= limit) | (no_high & (low > 0) & (low < 1 / LARGEST_BOUND))
    if np.all(np.isinf(low) == no_low) and np.all(np.isinf(high) == no_high):
        return space
    low, high = np.where(no_low, -np.inf, space.low), np.where(no_high, np.inf, space.high)
    return spaces.Box(low.astype(space.dtype), high.astype(space.dtype), dtype=space.dtype)


def is_float(spec: spaces.Space) -> bool:
    """Returns whether a leaf is a Box of floats."""
    return isinstance(spec, spaces.Box) and np.issubdtype(spec.dtype, np.floating)


def shape_of(space: spaces.Space) -> tuple[int, ...]:
    """Returns the shape of a leaf."""
    assert space.shape is not None
    return tuple(space.shape)


def has_channels_last(shape: Sequence[int]) -> bool:
    """Returns whether the channels of an image are the last dimension; otherwise they are the first.

    If exactly two neighbouring dimensions are equal, they are height and width, and the other dimension is the
    channels. Otherwise the smaller of the first and the last dimension is the channels.
    """
    first, middle, last = shape
    if (first == middle) != (middle == last):
        return first == middle
    return last <= first


def as_float32(bound: np.ndarray) -> np.ndarray:
    """Returns a bound as float32; a bound outside float32's range becomes infinite."""
    with np.errstate(over="ignore"):
        return bound.astype(np.float32)
