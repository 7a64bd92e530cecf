"""Errors of the pickle reader, and values of a file as messages show them."""

from typing import Any

MAX_DIMS = 32
MAX_SHOWN = 200  # characters of a file's own words in a message


class PickleError(ValueError):
    """A pickle is damaged, or holds something else than data; the message completes "...: it ..."."""


class RefusedError(Exception):
    """A pickle asks for a name that is not allowed; the message is that name."""


def shown(value: Any) -> str:
    """Returns a value of a file for a message, at most `MAX_SHOWN` characters of it."""
    words = str(value) if isinstance(value, (str, int, float)) or _is_flat(value) else type(value).__name__
    return words if len(words) <= MAX_SHOWN else f"{words[:MAX_SHOWN]}..."


def _is_flat(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) <= MAX_DIMS and all(isinstance(part, (int, str)) for part in value)
