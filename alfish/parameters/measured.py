"""Schedules that follow numbers which a run has measured, in place of progress.

The value of such a schedule is a buffer of the algorithm or part whose setting it is. So checkpoints, workers and
compiled updates have the value, as they have other buffers. The trainer finds the schedules of an algorithm and of
`Learner.learning_rate`, and shows them each report (`alfish.training.measured_schedules`).
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
    """A value that changes when a number is measured, whatever the progress.

    Args:
      scalar: name of the number in metrics.csv, such as 'evaluation/mean_return' or 'train/entropy'.
      initial: value before the first measurement.

    Attributes:
      scalar: the argument.
      value: present value, 0-d float64.
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
        """Changes the value after a measurement."""
        self.value.fill_(self.next_value(float(self.value), measured))

    @abc.abstractmethod
    def next_value(self, value: float, measured: float) -> float:
        """Returns the value after a measurement.

        Args:
          value: value before the measurement.
          measured: the number, finite.
        """


@gin.configurable(module="alfish")
@checked
class MeasuredLinear(MeasuredSchedule):
    """Changes linearly from `start` to `end` while a measured number goes from `begin` to `finish`.

    Outside of this range of the number, the value is constant. If the number goes back, so does the value.

    Args:
      scalar: name of the number in metrics.csv, such as 'evaluation/mean_return'.
      start: value before the first measurement, and while the number has not passed `begin`.
      end: value once the number has reached `finish`.
      begin, finish: numbers between which the value changes; `finish` may be the smaller one.
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
            raise UsageError(f"MeasuredLinear.begin and finish are both {begin}; they must differ")
        self._start, self._end, self._begin, self._finish = start, end, begin, finish

    def next_value(self, value: float, measured: float) -> float:
        fraction = min(max((measured - self._begin) / (self._finish - self._begin), 0.0), 1.0)
        return self._start + (self._end - self._start) * fraction


@gin.configurable(module="alfish")
@checked
class Feedback(MeasuredSchedule):
    """Changes by a factor with each measurement, as long as a number differs from its target.

        value <- value exp(rate (number - target)), between min_value and max_value

    Args:
      scalar: name of the number in metrics.csv, such as 'train/entropy'.
      target: number at which the value stays.
      initial: value before the first measurement.
      rate: step size of the value's logarithm, in 1 / units of the number; positive where the value must rise while the
        number is above the target, negative where it must rise while the number is below.
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
    """Returns a schedule, as `as_schedule` does, where nothing tells what was measured.

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
