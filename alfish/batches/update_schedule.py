"""Number of updates that are due at a point of a run."""

import math
from typing import Any


class UpdateSchedule:
    """Counts the updates that are due for environment steps, independent of the unroll length.

    After `clock` steps of the run's clock, floor(ratio * (clock - warm-up)) updates are due in all, and offline ones
    before them. Updates that are due before replay holds a batch are made when it does. In a run that continues with
    another ratio, that ratio counts for the steps from there on.

    Args:
      ratio: updates for each environment step; positive, may be below 1.
      warmup_env_steps: environment steps for which no update is due.
      offline_updates: made before the first environment step; the clock counts them as steps.

    Attributes:
      ratio: see above.
      first_env_steps: environment steps until replay holds a batch and an update can be made.
      num_updates: made in all.
      can_draw: whether replay is known to hold a window for every one of several learners.
    """

    def __init__(self, ratio: float, warmup_env_steps: int, offline_updates: int):
        self.ratio, self._warmup_env_steps, self._offline_updates = ratio, warmup_env_steps, offline_updates
        self.first_env_steps = warmup_env_steps
        self.num_updates, self.can_draw = 0, False
        # After `_since` steps without warm-up `_made` updates were due; from there on `ratio` counts.
        self._since, self._made = offline_updates, offline_updates
        self._clock = 0  # of the run, when updates were last counted
        self._origin: int | None = None  # on the run's clock, where this process resumed without rows

    @property
    def has_offline_updates(self) -> bool:
        """True if updates are made before the first environment step."""
        return self._offline_updates > 0

    @property
    def num_offline_due(self) -> int:
        """Number of offline updates that are still due."""
        return max(0, self._offline_updates - self.num_updates)

    def num_due(self, clock: int) -> int:
        """Returns the number of updates to make at `clock`, when all offline updates are made."""
        self._clock = clock
        begin = self._offline_updates if self._origin is None else self._origin
        if clock < begin + self.first_env_steps:
            return 0  # too few rows, in a new run or in one that was resumed without them
        return max(0, self._total(clock - self._warmup_env_steps) - self.num_updates)

    def resume_without_rows(self, clock: int) -> None:
        """Continues at `clock` with an empty replay: collects before training, and skips the updates due meanwhile."""
        self.can_draw = False
        if not self.num_offline_due:
            self._origin = clock
            self.num_updates = max(self.num_updates, self._total(clock))

    def state_dict(self) -> dict[str, Any]:
        counted = {"ratio": self.ratio, "clock": self._clock, "since": self._since, "made": self._made}
        return {"num_updates": self.num_updates, **counted}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores `state`. If it was saved with another ratio, the new one counts from there on."""
        self.num_updates = state["num_updates"]
        if "ratio" not in state:  # of older versions
            return
        self._clock, self._since, self._made = state["clock"], state["since"], state["made"]
        since = self._clock - self._warmup_env_steps
        if state["ratio"] != self.ratio and since > self._since:
            self._since, self._made = since, self.num_updates

    def _total(self, clock: int) -> int:
        """Returns the updates due after `clock` steps without warm-up, offline ones included."""
        return self._made + max(0, math.floor(self.ratio * (clock - self._since) + 1e-9))
