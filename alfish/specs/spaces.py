"""gymnasium's spaces as nests: their leaves, shapes and dtypes."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from alfish.nest import Nest

LEAF_SPACES = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)


def map_space(function: Callable[..., Any], space: spaces.Space, *values: Any) -> Nest:
    """Returns the nest of `function(leaf, *values at its place)` over the leaves of a space, as dicts and tuples."""
    if isinstance(space, spaces.Dict):
        return {key: map_space(function, child, *(value[key] for value in values)) for key, child in space.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(map_space(function, *parts) for parts in zip(space.spaces, *values))
    return function(space, *values)


def batch_of_one(values: Any, space: spaces.Space) -> Nest:
    """Returns one element of a space with a leading dimension of 1."""
    return map_space(lambda _, value: np.asarray(value)[None], space, values)


def torch_dtype(spec: spaces.Space) -> torch.dtype:
    """Returns the dtype of a leaf in the stream."""
    return torch.from_numpy(np.empty(0, spec.dtype)).dtype


def is_bounded(spec: spaces.Space) -> bool:
    """Returns whether every entry of a leaf has two finite bounds; only a Box may have none."""
    return not isinstance(spec, spaces.Box) or spec.is_bounded("both")


def is_float(spec: spaces.Space) -> bool:
    """Returns whether a leaf is a Box of real numbers."""
    return isinstance(spec, spaces.Box) and np.issubdtype(spec.dtype, np.floating)


def shape_of(space: spaces.Space) -> tuple[int, ...]:
    """Returns the shape of a leaf."""
    assert space.shape is not None
    return tuple(space.shape)


def has_channels_last(shape: Sequence[int]) -> bool:
    """Returns whether the last dimension of an image is its channels; else the first one is.

    If exactly two neighbouring dimensions are equal, the image is square, and the third dimension is the channels.
    Otherwise the smaller of the first and the last dimension is the channels.
    """
    first, middle, last = shape
    if (first == middle) != (middle == last):
        return first == middle
    return last <= first


def as_float32(bound: np.ndarray) -> np.ndarray:
    """Returns a bound as float32; a bound beyond float32 becomes infinite."""
    with np.errstate(over="ignore"):
        return bound.astype(np.float32)
