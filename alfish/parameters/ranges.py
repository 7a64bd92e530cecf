"""Ranges of numbers, and the annotations that declare them: `gamma: UnitInterval`."""

import math
import numbers
from typing import Annotated, Any, NamedTuple


class Range(NamedTuple):
    """Range of numbers from `low` to `high`.

    Attributes:
      low, high: bounds. They belong to the range unless `above` or `below` is True. Infinity never belongs to it.
      above: whether `low` is excluded.
      below: whether `high` is excluded.
    """

    low: float = -math.inf
    high: float = math.inf
    above: bool = False
    below: bool = False

    def __contains__(self, value: object) -> bool:
        number: Any = value if isinstance(value, numbers.Real) else float(value)  # type: ignore[arg-type]
        is_low = number <= self.low if self.above else number < self.low
        is_high = number >= self.high if self.below else number > self.high
        return math.isfinite(number) and not is_low and not is_high

    def words(self, noun: str) -> str:
        """Returns a description of the range; `noun` is 'number' or 'whole number'."""
        if math.isinf(self.low) and math.isinf(self.high):
            return f"a {'finite ' * (noun == 'number')}{noun}"
        if math.isinf(self.high):
            return f"a positive {noun}" if self == POSITIVE else f"a {noun} {self._least()}"
        if math.isinf(self.low):
            return f"a {noun} {'below' if self.below else 'of at most'} {self.high}"
        return f"a {noun} in {'[('[self.above]}{self.low}, {self.high}{'])'[self.below]}"

    def _least(self) -> str:
        return f"{'above' if self.above else 'of at least'} {self.low}"


POSITIVE = Range(0, above=True)

FiniteFloat = Annotated[float, Range()]
PositiveFloat = Annotated[float, POSITIVE]
NonNegativeFloat = Annotated[float, Range(0)]
UnitInterval = Annotated[float, Range(0, 1)]
OpenUnitInterval = Annotated[float, Range(0, 1, above=True, below=True)]
Rate = Annotated[float, Range(0, 1, above=True)]
PositiveInt = Annotated[int, Range(1)]
LayerSize = Annotated[int, Range(1, 10**6)]  # features of a layer; a larger layer would not fit into memory
NonNegativeInt = Annotated[int, Range(0)]
