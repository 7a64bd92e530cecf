"""Numbers that all learners of a run must share: steps, seconds, and the end of the run.

Each learner counts the steps of its own environments and receives signals of its own. The first one measures the time,
and its listeners may stop the run. Once in an iteration, between collecting and training, all learners exchange these
numbers. From then on clocks are equal, and so is everything that follows from them: summaries, updates, checkpoints.
"""

import contextlib
import time
from typing import Any

from alfish import replicas
from alfish.runs.stop_signals import Interrupted, StopSignals
from alfish.training.clock import Clock


class Ended(Exception):
    """The first learner made no iteration, because the run was stopped after the one before."""


class Agreement:
    """Agreement of one learner, which exchanges nothing, and the interface of others.

    Args:
      clock: of the run; gets the seconds of iterations.
      signals: which end the run.

    Attributes:
      saves_after_errors: whether the state of the last iteration may be saved after an error.
    """

    saves_after_errors = True

    def __init__(self, clock: Clock, signals: StopSignals):
        self._clock, self._signals = clock, signals
        self._began = 0.0
        self._nothing = contextlib.nullcontext()

    def begin(self, now: float) -> None:
        """Begins to measure an iteration, at a time of `time.perf_counter`."""
        self._began = now

    def pause(self, now: float) -> None:
        """Ends the measurement of an iteration."""
        self._clock.wall_seconds += now - self._began

    def collecting(self) -> contextlib.AbstractContextManager[Any]:
        """Returns the context in which rows are collected."""
        return self._nothing

    def steps(self, own: int) -> int:
        """Returns the environment steps of all learners in this iteration."""
        return own

    def end(self) -> None:
        """Takes the place of an iteration after the run was stopped."""


class SharedAgreement(Agreement):
    """Agreement of several learners. An error in one of them ends all, and each has another state then."""

    saves_after_errors = False

    def __init__(self, clock: Clock, signals: StopSignals):
        super().__init__(clock, signals)
        signals.is_shared = True
        self._seconds = 0.0  # of iterations since the last exchange

    def pause(self, now: float) -> None:
        self._seconds += now - self._began
        self._began = now

    @contextlib.contextmanager
    def collecting(self):
        try:
            yield
        except BaseException:
            if self._signals.received is not None and self._signals.breakable:
                self._signals.breakable = False  # from here on it waits for the others, which is no hang
                self._exchange(breaks_off=True)
            raise

    def steps(self, own: int) -> int:
        """Returns the environment steps of all learners in this iteration.

        Raises:
          Interrupted: a signal broke off the collecting of a learner.
          Ended: see there.
        """
        steps, breaks_off, ends = self._exchange(own)
        if breaks_off:
            raise Interrupted
        if ends:
            raise Ended
        return steps

    def end(self) -> None:
        self._exchange(ends=True)

    def _exchange(self, steps: int = 0, breaks_off: bool = False, ends: bool = False) -> tuple[int, bool, bool]:
        """Sets seconds, signal and stop of all learners alike; returns the sum of steps, and who broke off or ends."""
        self.pause(time.perf_counter())
        clock, signals = self._clock, self._signals
        stops = clock.stop_reason is not None
        own = steps, self._seconds, signals.received or 0, stops, breaks_off, ends
        self._seconds = 0.0
        of_steps, of_seconds, of_signals, of_stops, *of_ends = zip(*replicas.gather(*own))
        clock.wall_seconds += of_seconds[0]
        signals.number = int(max(of_signals)) or None
        if any(of_stops):
            clock.stop(replicas.of_first(clock.stop_reason or "a learner stopped the run"))
        return int(sum(of_steps)), any(of_ends[0]), any(of_ends[1])
