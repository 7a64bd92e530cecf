"""The clock and the budget of a run, and the calibration of its transforms."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from alfish.errors import UsageError

# For each budget of `Trainer`, the counter of the clock that it limits.
BUDGETS = {
    "num_env_steps": "env_steps",
    "num_iterations": "iterations",
    "num_updates": "updates",
    "wall_seconds": "wall_seconds",
}


class Budget(NamedTuple):
    """The number of steps, iterations, updates or seconds after which a run is finished.

    Attributes:
      name: name of a counter, one of `BUDGETS`.
      size: value of that counter at which the run is finished.
      wall_limit: seconds of training after which the run is finished even if the budget is not spent.
    """

    name: str
    size: float
    wall_limit: float = math.inf

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> "Budget":
        """Returns the budget among the arguments of a trainer.

        Raises:
          UsageError: no budget was given, or several besides wall_seconds.
        """
        chosen = {name: arguments[name] for name in BUDGETS if arguments[name] is not None}
        said = " and ".join(f"Trainer.{name} = {value}" for name, value in chosen.items()) or "none"
        wall_limit = chosen.pop("wall_seconds", math.inf)
        if not chosen and wall_limit < math.inf:
            return cls("wall_seconds", wall_limit, wall_limit)
        if len(chosen) != 1:
            raise UsageError(
                "Trainer requires exactly one budget: num_env_steps, num_iterations or num_updates, each optionally "
                f"together with wall_seconds, or wall_seconds alone; given: {said}"
            )
        return cls(*next(iter(chosen.items())), wall_limit)


class Clock:
    """Counts steps, iterations, updates and seconds of a run, over all resumes.

    Args:
      budget: budget of the run.
      stop_at: clock steps at which training pauses; None means that training does not pause.

    Attributes:
      budget, stop_at: the constructor's arguments.
      env_steps: number of environment steps of all environments together.
      iterations, updates: numbers of finished iterations and updates.
      wall_seconds: seconds of iterations, without the seconds of listeners.
      idle: number of clock steps without a step of an environment; included in `value`.
      stop_reason: argument of `stop`; None if `stop` was not called.
    """

    def __init__(self, budget: Budget, stop_at: int | None = None):
        self.budget = budget
        self.stop_at = stop_at
        self._counter = BUDGETS[budget.name]
        self.env_steps = self.iterations = self.updates = self.idle = 0
        self.wall_seconds = 0.0
        self.stop_reason: str | None = None

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> "Clock":
        """Returns the clock for the arguments of a trainer; raises as `Budget.of` does."""
        return cls(Budget.of(arguments), arguments["stop_at"])

    @property
    def value(self) -> int:
        """Clock steps, the unit of periods, file names and axes.

        The value is the sum of environment steps and `idle`, which counts the steps for which training continued after
        acting ended, and the updates of iterations that do not act.
        """
        return self.env_steps + self.idle

    @property
    def progress(self) -> float:
        """The spent fraction of the budget, in [0, 1]."""
        return min(1.0, self.spent / self.budget.size)

    @property
    def spent(self) -> float:
        """Value of the counter that the budget limits."""
        return getattr(self, self._counter)

    @property
    def finished(self) -> bool:
        """True if the budget is spent, or if `stop` was called."""
        is_spent = self.spent >= self.budget.size or self.wall_seconds >= self.budget.wall_limit
        return self.stop_reason is not None or is_spent

    @property
    def paused(self) -> bool:
        """True if `stop_at` is reached and the run is not finished."""
        return self.stop_at is not None and self.value >= self.stop_at and not self.finished

    def stop(self, reason: str) -> None:
        """Finishes the run; see `Trainer.stop`."""
        if not isinstance(reason, str) or not reason.strip():
            raise UsageError(f"Trainer.stop requires a reason in words, such as 'solved', but was given {reason!r}")
        if self.stop_reason is None:
            self.stop_reason = reason.strip()

    def state_dict(self) -> dict[str, Any]:
        return {
            "env_steps": self.env_steps,
            "iterations": self.iterations,
            "wall_seconds": self.wall_seconds,
            "idle_steps": self.idle,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a state; `updates` is loaded by the learner."""
        self.env_steps, self.iterations = state["env_steps"], state["iterations"]
        self.wall_seconds, self.idle = state["wall_seconds"], state["idle_steps"]


# Environment steps of a calibration: the largest number, and the number if the steps of the run are unknown.
MOST_CALIBRATION, UNPLANNED_CALIBRATION = 10_000, 1000


class Calibration:
    """Determines when transforms observe rows, and when updates may begin.

    Args:
      fraction: fraction of the budget in which transforms observe rows, in [0, 1]; limited to 10,000 steps. None means
        that transforms observe all rows of the run.
      num_env_steps: number of environment steps of the run; inf if unknown, for which calibration takes 1000 steps.

    Attributes:
      is_set: whether there is a calibration. If not, transforms observe each unroll after the updates on this unroll.
    """

    def __init__(self, fraction: float | None, num_env_steps: float):
        self.is_set = fraction is not None
        planned: float = UNPLANNED_CALIBRATION
        if fraction and math.isfinite(num_env_steps):
            planned = min(fraction * num_env_steps, MOST_CALIBRATION)
        # Calibration takes at least one unroll, so its end is at least 1.
        self._end = max(1.0, planned if fraction else 0.0) if self.is_set else 0.0

    def lasts(self, env_steps: int) -> bool:
        """Returns whether calibration still lasts after `env_steps` environment steps."""
        return env_steps < self._end

    def state_dict(self) -> dict[str, Any]:
        return {"is_set": self.is_set, "end": self._end}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the end of calibration, because a different budget must not restart calibration."""
        if self.is_set and state["is_set"]:
            self._end = state["end"]


def next_due(clock: int, period: int, planned: float = math.inf) -> int:
    """Returns the first multiple of `period` after `clock`, or `planned` if that is earlier.

    A resumed run passes `planned`, because its period may have changed.

    Args:
      clock: current clock of the run.
      period: number of clock steps, positive.
      planned: clock that was planned before; inf means none.
    """
    return int(min(planned, (clock // period + 1) * period))
