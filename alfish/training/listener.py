"""The interface of listeners: the report of an iteration, and the run."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.environments import Environment
from alfish.learner.learner import Learner
from alfish.metrics.metric import Metrics
from alfish.runs.stop_signals import StopSignals
from alfish.runs.timer import Timer
from alfish.training.clock import Clock
from alfish.training.evaluations.evaluation import Evaluation
from alfish.training.evaluator import Evaluator
from alfish.training.run_directory import RunDirectory
from alfish.transforms import Transforms
from alfish.unrollers import Unroller

LISTENERS = "evaluation, checkpoints, summaries"  # the part of a run, see `Timer`


@dataclass
class Report:
    """Result of one iteration. Listeners receive it in order, and may add entries for later listeners.

    `Trainer.extra_listeners` come after `Summaries`, which has then written `scalars`; a metric or
    `Summaries.custom_summary` shows numbers of your own.

    Attributes:
      clock: see `Clock.value`.
      env_steps, iterations, updates, wall_seconds: the other counters of `Clock`.
      progress: spent fraction of the budget, in [0, 1].
      finished: True in the last report: the run is finished, has paused (`Trainer.stop_at`), or was interrupted.
      is_summary: True if a summary was due.
      is_missed: True in a report of a resumed run that repeats the last one before a signal.
      scalars: by name; those of training only if `is_summary`, or at the first update after it.
      nominal_clock: clock of values that do not belong at `clock`, by the first segment of their names. An evaluation
        belongs at the multiple of its period at which it was due, so that evaluations of several seeds have equal
        clocks.
      films: mp4 files of the run's directory, by the name that writers show them under (`evaluation/film`).
      evaluation: returns and lengths of its episodes; None if there was none. Its means are in `scalars`, as
        `scalars["evaluation/mean_return"]`.
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
    nominal_clock: dict[str, int] = field(default_factory=dict)
    films: dict[str, Path] = field(default_factory=dict)
    evaluation: Evaluation | None = None

    @classmethod
    def of(cls, clock: Clock, finished: bool) -> "Report":
        counters = clock.value, clock.env_steps, clock.iterations, clock.updates, clock.wall_seconds
        return cls(*counters, clock.progress, finished)


class Run(Protocol):
    """Interface of the `Trainer` for listeners.

    Attributes:
      clock: counters, budget and progress.
      directory: the files of the run.
      listeners: all of them, in the order in which they receive reports.
      signals: SIGTERM, SIGUSR1 and SIGINT. A listener that waits for other code uses `with run.signals.breaking()`.
      timer: of the parts of an iteration.
      environment, algorithm, transforms, unroller, learner, metrics, device: those of the trainer.
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

    @property
    def interrupted_by(self) -> int | None:
        """Number of the signal that ends the run before it is finished; None: there is none."""

    @property
    def is_saved(self) -> bool:
        """True if there was no iteration since the newest checkpoint."""

    def evaluator(
        self, num_episodes: int, num_envs: int = 8, max_length: int | None = None, **options: Any
    ) -> Evaluator:
        """Returns an evaluator of the policy in training, with environments of its own."""

    def save(self, best: bool = False, rows: bool = True) -> Path:
        """Writes a checkpoint."""

    def stop(self, reason: str) -> None:
        """Finishes the run."""

    def log(self, text: str) -> None:
        """Prints a line, and writes it to `log.txt`."""


class Listener:
    """Receives the reports of a run. Every method may be left out.

    Attributes:
      changes_algorithm: True if the listener writes buffers of the algorithm. Every learner calls it, before others,
        so that a checkpoint has what it wrote.
    """

    changes_algorithm = False

    def start(self, run: Run) -> None:
        """Prepares the listener, before the first iteration and after a resume."""

    def after_iteration(self, run: Run, report: Report) -> None:
        """Receives the report of each iteration, the last one included (`report.finished`)."""

    def is_behind(self, run: Run) -> bool:
        """Returns True if work for the present clock is due that a signal prevented; `after_iteration` then follows."""
        return False

    def show(self, line: str) -> bool:
        """Prints a line of the log; returns False where the listener does not print."""
        return False

    def close(self) -> None:
        """Frees resources of `start`, also after an error. It is not called if `start` raised."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...
