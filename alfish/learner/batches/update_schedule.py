"""Number of updates that are due after a number of steps."""

import math
from typing import Any

# Default warm-up in environment steps: the upper limit of a tenth of the budget; and the value if the budget does not
# limit steps.
MOST_WARMUP, UNPLANNED_WARMUP = 10_000, 1000


class UpdateSchedule:
    """Computes how many updates are due after a number of environment steps, independently of the unroll length.

    After `steps` environment steps, floor(ratio * (steps - warm-up)) updates are due in total, in addition to the
    offline updates. Updates that become due before replay holds a batch are made as soon as replay holds one. If a run
    continues with another ratio, the new ratio applies to later steps only.

    Args:
      ratio: number of updates for each environment step; positive, may be below 1.
      warmup_env_steps: number of environment steps during which no update is due; None means that `plan` chooses.
      offline_updates: number of updates before the first environment step; the clock counts each as a step.

    Attributes:
      ratio, warmup_env_steps: the constructor's arguments; `warmup_env_steps` is a number after `plan`.
      num_env_steps: the argument of `plan`.
      needed_env_steps: number of environment steps after which replay holds a batch; set by the owner of the schedule.
      num_updates: number of updates made in all.
      can_draw: whether the replay of every learner is known to hold a window.
    """

    def __init__(self, ratio: float, warmup_env_steps: int | None, offline_updates: int):
        self.ratio, self._offline_updates = ratio, offline_updates
        self._is_planned = warmup_env_steps is None
        if warmup_env_steps is None:
            warmup_env_steps = 0 if offline_updates else UNPLANNED_WARMUP
        self.warmup_env_steps = warmup_env_steps
        self.num_env_steps, self.needed_env_steps = math.inf, 0
        self.num_updates, self.can_draw = 0, False
        # After `_since` steps, not counting warm-up, `_made` updates were due; `ratio` applies to later steps.
        self._since, self._made = offline_updates, offline_updates
        self._clock = 0  # clock of the run when updates were last counted

    def plan(self, num_env_steps: float, least: int, most: float) -> None:
        """Chooses the warm-up if none was given: a tenth of the budget's steps, at most `MOST_WARMUP`.

        After offline updates there is none, because the policy has already learned.

        Args:
          num_env_steps: number of environment steps that the budget allows; inf if the budget does not limit steps.
          least, most: smallest and largest number of steps of a chosen warm-up; `most` takes precedence.
        """
        self.num_env_steps = num_env_steps
        if self._is_planned and not self._offline_updates:
            tenth = min(num_env_steps / 10, MOST_WARMUP) if math.isfinite(num_env_steps) else UNPLANNED_WARMUP
            self.warmup_env_steps = int(min(max(tenth, least), most))

    @property
    def has_offline_updates(self) -> bool:
        """True if updates are made before the first environment step."""
        return self._offline_updates > 0

    @property
    def num_offline_due(self) -> int:
        """Number of offline updates that are still due."""
        return max(0, self._offline_updates - self.num_updates)

    @property
    def _first(self) -> int:
        """Clock steps after which a new run makes its first update on collected rows."""
        return self._offline_updates + max(self.warmup_env_steps, self.needed_env_steps)

    def num_due(self, clock: int) -> int:
        """Returns the number of updates to make at `clock`, once all offline updates are made."""
        self._clock = clock
        collected = clock - self._offline_updates
        if collected < self.warmup_env_steps or collected < self.needed_env_steps:
            return 0
        return max(0, self._total(clock - self.warmup_env_steps) - self.num_updates)

    def num_until(self, clock: int) -> int:
        """Returns the number of updates from now to `clock`, once all offline updates are made."""
        now = self._clock
        due, self._clock = self.num_due(clock), now
        return due

    def resume_without_rows(self, clock: int) -> int:
        """Continues with an empty replay: collects before training, and skips updates that become due meanwhile.

        Args:
          clock: clock steps of the run.

        Returns:
          Number of environment steps to collect: the largest of three numbers. They are the rest of the warm-up; a
          tenth of the remaining budget, but no more than the warm-up; and `needed_env_steps`.
        """
        self.can_draw = False
        if self.num_offline_due:
            return self._first - self._offline_updates  # nothing was collected yet
        collected = clock - self._offline_updates
        again = min(self.warmup_env_steps, max(0, self.num_env_steps - collected) / 10)
        num_steps = max(self.needed_env_steps, self.warmup_env_steps - collected, int(again))
        self.num_updates = max(self.num_updates, self._total(clock + num_steps - self.warmup_env_steps))
        return num_steps

    def state_dict(self) -> dict[str, Any]:
        counted = {"ratio": self.ratio, "clock": self._clock, "since": self._since, "made": self._made}
        return {"num_updates": self.num_updates, "warmup_env_steps": self.warmup_env_steps, **counted}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores `state`. If the state was saved with another ratio, the new ratio applies only to later steps.

        A warm-up that was chosen from an earlier budget is kept. With a longer warm-up, fewer updates would be due than
        have already been made.
        """
        self.num_updates = state["num_updates"]
        if self._is_planned:
            self.warmup_env_steps = state.get("warmup_env_steps", UNPLANNED_WARMUP)  # older versions did not save it
        if "ratio" not in state:  # older versions did not save it
            return
        self._clock = state["clock"]
        self._since = state["since"]
        self._made = state["made"]
        since = self._clock - self.warmup_env_steps
        if state["ratio"] != self.ratio and since > self._since:
            self._since, self._made = since, self.num_updates

    def _total(self, clock: int) -> int:
        """Returns the number of due updates, including offline updates; `clock` is without the warm-up steps."""
        return self._made + max(0, math.floor(self.ratio * (clock - self._since) + 1e-9))
