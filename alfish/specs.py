"""Specs: nests (dict, tuple) whose leaves are gymnasium's Box, Discrete, MultiDiscrete and MultiBinary spaces.

A spec describes what an algorithm sees, per environment and without batch dimension. It differs from the environment's
own space where the stream does:
- observations: float64 is float32, Discrete starts at 0;
- actions: canonical units. Box is one-dimensional float32 in [-1, 1] where the environment's box is bounded (else
  unbounded, in the environment's units), Discrete and MultiDiscrete start at 0 and are int64, MultiBinary is flat.
`ObservationUnits` and `ActionUnits` convert between the two; nothing else does.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from alfish import nest
from alfish.errors import UsageError
from alfish.nest import Nest

LEAF_SPACES = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)


def observation_spec(space: spaces.Space) -> Nest:
    """The spec of an observation space.

    Raises:
      UsageError: if a leaf is not one of `LEAF_SPACES` (Text, Graph, Sequence, OneOf), with its path.
    """
    check_learnable(space, "observation")
    return map_space(_observation_leaf, space)


def action_spec(space: spaces.Space) -> Nest:
    """The canonical spec of an action space; see the module's docstring.

    Raises:
      UsageError: if a leaf is not one of `LEAF_SPACES`, with its path.
    """
    check_learnable(space, "action")
    return map_space(_action_leaf, space)


def reward_spec(num_rewards: int | None = None) -> spaces.Box:
    """A scalar reward, or a vector of `num_rewards`."""
    return spaces.Box(-np.inf, np.inf, () if num_rewards is None else (num_rewards,), np.float32)


def map_space(function: Callable[..., Any], space: spaces.Space, *values: Any) -> Nest:
    """The nest of `function(leaf, *values at its place)` over the leaves of a space, in dicts and tuples."""
    if isinstance(space, spaces.Dict):
        return {key: map_space(function, child, *(value[key] for value in values)) for key, child in space.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(map_space(function, *parts) for parts in zip(space.spaces, *values))
    return function(space, *values)


def batch_of_one(values: Any, space: spaces.Space) -> Nest:
    """A single element of a space, with a leading dimension of 1."""
    return map_space(lambda _, value: np.asarray(value)[None], space, values)


def torch_dtype(spec: spaces.Space) -> torch.dtype:
    """The dtype that a leaf has in the stream."""
    return torch.from_numpy(np.empty(0, spec.dtype)).dtype


def zeros(spec: Nest, leading: tuple[int, ...], device: torch.device | str = "cpu") -> Nest:
    """A nest of zeros, each leaf `[*leading, *shape]`."""
    return nest.map(lambda leaf: torch.zeros((*leading, *_shape(leaf)), dtype=torch_dtype(leaf), device=device), spec)


def sample(spec: Nest, batch_size: int) -> Nest:
    """Uniform values `[B, ...]` of a canonical action spec.

    A Box entry without two bounds is drawn from [-1, 1], moved as far as a bound that it has asks for.
    """

    def draw(leaf: spaces.Space) -> torch.Tensor:
        shape = (batch_size, *_shape(leaf))
        if isinstance(leaf, spaces.Box):
            low, high = leaf.low.astype(np.float64), leaf.high.astype(np.float64)
            bounded = np.isfinite(low) & np.isfinite(high)
            start = np.where(np.isfinite(low), np.maximum(low, -1), np.minimum(high, 1) - 2)
            low, high = np.where(bounded, low, start), np.where(bounded, high, start + 2)
            # In float64, so that no rounding leads beyond the bounds.
            return (torch.from_numpy(low) + torch.rand(shape) * torch.from_numpy(high - low)).to(torch.float32)
        if isinstance(leaf, spaces.MultiBinary):
            return torch.randint(2, shape, dtype=torch_dtype(leaf))
        count: Any = leaf.n if isinstance(leaf, spaces.Discrete) else torch.from_numpy(leaf.nvec)  # type: ignore[attr-defined]
        return (torch.rand(shape, dtype=torch.float64) * count).long()

    return nest.map(draw, spec)


def is_bounded(spec: spaces.Space) -> bool:
    """Whether every entry of a leaf has two finite bounds (true for all but Box)."""
    return not isinstance(spec, spaces.Box) or spec.is_bounded("both")


def describe(spec: Nest) -> str:
    """One line for messages: `camera: Box(0, 255, (84, 84, 3), uint8), speed: Discrete(3)`."""
    parts = [f"{path}: {leaf}" if path else str(leaf) for path, leaf in zip(nest.paths(spec), nest.leaves(spec))]
    return ", ".join(parts)


def check_scalar_reward(name: str, reward_spec: spaces.Box) -> None:
    """Raises UsageError, in which `name` is the algorithm's, where rewards are vectors."""
    if reward_spec.shape:
        raise UsageError(f"{name} takes a scalar reward, and this one is a vector of {reward_spec.shape[0]}")


class ObservationUnits:
    """Converts observations between an environment's units and the stream's, batched.

    Args:
      space: the environment's own observation space, of one environment.
      device: None for numpy arrays in and out, else torch tensors there.
      copies: whether arrays of the stream are copies, as what is kept must be where an environment may write its
        observation's memory again. Tensors are never copied for nothing.

    Attributes:
      from_environment: a function of a batch of observations (leaves `[B, ...]`) to the stream's nest.
    """

    def __init__(self, space: spaces.Space, device: torch.device | None = None, copies: bool = True):
        check_learnable(space, "observation")
        self._starts = map_space(lambda leaf: _start(leaf, device), space)
        self._space = space
        self.from_environment: Callable[[Any], Nest] = _reader(space, device, copies)

    def to_environment(self, observation: Nest) -> Nest:
        """The inverse, but for what float64 loses in float32."""

        def shift(leaf: spaces.Space, start: Any, value: Any) -> Any:
            return value if start is None else value + start

        return map_space(shift, self._space, self._starts, observation)


def _reader(space: spaces.Space, device: torch.device | None, copies: bool) -> Callable[[Any], Nest]:
    """Functions made once, because an environment's step calls them."""
    if isinstance(space, spaces.Dict):
        readers = {key: _reader(child, device, copies) for key, child in space.items()}
        return lambda observation: {key: read(observation[key]) for key, read in readers.items()}
    if isinstance(space, spaces.Tuple):
        parts = [_reader(child, device, copies) for child in space.spaces]
        return lambda observation: tuple(read(part) for read, part in zip(parts, observation))
    spec, start = _observation_leaf(space), _start(space, device)
    if device is not None:
        dtype = torch_dtype(spec)
        return lambda value: value.to(dtype) if start is None else value.to(dtype) - start
    if start is not None:
        return lambda value: np.asarray(value, spec.dtype) - start
    return functools.partial(np.array if copies else np.asarray, dtype=spec.dtype)


def _start(space: spaces.Space, device: torch.device | None) -> Any:
    """Where a leaf of integers counts from; None: from 0, or it does not count."""
    if not isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)) or not np.any(space.start):
        return None
    start = np.asarray(space.start, np.int64)
    return start if device is None else torch.from_numpy(start).to(device)


class ActionUnits:
    """Converts actions between an algorithm's units and an environment's, batched.

    A bounded Box is clipped to [-1, 1] and stretched to its bounds; any other Box is clipped to the bounds it has. A
    Box of integers is rounded, and each of its integers has an equal share of [-1, 1]. What `stretch` returns is within
    the bounds, in their own dtype.

    Args:
      space: the environment's own action space, of one environment.
      device: None for numpy arrays in and out, else torch tensors there.
    """

    def __init__(self, space: spaces.Space, device: torch.device | None = None):
        check_learnable(space, "action")
        self._units = map_space(lambda leaf: _LeafUnits(leaf, device), space)
        self._bare = self._units if isinstance(self._units, _LeafUnits) else None

    def to_environment(self, action: Nest) -> Any:
        """The action nest (leaves `[B, ...]`, canonical) as the environment takes it."""
        return self.stretch(self.executed(action))

    def from_environment(self, action: Nest) -> Nest:
        """The inverse, for actions within bounds."""
        return nest.map(_LeafUnits.from_environment, self._units, action)

    def stretch(self, executed: Nest) -> Any:
        """What `executed` returned, as the environment takes it; may be the same array."""
        if self._bare is not None:  # the common case, which needs no walk
            return self._bare.stretch(executed)
        return nest.map(_LeafUnits.stretch, self._units, executed)

    def executed(self, action: Nest) -> Nest:
        """What of a sampled action is executed, in the algorithm's units."""
        if self._bare is not None:
            return self._bare.executed(action)
        return nest.map(_LeafUnits.executed, self._units, action)


class _LeafUnits:
    """environment = clip(round(clip(algorithm) * scale + offset), low, high), reshaped, without what changes nothing.

    Only integers are rounded. [-1, 1] is stretched to half beyond their bounds, so that each of them, the first and the
    last included, has an equal share of it.
    """

    def __init__(self, space: spaces.Space, device: torch.device | None):
        # float32 holds neither float64 nor every integer.
        working: Any = np.float32 if space.dtype in (np.float16, np.float32) else np.float64

        def constant(array: Any, dtype: Any = working) -> Any:
            array = np.asarray(array, dtype).reshape(-1)
            return array if device is None else torch.from_numpy(array).to(device)

        self._shape = _shape(space)
        self._is_vector = not isinstance(space, spaces.Discrete)  # in the algorithm's units, a 0-d Box too
        self._reshapes = self._is_vector and len(self._shape) != 1
        self._dtype: Any = space.dtype if device is None else torch_dtype(space)
        self._rounds = isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.integer)
        self._low: Any = None  # of the algorithm's action
        self._high: Any = None
        self._scale: Any = None
        self._offset: Any = None
        self._least: Any = None  # of the environment's action; None: no rounding leads beyond its bounds
        self._most: Any = None
        if not isinstance(space, spaces.Box):
            start = _start(space, device)
            self._offset = None if start is None else start.reshape(-1)
            return
        low, high = space.low.astype(np.float64), space.high.astype(np.float64)
        if space.is_bounded("both"):
            scale, offset = high / 2 - low / 2 + (0.5 if self._rounds else 0), high / 2 + low / 2
            if np.any(scale != 1) or np.any(offset != 0):
                self._scale, self._offset = constant(scale), constant(offset)
            low, high = np.full(low.shape, -1.0), np.full(low.shape, 1.0)
        ends = constant(_float32(low), np.float32), constant(_float32(high), np.float32)
        least = constant(_as_float(space.low, working, np.inf))
        most = constant(_as_float(space.high, working, -np.inf))
        # Each operation is monotonic, so that nothing leads further than the ends do.
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
            return np.minimum(np.maximum(action, self._low), self._high)  # which take half the time of `clip`
        return action.clip(self._low, self._high)


def _as_float(bound: np.ndarray, dtype: Any, towards: float) -> np.ndarray:
    """A bound as floats; an integer that `dtype` does not hold becomes the next float in the direction of `towards`."""
    result = bound.astype(dtype)
    if not np.issubdtype(bound.dtype, np.integer):
        return result
    beyond = [(int(found) - int(exact)) * towards < 0 for found, exact in zip(result.flat, bound.flat)]
    return np.where(np.reshape(beyond, bound.shape), np.nextafter(result, dtype(towards)), result)


def outside(value: Any, space: spaces.Space, name: str) -> str | None:
    """What of a value is not as its space says, in one sentence; None where all is.

    Args:
      value: a single element.
      space: with any leaves.
      name: of the whole, with which the names of its parts begin.
    """
    if isinstance(space, spaces.Dict):
        parts = [(value[key], child, f"{name}.{key}") for key, child in space.items()]
    elif isinstance(space, spaces.Tuple):
        parts = [(value[i], child, f"{name}.{i}") for i, child in enumerate(space.spaces)]
    else:
        return None if value in space else _fault(np.asarray(value), space, name)
    return next((fault for part in parts if (fault := outside(*part))), None)


def _fault(value: np.ndarray, space: spaces.Space, name: str) -> str:
    if value.shape != _shape(space):
        return f"{name} has the shape {value.shape}, and its space {_shape(space)}"
    low, high = _bounds(space)
    wrong = np.argwhere(~((value >= low) & (value <= high)))  # with what is not a number
    if not len(wrong):
        return f"{name} is of dtype {value.dtype}, and its space of {space.dtype}"
    index = tuple(int(i) for i in wrong[0])
    at = f"{name}[{', '.join(map(str, index))}]" if index else name
    bounds = f"[{np.broadcast_to(low, value.shape)[index]}, {np.broadcast_to(high, value.shape)[index]}]"
    others = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
    return f"{at} is {value[index]}, outside {bounds}{others}"


def _bounds(space: spaces.Space) -> tuple[Any, Any]:
    if isinstance(space, spaces.Box):
        return space.low, space.high
    if isinstance(space, spaces.Discrete):
        return space.start, space.start + space.n - 1
    if isinstance(space, spaces.MultiDiscrete):
        return space.start, space.start + space.nvec - 1
    return 0, 1


def check_learnable(space: Any, name: str) -> None:
    """Raises UsageError where a space, or a part of it, is nothing that can be learned from; names the part.

    Args:
      space: what an environment gives for one.
      name: 'observation' or 'action'.
    """
    leaves = nest.named_leaves(map_space(lambda leaf: leaf, space), name)
    for path, leaf in leaves:
        if not isinstance(leaf, spaces.Space):
            given = f"the class {leaf.__name__}" if isinstance(leaf, type) else repr(leaf)
            raise UsageError(f"the space of {path} is {given}; make it an object, as gymnasium.spaces.Box(-1, 1, (3,))")
        if not isinstance(leaf, LEAF_SPACES):
            raise UsageError(
                f"{path} is a {type(leaf).__name__} space, which alfish cannot learn from; wrap the environment so "
                "that it is a Box, Discrete, MultiDiscrete or MultiBinary, or a Dict or Tuple of these"
            )
        if isinstance(leaf, spaces.Box) and (np.isnan(leaf.low).any() or np.isnan(leaf.high).any()):
            raise UsageError(f"the space of {path} has bounds that are nan; where there is none, it is -inf or inf")
        if 0 in _shape(leaf):
            raise UsageError(f"the space of {path} is {leaf}, which has no entries; leave it out, or give it some")
    if not leaves:
        raise UsageError(f"the space of {name} is {space}, which has no parts; it needs one Box or Discrete at least")


def _observation_leaf(space: spaces.Space) -> spaces.Space:
    if isinstance(space, spaces.Discrete):
        return spaces.Discrete(int(space.n))
    if isinstance(space, spaces.MultiDiscrete):
        return spaces.MultiDiscrete(space.nvec)
    if isinstance(space, spaces.Box) and space.dtype == np.float64:
        return spaces.Box(_float32(space.low), _float32(space.high), dtype=np.float32)
    return space


def _action_leaf(space: spaces.Space) -> spaces.Space:
    if isinstance(space, spaces.Box):
        size = int(np.prod(space.shape))
        if space.is_bounded("both"):
            return spaces.Box(-1.0, 1.0, (size,), np.float32)
        return spaces.Box(_float32(space.low.reshape(size)), _float32(space.high.reshape(size)))
    if isinstance(space, spaces.Discrete):
        return spaces.Discrete(int(space.n))
    if isinstance(space, spaces.MultiDiscrete):
        return spaces.MultiDiscrete(space.nvec.reshape(-1))
    return spaces.MultiBinary(int(np.prod(_shape(space))))


def _float32(bound: np.ndarray) -> np.ndarray:
    """A bound of any dtype; one beyond float32 is infinite."""
    with np.errstate(over="ignore"):
        return bound.astype(np.float32)


def _shape(space: spaces.Space) -> tuple[int, ...]:
    assert space.shape is not None
    return tuple(space.shape)
