"""Schedules that depend on metrics of the run instead of progress.

The value of such a schedule is a buffer of the algorithm or part that has the setting. Checkpoints, workers and
compiled updates therefore contain the value. The trainer finds the schedules of an algorithm and of
`Learner.learning_rate`, and passes each report to them (`alfish.training.measured_schedules`).
"""

import abc
import math
from typing import Any

import gin
import torch
from torch import nn

from alfish.errors import UsageError
from alfish.parameters import FiniteFloat, PositiveFloat, checked
from alfish.parameters.schedules import Schedule, as_schedule


class MeasuredSchedule(nn.Module, abc.ABC):
    """A value that follows a metric: it changes at each measurement, and not with progress.

    Args:
      scalar: name of the metric in metrics.csv, such as 'evaluation/mean_return' or 'train/entropy'.
      initial: value before the first measurement.

    Attributes:
      scalar: the constructor's argument.
      value: current value, 0-d float64.
    """

    value: torch.Tensor

    def __init__(self, scalar: str, initial: float):
        super().__init__()
        self.scalar = scalar
        self.register_buffer("value", torch.tensor(initial, dtype=torch.float64))

    def forward(self, progress: Any) -> torch.Tensor:
        return self.value

    @torch.no_grad()
    def observe(self, measured: float) -> None:
        """Updates the value after a measurement."""
        self.value.fill_(self.next_value(float(self.value), measured))

    @abc.abstractmethod
    def next_value(self, value: float, measured: float) -> float:
        """Returns the value after a measurement.

        Args:
          value: value before the measurement.
          measured: new value of the metric, finite.
        """


@gin.configurable(module="alfish")
@checked
class MeasuredLinear(MeasuredSchedule):
    """Changes linearly from `start` to `end` as a metric goes from `begin` to `finish`.

    The value is constant outside this range of the metric. If the metric goes back, the value goes back too.

    Args:
      scalar: name of the metric in metrics.csv, such as 'evaluation/mean_return'.
      start: value at `begin`, and before the first measurement.
      end: value at `finish`.
      begin, finish: values of the metric at `start` and `end`; `finish` may be smaller than `begin`.
    """

    def __init__(
        self,
        scalar: str = gin.REQUIRED,
        start: FiniteFloat = gin.REQUIRED,
        end: FiniteFloat = 0.0,
        begin: FiniteFloat = 0.0,
        finish: FiniteFloat = gin.REQUIRED,
    ):
        super().__init__(scalar, start)
        if begin == finish:
            raise UsageError(f"MeasuredLinear.begin and finish are both {begin}; they must be different numbers")
        self._start, self._end, self._begin, self._finish = start, end, begin, finish

    def next_value(self, value: float, measured: float) -> float:
        fraction = min(max((measured - self._begin) / (self._finish - self._begin), 0.0), 1.0)
        return self._start + (self._end - self._start) * fraction


@gin.configurable(module="alfish")
@checked
class Feedback(MeasuredSchedule):
    """A value that is multiplied at each measurement by a factor, which depends on a metric's distance from a target.

        value <- value exp(rate (metric - target)), between min_value and max_value

    Args:
      scalar: name of the metric in metrics.csv, such as 'train/entropy'.
      target: target of the metric, at which the value does not change.
      initial: value before the first measurement.
      rate: step size of the value's logarithm, in 1 / units of the metric. If positive, the value rises while the
        metric is above the target; if negative, the value rises while the metric is below the target.
      min_value, max_value: limits of the value.
    """

    def __init__(
        self,
        scalar: str = gin.REQUIRED,
        target: FiniteFloat = gin.REQUIRED,
        initial: PositiveFloat = gin.REQUIRED,
        rate: FiniteFloat = gin.REQUIRED,
        min_value: PositiveFloat = 1e-6,
        max_value: PositiveFloat = 1e6,
    ):
        super().__init__(scalar, initial)
        if not min_value <= initial <= max_value:
            raise UsageError(f"Feedback.initial is {initial}; it must lie between {min_value} and {max_value}")
        self._target, self._rate, self._min_value, self._max_value = target, rate, min_value, max_value

    def next_value(self, value: float, measured: float) -> float:
        factor = math.exp(min(max(self._rate * (measured - self._target), -700.0), 700.0))
        return min(max(value * factor, self._min_value), self._max_value)


def schedule_of_progress(value: "float | Schedule", name: str) -> Schedule:
    """Returns a schedule like `as_schedule`, for settings that cannot follow a metric.

    Args:
      value: number or schedule.
      name: name of the parameter in messages, such as 'Prioritized.beta'.

    Raises:
      UsageError: the value is a `MeasuredSchedule`.
    """
    if isinstance(value, MeasuredSchedule):
        raise UsageError(
            f"{name} is a {type(value).__name__}, but only settings of the algorithm and Learner.learning_rate follow "
            "measured numbers; give a number, or a schedule of progress such as @Linear()"
        )
    return as_schedule(value)
