"""Makes the learners of a run agree on steps, seconds, and the end of the run.

Each learner counts the steps of its own environments, and receives its own signals. The first learner measures the
time, and its listeners may stop the run. Once in an iteration, between collecting and training, all learners exchange
these numbers. After the exchange all clocks are equal, and so is everything that follows from a clock: summaries,
updates, checkpoints.
"""

import contextlib
import time
from typing import Any

from alfish.processes import replicas
from alfish.runs.stop_signals import Interrupted, StopSignals
from alfish.training.clock import Clock


class RunEnded(Exception):
    """Raised in other learners if the first learner has stopped the run after the previous iteration."""


class Agreement:
    """Agreement of a single learner, which exchanges nothing; also the interface of other agreements.

    Args:
      clock: clock of the run, to which the seconds of iterations are added.
      signals: signals that end the run.

    Attributes:
      saves_after_errors: whether the state after the last iteration may be saved if an error occurs.
    """

    saves_after_errors = True

    def __init__(self, clock: Clock, signals: StopSignals):
        self._clock, self._signals = clock, signals
        self._began = 0.0
        self._nothing = contextlib.nullcontext()

    def begin(self, now: float) -> None:
        """Begins to measure an iteration; `now` is a time of `time.perf_counter`."""
        self._began = now

    def pause(self, now: float) -> None:
        """Ends the measurement of an iteration; `now` is a time of `time.perf_counter`."""
        self._clock.wall_seconds += now - self._began

    def collecting(self) -> contextlib.AbstractContextManager[Any]:
        """Returns the context in which rows are collected."""
        return self._nothing

    def steps(self, own: int) -> int:
        """Returns the environment steps of all learners in this iteration."""
        return own

    def end(self) -> None:
        """Tells the other learners that the run was stopped; called in place of an iteration."""


class SharedAgreement(Agreement):
    """Agreement of several learners. An error in one learner ends all learners, which then have different states."""

    saves_after_errors = False

    def __init__(self, clock: Clock, signals: StopSignals):
        super().__init__(clock, signals)
        signals.is_shared = True
        self._seconds = 0.0  # seconds of iterations since the last exchange

    def pause(self, now: float) -> None:
        self._seconds += now - self._began
        self._began = now

    @contextlib.contextmanager
    def collecting(self):
        try:
            yield
        except BaseException:
            if self._signals.received is not None and self._signals.breakable:
                self._signals.breakable = False  # a signal must not break off the wait for other learners
                self._exchange(breaks_off=True)
            raise

    def steps(self, own: int) -> int:
        """Returns the environment steps of all learners in this iteration.

        Raises:
          Interrupted: a signal interrupted the collection of rows in a learner.
          RunEnded: the first learner has stopped.
        """
        steps, breaks_off, ends = self._exchange(own)
        if breaks_off:
            raise Interrupted
        if ends:
            raise RunEnded
        return steps

    def end(self) -> None:
        self._exchange(ends=True)

    def _exchange(self, steps: int = 0, breaks_off: bool = False, ends: bool = False) -> tuple[int, bool, bool]:
        """Makes the seconds, the signal and the reason to stop equal in all learners.

        Returns the sum of steps, whether a learner was interrupted, and whether a learner has ended the run.
        """
        self.pause(time.perf_counter())
        clock, signals = self._clock, self._signals
        stops = clock.stop_reason is not None
        own = steps, self._seconds, signals.received or 0, stops, breaks_off, ends
        self._seconds = 0.0
        of_steps, of_seconds, of_signals, of_stops, *of_ends = zip(*replicas.gather(*own))
        clock.wall_seconds += of_seconds[0]
        signals.number = int(max(of_signals)) or None
        if any(of_stops):
            clock.stop(replicas.of_first(clock.stop_reason or "another learner stopped the run"))
        return int(sum(of_steps)), any(of_ends[0]), any(of_ends[1])
