"""Checks of spaces and of their elements."""

from typing import Any

import numpy as np
from gymnasium import spaces

from alfish import nest
from alfish.errors import UsageError
from alfish.nest import Nest
from alfish.specs.spaces import (
    LEAF_SPACES,
    is_bounded,
    is_float,
    map_space,
    missing_bounds,
    shape_of,
    without_vast_bounds,
)

ROUNDING = 1e-6  # tolerance of bounds for rounding errors, relative to the larger of 1 and the bound's magnitude


def check_learnable(space: Any, name: str) -> None:
    """Checks that alfish can learn from a space and all of its parts.

    Args:
      space: object that an environment declares as a space.
      name: kind of the space, 'observation' or 'action'.

    Raises:
      UsageError: the space is not supported; the message names the part.
    """
    leaves = nest.named_leaves(map_space(lambda leaf: leaf, space), name)
    for path, leaf in leaves:
        if not isinstance(leaf, spaces.Space):
            given = f"the class {leaf.__name__}" if isinstance(leaf, type) else repr(leaf)
            raise UsageError(
                f"the space of {path} is {given}; make it an object, such as gymnasium.spaces.Box(-1, 1, (3,))"
            )
        if not isinstance(leaf, LEAF_SPACES):
            has_index = any(part.isdigit() for part in path.split("."))  # index of a part of a Tuple
            inside = path.partition(".")[2] if name == "observation" and not has_index else ""
            out = f"leave it out with make_environment.leave_out = [{inside!r}], or " if inside else ""
            raise UsageError(
                f"{path} is a {type(leaf).__name__} space, which alfish cannot learn from; {out}wrap the environment "
                f"(gymnasium.wrappers.Transform{name.capitalize()}) so that it is a Box, Discrete, MultiDiscrete or "
                "MultiBinary, or a Dict or Tuple of these"
            )
        if isinstance(leaf, spaces.Box) and (np.isnan(leaf.low).any() or np.isnan(leaf.high).any()):
            raise UsageError(f"the space of {path} has bounds that are nan; write -inf or inf for a missing bound")
        if 0 in shape_of(leaf):
            raise UsageError(
                f"the space of {path} is {leaf}, which has no entries; leave the leaf out, or give it entries"
            )
    if not leaves:
        raise UsageError(f"the space of {name} is {space}, which has no parts; it needs at least one Box or Discrete")


def check_scalar_reward(name: str, reward_spec: spaces.Box) -> None:
    """Raises UsageError if rewards are vectors; `name` is the algorithm's name."""
    if reward_spec.shape:
        raise UsageError(
            f"{name} requires a scalar reward, but the environment's reward is a vector of {reward_spec.shape[0]} "
            "entries; add its entries up in a wrapper"
        )


def check_finite_choice(name: str, action_spec: Nest) -> None:
    """Raises UsageError if an action has a Box leaf.

    Args:
      name: name of the parameter that requires a finite number of choices.
      action_spec: canonical spec of the actions, see `alfish.specs`.
    """
    for path, leaf in nest.named_leaves(action_spec, "action"):
        if isinstance(leaf, spaces.Box):
            raise UsageError(
                f"{name} is set, but the {path} is a Box, for which PPO's policy has no uniform distribution; set "
                "entropy_coef instead"
            )


def check_box_action(name: str, action_spec: Nest) -> None:
    """Raises UsageError for an action with a leaf other than a bounded Box; `name` is the algorithm's name."""
    for path, leaf in nest.named_leaves(action_spec, "action"):
        if not isinstance(leaf, spaces.Box):
            raise UsageError(f"{name} requires bounded Box actions, but the {path} is {leaf}; train with PPO")
        check_bounded(f"{name} requires bounded Box actions", path, leaf, "PPO")


def check_bounded(reason: str, path: str, leaf: spaces.Space, instead: str) -> None:
    """Raises UsageError for a Box in which an entry lacks a bound.

    Args:
      reason: beginning of the message: the reason why bounds are needed.
      path: path of the leaf in the action.
      leaf: leaf of a canonical action spec.
      instead: name of an algorithm that needs no bounds.
    """
    if isinstance(leaf, spaces.Box) and not is_bounded(leaf):
        raise UsageError(
            f"{reason}, but the {path} has {missing_bounds(leaf)} ({leaf}); set make_environment.action_bounds (1.0 "
            f"means -1 and 1), or train with {instead}"
        )


def check_hybrid_action(name: str, action_spec: Nest) -> None:
    """Raises UsageError unless all leaves are bounded Boxes except at most one Discrete with several choices.

    Args:
      name: name of the algorithm.
      action_spec: canonical spec of the actions, see `alfish.specs`.
    """
    named = nest.named_leaves(action_spec, "action")
    for path, leaf in named:
        if not isinstance(leaf, (spaces.Box, spaces.Discrete)):
            raise UsageError(f"{name} requires Box or Discrete actions, but the {path} is {leaf}; train with PPO")
        check_bounded(f"{name} squashes its actions into bounds", path, leaf, "PPO")
        if isinstance(leaf, spaces.Discrete) and leaf.n < 2:
            raise UsageError(f"the {path} is {leaf}, which has a single value; remove it from the action space")
    count = sum(isinstance(leaf, spaces.Discrete) for _, leaf in named)
    if count > 1:
        raise UsageError(
            f"{name} requires at most one Discrete action leaf, but the action space has {count}; train with PPO"
        )


def outside(value: Any, space: spaces.Space, name: str) -> str | None:
    """Returns a sentence about the first part of a value that is outside its space; None if no part is outside.

    Floats may exceed their bounds by `ROUNDING`.

    Args:
      value: element to check.
      space: space of the element, which may be nested.
      name: name of the value, the prefix of the names of its parts.
    """
    if isinstance(space, spaces.Dict):
        parts = [(value[key], child, f"{name}.{key}") for key, child in space.items()]
    elif isinstance(space, spaces.Tuple):
        parts = [(value[i], child, f"{name}.{i}") for i, child in enumerate(space.spaces)]
    else:
        if isinstance(space, spaces.Box):
            space = without_vast_bounds(space)
        return None if value in space else _fault(np.asarray(value), space, name)
    return next((fault for part in parts if (fault := outside(*part))), None)


def with_rounding(low: Any, high: Any) -> tuple[Any, Any]:
    """Returns bounds of floats, widened by `ROUNDING`."""
    least, most = (bound + sign * ROUNDING * np.maximum(1.0, np.abs(bound)) for bound, sign in ((low, -1), (high, 1)))
    return least, most


def _fault(value: np.ndarray, space: spaces.Space, name: str) -> str | None:
    if value.shape != shape_of(space):
        return f"{name} has the shape {value.shape}, but its space has {shape_of(space)}"
    low, high = _bounds(space)
    is_inside = (value >= low) & (value <= high)  # False for nan
    if is_inside.all():
        return f"{name} has dtype {value.dtype}, but its space has {space.dtype}"
    if is_float(space):
        least, most = with_rounding(low, high)
        is_inside = (value >= least) & (value <= most)
    wrong = np.argwhere(~is_inside)
    if not len(wrong):
        return None
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
