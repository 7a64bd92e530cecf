"""The beginning of a run, in which transforms observe rows and nothing is trained."""

import math
from typing import Any

MOST_CALIBRATION, UNPLANNED_CALIBRATION = 10_000, 1000  # environment steps; the second if the budget is not of steps


class Calibration:
    """Says when transforms observe rows, and when updates may begin.

    Args:
      fraction: part of the budget in which transforms observe rows, in [0, 1], at most 10,000 steps; None: they observe
        all rows of the run.
      num_env_steps: environment steps in which rows are collected; inf: it is not known.

    Attributes:
      is_set: whether there is a calibration; if not, transforms observe each unroll after it was trained on.
    """

    def __init__(self, fraction: float | None, num_env_steps: float):
        self.is_set = fraction is not None
        planned: float = UNPLANNED_CALIBRATION
        if fraction and math.isfinite(num_env_steps):
            planned = min(fraction * num_env_steps, MOST_CALIBRATION)
        # It has at least one unroll, so it lasts before the first step.
        self._end = max(1.0, planned if fraction else 0.0) if self.is_set else 0.0

    def lasts(self, env_steps: int) -> bool:
        """Returns whether it lasts after so many environment steps."""
        return env_steps < self._end

    def state_dict(self) -> dict[str, Any]:
        return {"is_set": self.is_set, "end": self._end}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keeps the end that the run began with: another budget must not let it begin again."""
        if self.is_set and state["is_set"]:
            self._end = state["end"]
