"""What summaries say of an asynchronous unroller."""

import time

import numpy as np

from alfish.unrollers.workers.messages import Seconds


class Stats:
    """Gathers lags, waits and times, from one summary to the next."""

    def __init__(self) -> None:
        self._clear()

    def filled(self, seconds: Seconds) -> None:
        """Notes what a worker spent on a segment that it has filled."""
        self._seconds += seconds

    def waited(self, seconds: float) -> None:
        """Notes how long the trainer has waited for segments."""
        self._waited += seconds

    def delivered(self, lags: list[int]) -> None:
        """Notes of segments taken over how many iterations ago their weights were published."""
        self._lags += lags

    def masked(self, num_rows: int) -> None:
        """Notes that rows were too old to be trained on."""
        self._num_masked += num_rows

    def take(self) -> dict[str, float]:
        """Scalars by name, since the call before; times are shares of all that workers, or the trainer, did."""
        total = self._seconds.sum() or 1.0
        result = {f"worker_{name}_share": float(part / total) for name, part in zip(Seconds._fields, self._seconds)}
        result["trainer_wait_share"] = self._waited / max(time.perf_counter() - self._began, 1e-9)
        if self._lags:
            result["lag_min"] = float(min(self._lags))
            result["lag_mean"] = float(np.mean(self._lags))
            result["lag_max"] = float(max(self._lags))
        result["masked_rows"] = float(self._num_masked)
        self._clear()
        return result

    def _clear(self) -> None:
        self._began = time.perf_counter()
        self._seconds = np.zeros(len(Seconds._fields))  # of all workers
        self._waited = 0.0
        self._lags: list[int] = []
        self._num_masked = 0
