"""Time measurement of the parts of a run."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

LOOP = "the loop"


class Timer:
    """Measures the parts of a run, which follow one another. The time of a part does not include parts inside it.

    Attributes:
      seconds: by part.
      calls: by part, how often it began.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.calls: dict[str, int] = defaultdict(int)
        self._part, self._began = LOOP, time.perf_counter()

    def begin(self, part: str) -> float:
        """Ends the part under way and begins another; returns the present time in seconds."""
        self.calls[part] += 1
        now = time.perf_counter()  # `_resume`, without a call: iterations may take as little as 0.2 ms
        self.seconds[self._part] += now - self._began
        self._part, self._began = part, now
        return now

    def around(self, part: str, function: Callable[P, T]) -> Callable[P, T]:
        """Returns the function as a part inside the part that calls it."""

        def timed(*arguments: P.args, **keywords: P.kwargs) -> T:
            outer = self._part
            self.begin(part)
            try:
                return function(*arguments, **keywords)
            finally:
                self._resume(outer)

        return timed

    def each(self, part: str, items: Iterable[T]) -> Iterator[T]:
        """Yields the items, the making of each as a part inside the part that asks for it."""
        outer = self._part
        self.begin(part)
        for item in items:
            self._resume(outer)
            yield item
            outer = self._part
            self.begin(part)
        self._resume(outer)

    def _resume(self, part: str) -> None:
        """Ends the part under way and continues an outer one."""
        now = time.perf_counter()
        self.seconds[self._part] += now - self._began
        self._part, self._began = part, now
