"""Limits on what a pickle may make of its bytes."""

from typing import Any

from alfish.offline.pickles.faults import PickleError

MAX_SHARED = 2**20  # bytes and entries that a file may copy in addition to its own size
MAX_WAITING = 2**17  # values on the stack, and marks; a list in a list in a list ... is no data
KEYS = (str, bytes, int, float, type(None))  # a tuple is no key: its parts may be shared, and hashing it may not end


class CopyBudget:
    """Counts the bytes and entries that reading a file copies.

    A file holds each of them in at least one byte, unless it shares them.

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
            raise PickleError("it copies its parts far more often than its size allows")
