"""Time measurement of the parts of a run."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

LOOP = "the loop"


class Timer:
    """Measures the time of each part of a run. The time of a part excludes the time of the parts inside it.

    Attributes:
      seconds: seconds spent in each part since `start`; nothing is measured before.
      calls: number of times that each part began.
    """

    def __init__(self) -> None:
        self._is_on = False
        self.seconds: dict[str, float] = defaultdict(float)
        self.calls: dict[str, int] = defaultdict(int)
        self._part, self._began = LOOP, 0.0

    def start(self) -> None:
        """Begins to measure."""
        self._is_on, self._began = True, time.perf_counter()

    def begin(self, part: str) -> float:
        """Ends the current part and begins `part`; returns the current time in seconds."""
        now = time.perf_counter()
        if self._is_on:
            self.calls[part] += 1
            self._switch(part, now)
        return now

    def around(self, part: str, function: Callable[P, T]) -> Callable[P, T]:
        """Returns a function that calls `function`, and measures its time as `part` within the calling part."""

        def timed(*arguments: P.args, **keywords: P.kwargs) -> T:
            outer = self._part
            self.begin(part)
            try:
                return function(*arguments, **keywords)
            finally:
                if self._is_on:
                    self._switch(outer, time.perf_counter())

        return timed

    def each(self, part: str, items: Iterable[T]) -> Iterator[T]:
        """Returns an iterator over the items; measures the time to make each item as `part`."""
        return self._each(part, items) if self._is_on else iter(items)

    def _each(self, part: str, items: Iterable[T]) -> Iterator[T]:
        outer = self._part
        self.begin(part)
        for item in items:
            self._switch(outer, time.perf_counter())
            yield item
            outer = self._part
            self.begin(part)
        self._switch(outer, time.perf_counter())

    def _switch(self, part: str, now: float) -> None:
        """Ends the current part, and begins or continues `part`."""
        self.seconds[self._part] += now - self._began
        self._part, self._began = part, now
