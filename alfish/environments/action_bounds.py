"""Bounds of actions for spaces that declare none (`make_environment.action_bounds`).

Robot simulators often declare Box(-inf, inf), but algorithms that squash their actions need bounds.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from alfish import specs
from alfish.environments.simulator import Simulator
from alfish.errors import UsageError


def bound_actions(env: Any, bounds: float | Sequence[float] | None) -> None:
    """Declares bounds for the actions of a simulator or a vector environment; with None, nothing changes."""
    if bounds is None:
        return
    name = "action_space" if isinstance(env, Simulator) else "single_action_space"
    setattr(env, name, bounded(getattr(env, name), bounds))


def bounded(space: spaces.Space, bounds: float | Sequence[float]) -> spaces.Space:
    """Returns an action space with bounds -a and a wherever its Box lacks bounds.

    Args:
      space: action space of one environment.
      bounds: bound a: one positive number, or a number for each entry of the action.

    Raises:
      UsageError: the space is not a Box of floats or already has all bounds; the number of bounds differs from the
        number of entries; or a bound is not positive, or contradicts a bound of the space.
    """
    setting = f"make_environment.action_bounds is {bounds!r}"
    if not isinstance(space, spaces.Box) or not specs.is_float(space):
        raise UsageError(
            f"{setting}, which requires a Box of floats, but the action space is {space}; leave action_bounds out"
        )
    box = specs.without_vast_bounds(space)
    if box.is_bounded("both"):
        raise UsageError(f"{setting}, but the action space already has bounds, {space}; leave action_bounds out")
    given = np.asarray(bounds, box.dtype)
    if given.ndim and given.size != np.prod(box.shape):
        raise UsageError(
            f"{setting}, which has {given.size} numbers, but actions have shape {box.shape}; give one number for each "
            "entry"
        )
    limit = np.broadcast_to(given.reshape(box.shape) if given.ndim else given, box.shape)
    low, high = np.where(box.bounded_below, box.low, -limit), np.where(box.bounded_above, box.high, limit)
    if not (np.isfinite(limit) & (limit > 0) & (low < high)).all():
        raise UsageError(
            f"{setting}; each bound a must be positive, -a must be below the upper bound of {space}, and a above the "
            "lower bound"
        )
    return spaces.Box(low, high, dtype=box.dtype.type)
