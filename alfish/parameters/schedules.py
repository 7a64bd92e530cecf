"""Values that change with training progress. Progress is 0 at the start and 1 when the budget is spent.

A parameter that takes a schedule also takes a number; `as_schedule` converts it to a constant schedule. Progress may
be a float or a 0-d tensor, so that a schedule works in the trainer, in a worker, and in a compiled update.
"""

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import gin
import torch
from torch import nn

from alfish.errors import UsageError
from alfish.parameters import FiniteFloat, OpenUnitInterval, PositiveFloat, PositiveInt, UnitInterval, checked

Schedule: TypeAlias = Callable[[Any], Any]  # progress in [0, 1] -> value


def as_schedule(value: "float | Schedule") -> Schedule:
    """Returns a schedule; a number becomes a constant schedule.

    A schedule with state, such as `Feedback`, is copied, because the given object may be a setting of several runs.
    """
    if not callable(value):
        return Constant(value)
    return copy.deepcopy(value) if isinstance(value, nn.Module) else value


@gin.configurable(module="alfish")
@checked
class Constant:
    """Returns the same value at any progress."""

    def __init__(self, value: FiniteFloat):
        self._value = value

    def __call__(self, progress: Any) -> float:
        return self._value

    def __repr__(self) -> str:
        return f"Constant({self._value})"


@gin.configurable(module="alfish")
@checked
class Linear:
    """Changes linearly from `start` to `end` as progress goes from `begin` to `finish`.

    The value is constant before `begin` and after `finish`.
    """

    def __init__(
        self, start: FiniteFloat, end: FiniteFloat = 0.0, begin: UnitInterval = 0.0, finish: UnitInterval = 1.0
    ):
        if not 0 <= begin < finish <= 1:
            raise UsageError(f"Linear needs 0 <= begin < finish <= 1, but got begin={begin}, finish={finish}")
        self._start = start
        self._end = end
        self._begin = begin
        self._finish = finish

    def __call__(self, progress: Any) -> Any:
        fraction = _clip((progress - self._begin) / (self._finish - self._begin))
        return self._start + (self._end - self._start) * fraction

    def __repr__(self) -> str:
        return f"Linear({self._start} -> {self._end})"


@gin.configurable(module="alfish")
@checked
class Exponential:
    """Changes from `start` to `end` by a constant factor per unit of progress; `start` and `end` are positive."""

    def __init__(self, start: PositiveFloat, end: PositiveFloat):
        self._start, self._rate = start, math.log(end / start)

    def __call__(self, progress: Any) -> Any:
        exponent = _clip(progress) * self._rate
        return self._start * (exponent.exp() if isinstance(exponent, torch.Tensor) else math.exp(exponent))


@gin.configurable(module="alfish")
@checked
class Cosine:
    """Changes from `start` to `end` along half a cosine wave."""

    def __init__(self, start: FiniteFloat, end: FiniteFloat = 0.0):
        self._start, self._end = start, end

    def __call__(self, progress: Any) -> Any:
        angle = _clip(progress) * math.pi
        cosine = angle.cos() if isinstance(angle, torch.Tensor) else math.cos(angle)
        return self._end + (self._start - self._end) * (1 + cosine) / 2


@gin.configurable(module="alfish")
@checked
class Steps:
    """Piecewise constant schedule: returns `values[i]` from progress `boundaries[i-1]` on.

    `values` has one entry more than `boundaries`, which ascend within (0, 1).
    """

    def __init__(self, values: Sequence[FiniteFloat], boundaries: Sequence[OpenUnitInterval]):
        if len(values) != len(boundaries) + 1 or list(boundaries) != sorted(boundaries):
            raise UsageError(
                f"Steps needs ascending boundaries, and one value more than boundaries, but got values {values} and "
                f"boundaries {boundaries}"
            )
        self._values, self._boundaries = values, boundaries

    def __call__(self, progress: Any) -> Any:
        value = self._values[0] + 0 * progress
        for boundary, after in zip(self._boundaries, self._values[1:]):
            if isinstance(progress, torch.Tensor):
                value = torch.where(progress >= boundary, after, value)
            elif progress >= boundary:
                value = after
        return value


@gin.configurable(module="alfish")
@checked
class Cyclical:
    """Repeats a schedule, as warm restarts of a learning rate do (Loshchilov & Hutter, 2017, arXiv:1608.03983).

    Each cycle takes an equal part of the progress, and goes through the whole schedule.

    Args:
      schedule: schedule that is repeated, such as `@Cosine()`.
      num_cycles: number of cycles until the budget is spent.
    """

    def __init__(self, schedule: FiniteFloat | Schedule = gin.REQUIRED, num_cycles: PositiveInt = gin.REQUIRED):
        if isinstance(schedule, torch.nn.Module):
            raise UsageError(
                f"Cyclical.schedule is a {type(schedule).__name__}, which follows a measured number and cannot be "
                "repeated; give a schedule of progress such as @Cosine()"
            )
        self._schedule, self._num_cycles = as_schedule(schedule), num_cycles

    def __call__(self, progress: Any) -> Any:
        done = _clip(progress) * self._num_cycles  # in cycles; progress 1 is the end of the last cycle
        if isinstance(done, torch.Tensor):
            return self._schedule(done - done.floor().clamp(max=self._num_cycles - 1))
        return self._schedule(done - min(math.floor(done), self._num_cycles - 1))


def _clip(progress: Any) -> Any:
    return progress.clamp(0, 1) if isinstance(progress, torch.Tensor) else min(max(progress, 0.0), 1.0)
