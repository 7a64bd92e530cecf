"""Whether bound values are of the kind that a parameter takes, as its annotation says."""

import collections.abc
import functools
import inspect
import typing
from pathlib import Path
from types import NoneType
from typing import Any

import gin

PLAIN = (int, float, str, bool, NoneType, Path)


@functools.cache
def hints(selector: str) -> dict[str, Any]:
    """The annotations of a configurable's parameters; none, where they cannot be read."""
    wrapped = gin.config._REGISTRY[selector].wrapped
    try:
        return typing.get_type_hints(wrapped.__init__ if inspect.isclass(wrapped) else wrapped)
    except (NameError, TypeError, AttributeError):
        return {}


def takes_parts(selector: str, parameter: str | None = None) -> bool:
    """Whether a parameter, or any of them, takes classes, functions or objects, and so is what builds others."""
    annotations = hints(selector)
    if parameter is not None:
        return not _is_plain(annotations.get(parameter, Any))
    return any("Callable" in str(annotation) for annotation in annotations.values())


def _is_plain(annotation: Any) -> bool:
    inner = [one for one in typing.get_args(annotation) if one is not Ellipsis]
    if typing.get_origin(annotation) is collections.abc.Callable:
        return False
    return all(map(_is_plain, inner)) if inner else annotation in PLAIN
