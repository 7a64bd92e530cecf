"""Deaths of processes that a run tolerates."""

import time
from collections import deque


class Deaths:
    """Deaths within the last seconds.

    Args:
      most: number of deaths that are tolerated.
      seconds: length of the window.
    """

    def __init__(self, most: int, seconds: float):
        self.most, self.seconds = most, seconds
        self._times: deque[float] = deque()
        self._newest: int | None = None  # cause of several deaths

    def add(self, cause: int | None = None) -> int:
        """Adds a death now, and returns the number of deaths within the window.

        Args:
          cause: process id of the server with which several workers die, which count as one; None: it died by itself.
        """
        now = time.monotonic()
        if cause is None or cause != self._newest:
            self._times.append(now)
            self._newest = cause if cause is not None else self._newest
        while self._times and self._times[0] < now - self.seconds:
            self._times.popleft()
        return len(self._times)

    def clear(self) -> None:
        """Removes all deaths."""
        self._times.clear()
