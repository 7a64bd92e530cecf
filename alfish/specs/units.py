"""Conversion of observations and actions between an environment's units and those of time steps."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from alfish import nest
from alfish.errors import UsageError
from alfish.nest import Nest
from alfish.specs.checks import check_learnable
from alfish.specs.leaves import observation_leaf
from alfish.specs.masks import ActionMask, check_entries
from alfish.specs.spaces import as_float32, map_space, shape_of, torch_dtype, without_vast_bounds

HAS_DEVICE = "its attribute `device` means that it returns tensors: return tensors, or rename the attribute"


class ObservationUnits:
    """Converts batches of observations between an environment's units and those of time steps.

    Args:
      space: observation space of one environment.
      device: device of torch tensors; None for numpy arrays.
      copies: whether results are copies of arrays. Copies are necessary if rows are kept and the environment overwrites
        its observations in place. Tensors are copied only if the dtype changes.

    Attributes:
      from_environment: function that converts a batch of the environment's observations, leaves `[B, ...]`.
    """

    def __init__(self, space: spaces.Space, device: torch.device | None = None, copies: bool = True):
        check_learnable(space, "observation")
        self._space, self._device, self._copies = space, device, copies
        self._use(map_space(lambda leaf: _start(leaf, device), space))

    def _use(self, starts: Nest) -> None:
        self._starts = starts
        self.from_environment: Callable[[Any], Nest] = _reader(self._space, starts, self._device, self._copies)

    def tensors(self) -> list[torch.Tensor]:
        """Returns the tensors used in conversion; a compiled graph takes them as arguments, see `with_tensors`."""
        return nest.leaves(self._starts)

    def with_tensors(self, tensors: list[torch.Tensor]) -> "ObservationUnits":
        """Returns a copy whose conversions use the given tensors; see `tensors` for their order."""
        other = copy.copy(self)
        other._use(nest.like(self._starts, tensors))
        return other

    def check_kinds(self, observation: Any, name: str) -> None:
        """Raises UsageError for values of a wrong kind, such as floats for integers, or tensors for arrays.

        Also checks action masks, see `check_masks`.

        Args:
          observation: observations, as for `from_environment`.
          name: name of the environment.
        """

        def check(leaf: spaces.Space, value: Any) -> None:
            if self._device is not None and not isinstance(value, torch.Tensor):
                raise UsageError(f"{name}.reset returned {type(value).__name__}; {HAS_DEVICE}")
            if self._device is None and isinstance(value, torch.Tensor):
                raise UsageError(
                    f"{name}.reset returned tensors, but {name} has no attribute `device`, by which tensor "
                    "environments are recognized; add it, for example torch.device('cpu')"
                )
            dtype = str(getattr(value, "dtype", ""))  # dtype of numpy or torch
            if "float" in dtype and np.dtype(leaf.dtype).kind in "biu" and not isinstance(leaf, ActionMask):
                raise UsageError(
                    f"{name}.reset returned observations of dtype {dtype}, which would be truncated to integers: their "
                    f"space {leaf} has {leaf.dtype}; give the space the dtype of the observations, or cast them"
                )

        map_space(check, self._space, observation)
        self.check_masks(observation, name)

    def check_masks(self, observation: Any, name: str) -> None:
        """Raises UsageError where an entry of an action mask is neither 0 nor 1; arguments as for `check_kinds`."""

        def check(leaf: spaces.Space, value: Any) -> None:
            if isinstance(leaf, ActionMask):
                check_entries(value, name)

        map_space(check, self._space, observation)

    def to_environment(self, observation: Nest) -> Nest:
        """Returns observations in the environment's units; float64 values have float32 precision."""

        def shift(leaf: spaces.Space, start: Any, value: Any) -> Any:
            return value if start is None else value + start

        return map_space(shift, self._space, self._starts, observation)


def _reader(space: spaces.Space, start: Nest, device: torch.device | None, copies: bool) -> Callable[[Any], Nest]:
    """Returns a function that converts observations; it is called in each step of an environment."""
    if isinstance(space, spaces.Dict):
        readers = {key: _reader(child, start[key], device, copies) for key, child in space.items()}
        return lambda observation: {key: read(observation[key]) for key, read in readers.items()}
    if isinstance(space, spaces.Tuple):
        parts = [_reader(child, own, device, copies) for child, own in zip(space.spaces, start)]
        return lambda observation: tuple(read(part) for read, part in zip(parts, observation))
    spec = observation_leaf(space)
    if device is not None:
        dtype = torch_dtype(spec)
        return lambda value: value.to(dtype) if start is None else value.to(dtype) - start
    if start is not None:
        return lambda value: np.asarray(value, spec.dtype) - start
    return functools.partial(np.array if copies else np.asarray, dtype=spec.dtype)


def _start(space: spaces.Space, device: torch.device | None) -> Any:
    """Returns the first integer of a Discrete or MultiDiscrete leaf; None if it is 0, and for any other leaf."""
    if not isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)) or not np.any(space.start):
        return None
    start = np.asarray(space.start, np.int64)
    return start if device is None else torch.from_numpy(start).to(device)


class ActionUnits:
    """Converts batches of actions between an algorithm's units and an environment's.

    An action for a bounded Box is clipped to [-1, 1], and stretched to the bounds. For any other Box, an action is
    clipped to existing bounds. For a Box of integers, it is also rounded, and each integer has an equal part of [-1,
    1]. For a Box of bools, the result is 0 or 1. Results of `stretch` are within the bounds and have the space's dtype.

    Args:
      space: action space of one environment.
      device: device of torch tensors; None for numpy arrays.

    Attributes:
      executed: function from a sampled action to the executed action, in the algorithm's units.
      stretch: function that converts a result of `executed` to the environment's units; may return the same array.
    """

    def __init__(self, space: spaces.Space, device: torch.device | None = None):
        check_learnable(space, "action")
        self._use(map_space(lambda leaf: _LeafUnits(leaf, device), space))

    def _use(self, units: Nest) -> None:
        self._units = units
        self.executed: Callable[[Nest], Nest] = functools.partial(nest.map, _LeafUnits.executed, units)
        self.stretch: Callable[[Nest], Any] = functools.partial(nest.map, _LeafUnits.stretch, units)
        if isinstance(units, _LeafUnits):  # the common case: the space is a leaf
            self.executed, self.stretch = units.executed, units.stretch

    def tensors(self) -> list[dict[str, torch.Tensor]]:
        """Returns the tensors used in the conversion of each leaf.

        A compiled graph takes them as arguments, see `with_tensors`.
        """
        leaves = nest.leaves(self._units)
        return [{name: each for name, each in vars(leaf).items() if isinstance(each, torch.Tensor)} for leaf in leaves]

    def with_tensors(self, tensors: list[dict[str, torch.Tensor]]) -> "ActionUnits":
        """Returns a copy whose conversions use the given tensors; see `tensors` for their order."""
        leaves, structure = nest.flatten(self._units)
        copies = [copy.copy(leaf) for leaf in leaves]
        for leaf, own in zip(copies, tensors, strict=True):
            vars(leaf).update(own)
        other = copy.copy(self)
        other._use(nest.unflatten(structure, copies))
        return other

    def to_environment(self, action: Nest) -> Any:
        """Converts a canonical action nest (leaves `[B, ...]`) to the environment's units."""
        return self.stretch(self.executed(action))

    def from_environment(self, action: Nest) -> Nest:
        """Converts actions of the environment, within its bounds, to canonical actions."""
        return nest.map(_LeafUnits.from_environment, self._units, action)


class _LeafUnits:
    """Converts actions of one leaf.

        environment = clip(round(clip(algorithm) * scale + offset), low, high), reshaped

    Operations without effect are skipped. Only integers are rounded. For integers, [-1, 1] is stretched to half an
    integer beyond the bounds, so that each integer, including the first and the last, has an equal part of [-1, 1].
    """

    def __init__(self, space: spaces.Space, device: torch.device | None):
        # float32 can represent neither all float64 numbers nor all integers.
        working: Any = np.float32 if space.dtype in (np.float16, np.float32) else np.float64

        def constant(array: Any, dtype: Any = working) -> Any:
            array = np.asarray(array, dtype).reshape(-1)
            return array if device is None else torch.from_numpy(array).to(device)

        self._shape = shape_of(space)
        # Whether the algorithm's action is a vector: for every space except Discrete, even for a 0-d Box.
        self._is_vector = not isinstance(space, spaces.Discrete)
        self._reshapes = self._is_vector and len(self._shape) != 1
        self._dtype: Any = space.dtype if device is None else torch_dtype(space)
        is_whole = space.dtype == np.bool_ or np.issubdtype(space.dtype, np.integer)
        self._rounds = isinstance(space, spaces.Box) and is_whole
        self._low: Any = None  # bounds of the algorithm's action
        self._high: Any = None
        self._scale: Any = None
        self._offset: Any = None
        self._least: Any = None  # bounds of the environment's action; None if results cannot exceed them
        self._most: Any = None
        if not isinstance(space, spaces.Box):
            start = _start(space, device)
            self._offset = None if start is None else start.reshape(-1)
            return
        declared, space = space, without_vast_bounds(space)
        low, high = space.low.astype(np.float64), space.high.astype(np.float64)
        if space.is_bounded("both"):
            scale, offset = high / 2 - low / 2 + (0.5 if self._rounds else 0), high / 2 + low / 2
            if np.any(scale != 1) or np.any(offset != 0):
                self._scale, self._offset = constant(scale), constant(offset)
            low, high = np.full(low.shape, -1.0), np.full(low.shape, 1.0)
        ends = constant(as_float32(low), np.float32), constant(as_float32(high), np.float32)
        least, most = map(constant, _limits(declared, space, working))
        # Each operation is monotonic, so the results for the end points bound the results for all actions.
        lowest, highest = (end if self._scale is None else end * self._scale + self._offset for end in ends)
        if (lowest < least).any() or (highest > most).any():
            self._least, self._most = least, most
        if space.bounded_below.any() or space.bounded_above.any():
            self._low, self._high = ends

    def stretch(self, value: Any) -> Any:
        if self._scale is not None:
            value = value * self._scale
        if self._offset is not None:
            value = value + self._offset
        if self._rounds:
            value = value.round()
        if self._least is not None:
            value = value.clip(self._least, self._most)
        if self._reshapes:
            value = value.reshape(len(value), *self._shape)
        if value.dtype == self._dtype:
            return value
        return value.to(self._dtype) if isinstance(value, torch.Tensor) else value.astype(self._dtype)

    def from_environment(self, action: Any) -> Any:
        value = action.reshape(len(action), -1) if self._is_vector else action
        if self._offset is not None:
            value = value - self._offset
        if self._scale is not None:
            value = value / (self._scale + (self._scale == 0))
        return value

    def executed(self, action: Any) -> Any:
        if self._low is None:
            return action
        if isinstance(action, np.ndarray):
            return np.minimum(np.maximum(action, self._low), self._high)  # twice as fast as `clip`
        return action.clip(self._low, self._high)


def _limits(declared: spaces.Box, space: spaces.Box, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns the bounds to clip actions to: the declared bounds, except positive lower bounds that mean no bound."""
    low = np.where(declared.low > 0, space.low, declared.low)
    return _as_float(low, dtype, np.inf), _as_float(declared.high, dtype, -np.inf)


def _as_float(bound: np.ndarray, dtype: Any, towards: float) -> np.ndarray:
    """Returns a bound as floats; an integer that `dtype` cannot represent is rounded towards `towards`."""
    result = bound.astype(dtype)
    if not np.issubdtype(bound.dtype, np.integer):
        return result
    beyond = [(int(found) - int(exact)) * towards < 0 for found, exact in zip(result.flat, bound.flat)]
    return np.where(np.reshape(beyond, bound.shape), np.nextafter(result, dtype(towards)), result)
