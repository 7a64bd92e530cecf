"""Statistics of asynchronous collecting, for summaries."""

import time
from collections import Counter

import numpy as np

from alfish.processes.messages import Seconds


class Stats:
    """Accumulates lags, waits and times between two summaries."""

    def __init__(self) -> None:
        self._clear()

    def filled(self, seconds: Seconds) -> None:
        """Adds the seconds that a worker spent on a segment."""
        self._seconds += seconds

    def waited(self, seconds: float) -> None:
        """Adds the seconds that the trainer waited for segments."""
        self._waited += seconds

    def delivered(self, lags: list[int]) -> None:
        """Adds the lags of segments: iterations since the publication of their weights."""
        self._lags += lags

    def masked(self, num_rows: int, name: str = "") -> None:
        """Adds the number of rows that were masked because they were too old.

        Args:
          num_rows: number of rows.
          name: name of the policy of the rows; '' if there is only one policy.
        """
        self._num_masked[name] += num_rows

    def take(self) -> dict[str, float]:
        """Returns scalars by name, and resets the sums. Times are fractions of the workers' or the trainer's time."""
        total = self._seconds.sum() or 1.0
        result = {f"worker_{name}_fraction": float(part / total) for name, part in zip(Seconds._fields, self._seconds)}
        result["trainer_wait_fraction"] = self._waited / max(time.perf_counter() - self._began, 1e-9)
        if self._lags:
            result["lag_min"] = float(min(self._lags))
            result["lag_mean"] = float(np.mean(self._lags))
            result["lag_max"] = float(max(self._lags))
        result["masked_rows"] = float(self._num_masked.total())
        result |= {f"{name}/masked_rows": float(count) for name, count in self._num_masked.items() if name}
        self._clear()
        return result

    def _clear(self) -> None:
        self._began = time.perf_counter()
        self._seconds = np.zeros(len(Seconds._fields))  # seconds of all workers
        self._waited = 0.0
        self._lags: list[int] = []
        self._num_masked = Counter[str]()
