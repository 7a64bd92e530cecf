"""The progress of a run on the console."""

import sys
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, TextIO

from tqdm import tqdm

from alfish.errors import significant


class _Moment(NamedTuple):
    """The progress of the run at one time.

    Attributes:
      seconds: seconds of the run's iterations, without the work between iterations.
      done: spent part of the budget.
      steps: clock steps of the run.
    """

    seconds: float
    done: float
    steps: int


class ConsoleProgress:
    """Shows progress as a bar on a terminal, and otherwise as lines.

    Rates are averages over a recent window of iterations, without evaluations and other work between iterations. The
    estimated remaining time includes such work, in proportion to its share so far. Call `update` once before the first
    iteration; this call sets the starting point, so that steps of an earlier process do not count.

    Args:
      budget: value of `done` at the end, positive.
      unit: unit of `budget` and `done`, such as 'env steps', 'iterations' or 'seconds'.
      stream: stream to write to; None means sys.stderr.
      period_seconds: seconds between two lines.
      window_seconds: length of the window over which rates are averaged, in seconds of iterations.
      clock: function that returns the real time, in seconds.
    """

    REDRAW_SECONDS = 0.1  # seconds between drawings on a terminal; drawing takes longer than a step of a small run

    def __init__(
        self,
        budget: float,
        unit: str = "env steps",
        stream: TextIO | None = None,
        period_seconds: float = 5.0,
        window_seconds: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._budget = budget
        self._unit = unit
        self._stream = sys.stderr if stream is None else stream  # sys.stderr is None in a program without a console
        self._window_seconds = window_seconds
        self._clock = clock
        self._moments: deque[_Moment] = deque()  # moments in the window, the oldest first
        self._last_shown = clock()
        self._began: tuple[float, float] | None = None  # real time and seconds of iterations at the first `update`
        self._unshown: tuple[_Moment, dict[str, float]] | None = None
        self._bar = None
        self._period_seconds = period_seconds
        if self._is_open and self._stream.isatty():
            self._period_seconds = self.REDRAW_SECONDS
            bar_format = "{percentage:3.0f}%|{bar}| {desc}"
            self._bar = _Bar(total=budget, file=self._stream, bar_format=bar_format, dynamic_ncols=True)

    def update(self, done: float, steps: int, seconds: float, values: dict[str, float]) -> None:
        """Shows the progress, if a period has passed since it was last shown.

        Args:
          done: spent part of the budget, including the part that earlier processes spent.
          steps: clock steps of the run.
          seconds: seconds of the run's iterations.
          values: metrics to show, in this order, by short name, such as 'return' and 'loss'.
        """
        moment, now = _Moment(seconds, done, steps), self._clock()
        if self._began is None:
            self._began = now, seconds
        if not self._moments or moment.seconds - self._moments[-1].seconds >= self._window_seconds / 100:
            self._moments.append(moment)  # keeps about a hundred moments in the window
        while len(self._moments) > 1 and self._moments[1].seconds <= moment.seconds - self._window_seconds:
            self._moments.popleft()
        self._unshown = (moment, values)
        if now - self._last_shown >= self._period_seconds:
            self._show()

    @property
    def _is_open(self) -> bool:
        """False if other code, such as an environment, has closed the stream; log.txt still gets the lines."""
        return self._stream is not None and not self._stream.closed

    def line(self, text: str) -> None:
        """Prints a line above the bar."""
        if not self._is_open:
            return
        if self._bar is None:
            print(text, file=self._stream, flush=True)
        else:
            self._bar.write(text, file=self._stream)

    def close(self) -> None:
        """Shows the last progress, if it was not shown yet, and closes the bar."""
        self._show()
        if self._bar is not None and self._is_open:
            self._bar.close()

    def _show(self) -> None:
        if self._unshown is None or not self._is_open:
            return
        moment, values = self._unshown
        self._unshown = None
        self._last_shown = self._clock()
        share = min(max(moment.done / self._budget, 0.0), 1.0)
        budget = _grouped(self._budget)
        count = f"{_grouped(moment.done).rjust(len(budget))} / {budget} {self._unit}"
        parts = [*self._speed(moment), *(f"{name} {_short(value)}" for name, value in values.items())]
        parts += self._time_left(moment)
        if self._bar is None:
            self.line("  " + "  ".join([count, f"{share:.0%}", *parts]))
        else:
            self._bar.n = share * self._budget  # tqdm drops its total when n exceeds the total
            self._bar.set_description_str("  ".join([count, *parts]), refresh=True)

    def _speed(self, now: _Moment) -> list[str]:
        seconds = now.seconds - self._moments[0].seconds
        if seconds <= 0:
            return []
        # The clock counts updates if the run does not act.
        unit = "updates" if self._unit == "updates" and now.steps == now.done else "steps"
        return [f"{_grouped((now.steps - self._moments[0].steps) / seconds)} {unit}/s"]

    def _time_left(self, now: _Moment) -> list[str]:
        seconds, done = now.seconds - self._moments[0].seconds, now.done - self._moments[0].done
        if seconds <= 0 or done <= 0 or self._began is None:
            return []
        began, seconds_before = self._began
        with_other_work = max((self._clock() - began) / (now.seconds - seconds_before), 1.0)
        minutes, left = divmod(round(max(self._budget - now.done, 0.0) * seconds / done * with_other_work), 60)
        hours, minutes = divmod(minutes, 60)
        return [f"left {hours}:{minutes:02d}:{left:02d}" if hours else f"left {minutes}:{left:02d}"]


class _Bar(tqdm):
    monitor_interval = 0  # starts no monitor thread, because unrollers may fork


def _grouped(number: float) -> str:
    """Returns a number with spaces between thousands: `12288` becomes `12 288`."""
    return f"{number:,.0f}".replace(",", " ")


def _short(value: float) -> str:
    return _grouped(value) if 1000 <= abs(value) < 1e9 else significant(value)
