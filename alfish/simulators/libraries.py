"""Helpers for simulators' libraries: imports on demand, spaces and configurations."""

import difflib
import importlib
from collections.abc import Iterable, Mapping
from typing import Any

import gymnasium
import numpy as np

from alfish.errors import UsageError


def library(name: str, command: str) -> Any:
    """Imports a module of a simulator's library.

    Args:
      name: name of the module.
      command: command that installs the library.

    Raises:
      UsageError: the library is not installed.
    """
    package = name.partition(".")[0]
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package:
            raise  # the library is installed, but a package that it imports is not
        raise UsageError(f"{package} is not installed: {command}") from error


def check_task(task: str, known: Iterable[str], package: str) -> None:
    """Raises UsageError if a library has no task of this name."""
    known = list(known)
    if task not in known:
        close = difflib.get_close_matches(task, known, 2, 0.4) or sorted(known)[:2]
        raise UsageError(f"{package} has no task {task!r}; did you mean {' or '.join(map(repr, close))}?")


def set_up(config: Any, settings: Mapping[str, Any] | None, name: str) -> None:
    """Sets attributes of a configuration by path.

    Args:
      config: object with attributes and mappings.
      settings: values by path, such as {'scene.env_spacing': 2.5}.
      name: name of the parameter, for messages.

    Raises:
      UsageError: the configuration has no such part.
    """
    for path, value in (settings or {}).items():
        *parents, last = path.split(".")
        place = config
        for key in parents:
            place = _parts(place).get(key)
        if last not in _parts(place):
            known = difflib.get_close_matches(last, _parts(place), 3, 0.5) or list(_parts(place))[:3]
            has = f"; there it has {', '.join(known)}" if known else ""
            raise UsageError(f"{name} sets {path!r}, which the task's configuration does not have{has}")
        if isinstance(place, dict):
            place[last] = value
        else:
            setattr(place, last, value)


def _parts(place: Any) -> dict[str, Any]:
    """Returns the parts of a configuration by name, including attributes that only its class declares."""
    if isinstance(place, Mapping):
        return dict(place)
    names = [name for name in dir(place) if not name.startswith("_")]
    return {name: getattr(place, name) for name in names}


def as_space(space: Any) -> gymnasium.Space:
    """Converts another library's space to gymnasium's: one with `spaces` to a Dict, one with bounds to a Box."""
    if isinstance(space, gymnasium.Space):
        return space
    if hasattr(space, "spaces"):
        return gymnasium.spaces.Dict({name: as_space(part) for name, part in space.spaces.items()})
    low, high = (np.broadcast_to(np.asarray(bound, space.dtype), space.shape) for bound in (space.low, space.high))
    return gymnasium.spaces.Box(low, high, dtype=np.dtype(space.dtype).type)


def unbounded(shape: Iterable[int], dtype: Any = np.float32) -> gymnasium.spaces.Box:
    """Returns a Box without bounds, or with the limits of an integer dtype."""
    low, high = (-np.inf, np.inf) if np.issubdtype(dtype, np.floating) else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    return gymnasium.spaces.Box(low, high, tuple(shape), dtype)
