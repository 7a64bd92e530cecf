"""Calls of a run to its listeners."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from alfish.metrics.metric import check_scalars
from alfish.runs import random_state
from alfish.runs.stop_signals import Interrupted
from alfish.training.listener import Listener, Report, Run
from alfish.user_code import calling


class Notifier:
    """Calls the listeners of a run in their order.

    Args:
      listeners: of the run; those that are appended before `start` take part.
    """

    def __init__(self, listeners: Sequence[Listener]):
        self._listeners = listeners
        self._started: list[Listener] = []

    def start(self, run: Run) -> None:
        """Starts each listener."""
        for listener in self._listeners:
            with random_state.apart(), _calling(listener, "start"):
                listener.start(run)
            self._started.append(listener)

    def is_behind(self, run: Run) -> bool:
        """Returns whether a signal has prevented a listener's work."""
        for listener in self._listeners:
            with _calling(listener, "is_behind"):
                if listener.is_behind(run):
                    return True
        return False

    def missed_report(self, run: Run) -> Iterator[Report]:
        """Yields a report of a resumed run before its first iteration, if a signal prevented a listener's work on it.

        In a run that begins paused, the loop's own report is that.
        """
        if self.is_behind(run) and not run.clock.paused and run.signals.number is None:
            yield replace(Report.of(run.clock, run.clock.finished), is_missed=True)

    def after_iteration(self, run: Run, report: Report) -> None:
        """Passes the report of an iteration to each listener; a signal may interrupt one of them."""
        run.directory.restore()  # before anything is written
        for listener in self._listeners:
            try:
                with random_state.apart(), _calling(listener, "after_iteration"):
                    listener.after_iteration(run, report)
                check_scalars(report.scalars, f"Report.scalars after {type(listener).__name__}.after_iteration")
            except Interrupted:  # the next report has `finished` set
                run.log(f"{type(listener).__name__} was broken off by {run.signals.name}")

    def show(self, line: str) -> bool:
        """Prints a line of the log above a progress bar; returns False if no listener prints."""
        return any(listener.show(line) for listener in self._listeners)

    def take_started(self) -> list[Listener]:
        """Returns the listeners that were started and must be closed; a second call returns none of them again."""
        started, self._started = self._started, []
        return started

    def state_dict(self) -> dict[str, Any]:
        states = {}
        for name, listener in self._named():
            with _calling(listener, "state_dict"):
                states[name] = listener.state_dict()
        return states

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, listener in self._named():  # a new listener keeps its initial state
            if saved := state.get(name):
                with _calling(listener, "load_state_dict"):
                    listener.load_state_dict(saved)

    def _named(self) -> Iterator[tuple[str, Listener]]:
        """Yields each listener by its class's name, the second one of a class as `Evaluate 2`."""
        counts: dict[str, int] = {}
        for listener in self._listeners:
            name = type(listener).__name__
            counts[name] = counts.get(name, 0) + 1
            yield (name if counts[name] == 1 else f"{name} {counts[name]}"), listener


def _calling(listener: Listener, method: str) -> calling:
    return calling(f"{type(listener).__name__}.{method}")
