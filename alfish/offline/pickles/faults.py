"""Errors of the pickle reader, limits on the size of a pickle's content, and the format of values in messages."""

from typing import Any

MAX_DIMS = 32
MAX_SHOWN = 200  # maximum number of characters of a file's words in a message


class PickleError(ValueError):
    """Raised if a pickle is damaged, or does not hold data; the message is a clause in which "it" is the pickle."""


class RefusedError(Exception):
    """Raised if a pickle refers to a name that is not allowed; the message is that name."""


def shown(value: Any) -> str:
    """Returns a value of a file for a message, at most `MAX_SHOWN` characters long."""
    words = str(value) if isinstance(value, (str, int, float)) or _is_flat(value) else type(value).__name__
    return words if len(words) <= MAX_SHOWN else f"{words[:MAX_SHOWN]}..."


def _is_flat(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) <= MAX_DIMS and all(isinstance(part, (int, str)) for part in value)


MAX_SHARED = 2**20  # bytes and entries that a file may copy in addition to its own size
MAX_WAITING = 2**17  # maximum number of values, and of marks, on the stack; data do not need more
KEYS = (str, bytes, int, float, type(None))  # no tuples: their parts may be shared, and hashing may never end


class CopyBudget:
    """Counts the bytes and entries that reading a file copies.

    Each byte or entry takes at least one byte of the file, unless parts are shared.

    Args:
      num_bytes: size of the file.
    """

    def __init__(self, num_bytes: int):
        self._left = num_bytes + MAX_SHARED

    def spend(self, values: Any) -> None:
        """Counts a copy of `values`.

        Raises:
          PickleError: shared parts are copied far more often than the file's size allows.
        """
        self._left -= len(values)
        if self._left < 0:
            raise PickleError("it copies its parts far more often than a file of its size should")
