"""Listeners: their interface, the report and the run that they receive, and the calls to them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.environments import Environment
from alfish.errors.user_code import calling
from alfish.learner.learner import Learner
from alfish.metrics.metric import Metrics, check_scalars
from alfish.policies.member import Member
from alfish.runs import random_state
from alfish.runs.stop_signals import Interrupted, StopSignals
from alfish.runs.timer import Timer
from alfish.runs.writers import Counters
from alfish.training.clock import Clock
from alfish.training.evaluations.evaluation import Evaluation
from alfish.training.evaluator import Evaluator
from alfish.training.run_directory import RunDirectory
from alfish.transforms import Transforms
from alfish.unrollers import Unroller

LISTENERS = "evaluation, checkpoints, summaries"  # name of the part of a run, see `Timer`


@dataclass
class Report:
    """Result of one iteration. A listener may add entries for listeners that are called after it.

    Most `Trainer.extra_listeners` are called after `Summaries`, so their scalars are not shown. Exceptions are
    `Evaluate` and listeners with `changes_algorithm`. To show your own numbers, use a metric or
    `Summaries.custom_summary`.

    Attributes:
      clock: clock steps, see `Clock.value`.
      env_steps, iterations, updates, wall_seconds: other counters of `Clock`.
      progress: spent fraction of the budget, in [0, 1].
      finished: whether this is the last report, because the run is finished, paused (`Trainer.stop_at`) or interrupted.
      is_summary: whether the iteration ended with a summary, because one was due or the run ends.
      is_missed: whether this report repeats the last report of an interrupted process, after a resume.
      scalars: numbers by name. Training scalars are present only if `is_summary`, or at the first update after a
        summary was due.
      previews: names of scalars that are reported only because the run pauses or is interrupted. An uninterrupted run
        does not report them in this iteration, so a listener that changes training reads scalars with `due`.
      nominal_clock: clock steps that are shown instead of `clock`, by the first segment of a value's name. An
        evaluation is shown at the multiple of its period at which it was due, so that evaluations of several seeds have
        equal clocks.
      films: mp4 files in the run's directory, by the name under which writers show the film (`evaluation/film`).
      evaluation: returns and lengths of an evaluation's episodes; None without an evaluation. Means are in `scalars`,
        for example `scalars["evaluation/mean_return"]`.
    """

    clock: int
    env_steps: int
    iterations: int
    updates: int
    wall_seconds: float
    progress: float
    finished: bool
    is_summary: bool = False
    is_missed: bool = False
    scalars: dict[str, float] = field(default_factory=dict)
    previews: frozenset[str] = frozenset()
    nominal_clock: dict[str, int] = field(default_factory=dict)
    films: dict[str, Path] = field(default_factory=dict)
    evaluation: Evaluation | None = None

    @classmethod
    def of(cls, clock: Clock, finished: bool) -> "Report":
        counters = clock.value, clock.env_steps, clock.iterations, clock.updates, clock.wall_seconds
        return cls(*counters, clock.progress, finished)

    def due(self, name: str) -> float | None:
        """Returns a scalar; None if the report lacks it, or has it only because the run pauses or is interrupted."""
        return None if name in self.previews else self.scalars.get(name)

    @property
    def counters(self) -> Counters:
        return Counters(self.clock, self.env_steps, self.iterations, self.updates, self.wall_seconds)


class Run(Protocol):
    """Interface of the `Trainer` for listeners.

    Attributes:
      clock: counters, budget and progress.
      directory: files of the run.
      listeners: all listeners, in the order in which they receive reports.
      signals: signals SIGTERM, SIGUSR1 and SIGINT. A listener uses `with run.signals.breaking()` around code that may
        block.
      timer: timer of the parts of an iteration.
      environment, algorithm, transforms, unroller, learner, metrics, device, seed: the trainer's attributes of these
        names.
    """

    clock: Clock
    directory: RunDirectory
    listeners: list["Listener"]
    signals: StopSignals
    timer: Timer
    environment: Environment
    algorithm: RLAlgorithm
    transforms: Transforms
    unroller: Unroller
    learner: Learner
    metrics: Metrics
    device: torch.device
    seed: int

    @property
    def interrupted_by(self) -> int | None:
        """Number of the signal that ends the process before the run is finished; None if no signal does."""

    @property
    def is_saved(self) -> bool:
        """True if no iteration has followed the newest checkpoint saved with `rows`."""

    def evaluator(
        self, num_episodes: int, num_envs: int = 8, max_length: int | None = None, **options: Any
    ) -> Evaluator:
        """Returns an evaluator of the policy in training, with separate environments."""

    def by_policy(self) -> dict[str, Any]:
        """Returns a `Run` for each policy by name, with the parts of that policy; a single policy is called ''."""

    def save(self, best: bool = False, rows: bool = True) -> Path:
        """Writes a checkpoint."""

    def stop(self, reason: str) -> None:
        """Finishes the run."""

    def log(self, text: str) -> None:
        """Prints a line, and writes it to `log.txt`."""


class PolicyRun:
    """A `Run` of one policy of a run with several policies.

    Args:
      run: run of all policies; provides the attributes that do not belong to a policy.
      member: policy.
    """

    def __init__(self, run: Run, member: Member):
        self._run, self._member = run, member

    def __getattr__(self, name: str) -> Any:
        # Parts are looked up at each access, because a population may replace them.
        if name in ("algorithm", "transforms", "learner", "metrics"):
            return getattr(self._member, name)
        if name == "unroller":
            return self._member.seat
        return self._member.seat.environment if name == "environment" else getattr(self._run, name)


class Listener:
    """Receives the reports of a run. A subclass may leave out any method.

    Attributes:
      changes_algorithm: whether the listener writes buffers of the algorithm. Every learner calls such a listener
        before other listeners, so that checkpoints contain the new values.
      on_every_learner: whether every learner calls the listener; if not, only the first learner does.
    """

    changes_algorithm = False
    on_every_learner = False

    def start(self, run: Run) -> None:
        """Prepares the listener, before the first iteration and after a resume."""

    def after_iteration(self, run: Run, report: Report) -> None:
        """Receives the report of each iteration, including the last (`report.finished`)."""

    def is_behind(self, run: Run) -> bool:
        """Returns whether a signal has prevented work that was due; `after_iteration` then does the work."""
        return False

    def show(self, line: str) -> bool:
        """Prints a line of the log; returns False if the listener does not print."""
        return False

    def close(self) -> None:
        """Frees resources that `start` acquired, also after an error; not called if `start` raised."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Notifier:
    """Calls the listeners of a run in their order.

    Args:
      listeners: listeners of the run; more may be appended until `start`.
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
        """Returns whether a signal has prevented work that was due in a listener."""
        for listener in self._listeners:
            with _calling(listener, "is_behind"):
                if listener.is_behind(run):
                    return True
        return False

    def missed_report(self, run: Run) -> Iterator[Report]:
        """Yields a report before the first iteration of a resumed run, if a signal prevented a listener's work.

        If the run begins paused, the loop yields a report in place of this one.
        """
        if self.is_behind(run) and not run.clock.paused and run.signals.number is None:
            yield replace(Report.of(run.clock, run.clock.finished), is_missed=True)

    def after_iteration(self, run: Run, report: Report) -> None:
        """Passes the report of an iteration to each listener; a signal may interrupt a listener."""
        run.directory.restore()  # restored before anything is written
        for listener in self._listeners:
            try:
                with random_state.apart(), _calling(listener, "after_iteration"):
                    listener.after_iteration(run, report)
                check_scalars(report.scalars, f"Report.scalars after {type(listener).__name__}.after_iteration")
            except Interrupted:  # not raised again, because the next report has `finished` set
                run.log(f"{type(listener).__name__} was interrupted by {run.signals.name}")

    def show(self, line: str) -> bool:
        """Prints a line of the log above a progress bar; returns False if no listener prints."""
        return any(listener.show(line) for listener in self._listeners)

    def take_started(self) -> list[Listener]:
        """Returns the listeners that were started and must be closed; each is returned by one call only."""
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
        """Yields each listener with the name of its class; a second listener of a class is named `Evaluate 2`."""
        counts: dict[str, int] = {}
        for listener in self._listeners:
            name = type(listener).__name__
            counts[name] = counts.get(name, 0) + 1
            yield (name if counts[name] == 1 else f"{name} {counts[name]}"), listener


def _calling(listener: Listener, method: str) -> calling:
    return calling(f"{type(listener).__name__}.{method}")
