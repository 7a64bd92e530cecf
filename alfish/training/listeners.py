"""The trainer's listeners: evaluation, checkpoints, summaries, progress. Each may use what those before it did."""

import math
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import gin

from alfish.errors import UsageError
from alfish.formatting import significant
from alfish.parameters import FiniteFloat, NonNegativeFloat, NonNegativeInt, PositiveInt, checked
from alfish.runs.checkpoint import Checkpoints
from alfish.runs.files import make_directory, write_atomically
from alfish.runs.writers import ConsoleProgress, CSVWriter, MultiWriter, NullWriter, TensorBoardWriter, Writer
from alfish.training.evaluator import Evaluation, Evaluator

if TYPE_CHECKING:
    from alfish.training.trainer import Trainer


# What the trainer's own scalars begin with; see `Trainer`.
TRAINER_SCALARS = ("train", "holdout", "metrics", "unroller", "time")


@dataclass
class Report:
    """What one iteration did. Listeners read it in order, and may add to it for those after them."""

    steps: int  # the run's clock; see `Trainer`
    env_steps: int
    iterations: int
    updates: int
    wall_seconds: float
    progress: float  # of the budget, in [0, 1]
    finished: bool  # no iteration follows: the run is at its end, or was interrupted
    scalars: dict[str, float] = field(default_factory=dict)  # empty unless a summary was due
    # Where scalars stand that do not stand at `steps`, by what their names begin with: an evaluation stands at the step
    # at which it was due, so that those of several seeds stand side by side.
    nominal_steps: dict[str, int] = field(default_factory=dict)
    evaluation: Evaluation | None = None


class Listener:
    """Consumes the trainer's reports. Every method may be left out."""

    def start(self, trainer: "Trainer") -> None:
        """Before the first iteration, after a resume: whatever is built is built here."""

    def after_iteration(self, trainer: "Trainer", report: Report) -> None:
        """After every iteration, the last one included (`report.finished`)."""

    def close(self) -> None:
        """At the end, also after an error, if `start` came to its end. Other parts are closed whatever it raises."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@gin.configurable(module="alfish.training.listeners")
@checked
class Evaluate(Listener):
    """Evaluates on its own environments, always on the same episodes, and writes each of them to `eval/`.

    File names, summaries and the log have an evaluation's nominal step: the multiple of the period, or the budget of
    environment steps, at which it was due. The iteration itself ends a little later, and elsewhere with each seed.

    Args:
      period: steps between evaluations; 0: only at the end.
      num_episodes: whole episodes.
      num_envs: environments at a time; the result does not depend on it.
      seed: of the first episode; the others follow.
      name: of the files and scalars; give each its own where there are several.
    """

    def __init__(
        self,
        period: NonNegativeInt = 10_000,
        num_episodes: PositiveInt = 20,
        num_envs: PositiveInt = 8,
        seed: NonNegativeInt = 0,
        name: str = "evaluation",
    ):
        self._period, self._num_episodes, self._num_envs, self._seed = period, num_episodes, num_envs, seed
        self._name = name
        self._evaluator: Evaluator | None = None
        self._next = period
        self._last: tuple[int, int] | None = None  # steps and updates of the last evaluation

    def start(self, trainer: "Trainer") -> None:
        names = [listener._name for listener in trainer.listeners if isinstance(listener, Evaluate)]
        if names.count(self._name) > 1:
            raise UsageError(
                f"{names.count(self._name)} Evaluate listeners are called {self._name!r}, and would overwrite each "
                "other's files; give each an Evaluate.name of its own"
            )
        self._evaluator = trainer.evaluator(self._num_episodes, self._num_envs)

    def after_iteration(self, trainer: "Trainer", report: Report) -> None:
        due = self._period and report.steps >= self._next
        if trainer.interrupted_by is not None or (not due and not trainer.finished):  # what is due comes after a resume
            return
        policy = report.steps, report.updates
        if policy == self._last:  # a listener stopped the run because of what it returned
            return
        assert self._evaluator is not None
        with trainer.signals.breaking():
            evaluation = self._evaluator.evaluate(self._num_episodes, self._seed, env_steps=report.env_steps)
        self._last = policy
        nominal = self._nominal_steps(trainer, report)
        if self._period:
            self._next = (report.steps // self._period + 1) * self._period
        directory = trainer.root_dir / "eval"
        make_directory(directory)
        write_atomically(directory / f"{self._name}-{nominal:012d}.csv", evaluation.to_csv())
        report.evaluation = evaluation
        summary = evaluation.summary()
        for name in ("mean", "std", "min", "max"):
            report.scalars[f"{self._name}/{name}_return"] = summary[name]
        report.scalars[f"{self._name}/mean_length"] = sum(evaluation.lengths) / len(evaluation.lengths)
        report.nominal_steps[self._name] = nominal
        mean, low, high = (significant(summary[name]) for name in ("mean", "ci_low", "ci_high"))
        trainer.log(
            f"Evaluation at {nominal:,} steps: return {mean} [{low}, {high}] over {self._num_episodes} episodes"
        )

    def _nominal_steps(self, trainer: "Trainer", report: Report) -> int:
        name, budget = trainer.budget
        if name == "num_env_steps" and report.env_steps >= budget:
            return int(budget)
        return report.steps if trainer.finished else report.steps // self._period * self._period

    def close(self) -> None:
        if self._evaluator is not None:
            self._evaluator.close()

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._next = state["next"]


@gin.configurable(module="alfish.training.listeners")
@checked
class CheckpointSaver(Listener):
    """Saves checkpoints: periodically, at the end, and of the policy with the best evaluation so far.

    A checkpoint of the best policy between two periods is saved without the rows of replay, which may be large. It can
    be evaluated and played (`--checkpoint=best`). A run that is killed later is continued from the newest checkpoint
    that has its rows; one that keeps no rows, from the newest of all.

    Args:
      period: steps between checkpoints; 0: only at the end, when interrupted, and the best.
      keep_last: how many of the newest are kept.
      keep_period: one for every so many steps is kept for ever; 0: none.
      keep_best: whether the one with the best mean evaluation return is kept (of equals, the newest).
    """

    def __init__(
        self,
        period: NonNegativeInt = 50_000,
        keep_last: PositiveInt = 3,
        keep_period: NonNegativeInt = 0,
        keep_best: bool = True,
    ):
        self._period, self._keep_last, self._keep_period, self._keep_best = period, keep_last, keep_period, keep_best
        self._next = period
        self._best: float | None = None

    def start(self, trainer: "Trainer") -> None:
        directory = trainer.root_dir / "checkpoints"
        trainer.checkpoints = Checkpoints(directory, self._keep_last, self._keep_period, trainer.checkpoints.origin)
        if (trainer.checkpoints.best() or 0) > trainer.steps:
            self._best = None  # the run continues from before it, and will supersede it

    def after_iteration(self, trainer: "Trainer", report: Report) -> None:
        due = bool(self._period) and report.steps >= self._next
        evaluation = report.evaluation
        is_best = False
        if self._keep_best and evaluation is not None and math.isfinite(evaluation.mean):
            is_best = self._best is None or evaluation.mean >= self._best
            self._best = evaluation.mean if is_best else self._best
        if trainer.interrupted_by is not None and trainer.is_saved:
            return
        due = due or report.finished
        if due and self._period:
            self._next = (report.steps // self._period + 1) * self._period
        if due or is_best:
            trainer.save(best=is_best, rows=due)

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next, "best": self._best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._next, self._best = state["next"], state["best"]


@gin.configurable(module="alfish.training.listeners")
@checked
class Summaries(Listener):
    """Writes scalars to TensorBoard (`tensorboard/`) and to `metrics.csv`, and the configuration to TensorBoard."""

    def __init__(self) -> None:
        self._writer: Writer = NullWriter()

    def start(self, trainer: "Trainer") -> None:
        resumed = trainer.steps  # 0 too: a run killed before its first checkpoint has left rows behind
        self._writer = MultiWriter(
            [
                TensorBoardWriter(trainer.root_dir / "tensorboard", resumed + 1),
                CSVWriter(trainer.root_dir / "metrics.csv", resumed),
            ]
        )
        self._config_written = False

    def after_iteration(self, trainer: "Trainer", report: Report) -> None:
        if not self._config_written:
            self._config_written = True
            for name, text in trainer.config.items():
                self._writer.text(name, f"```\n{text}\n```", report.steps)
        others = dict(report.scalars)
        counters = report.env_steps, report.iterations, report.updates, report.wall_seconds
        nominal = {prefix: steps for prefix, steps in report.nominal_steps.items() if steps != report.steps}
        for prefix, steps in sorted(nominal.items(), key=lambda item: item[1]):
            own = {name: others.pop(name) for name in report.scalars if name.startswith(f"{prefix}/")}
            self._writer.scalars(own, steps, *counters)
        if others:
            self._writer.scalars(others, report.steps, *counters)

    def close(self) -> None:
        self._writer.close()


@gin.configurable(module="alfish.training.listeners")
@checked
class Progress(Listener):
    """Shows a progress bar; where the console is not a terminal, prints a line every `period_seconds`."""

    def __init__(self, period_seconds: NonNegativeFloat = 5.0):
        self._period_seconds = period_seconds
        self._console: ConsoleProgress | None = None
        self._values: dict[str, float] = {}

    def start(self, trainer: "Trainer") -> None:
        name, budget = trainer.budget
        unit = name.removeprefix("num_").replace("_", " ").replace("wall seconds", "seconds")
        self._console = ConsoleProgress(budget, unit, sys.stderr, self._period_seconds)
        self._console.update(trainer.progress * budget, trainer.steps, {})

    def after_iteration(self, trainer: "Trainer", report: Report) -> None:
        shown = {"return": "metrics/average_return", "loss": "train/loss", "lag": "unroller/lag_mean"}
        self._values |= {name: report.scalars[key] for name, key in shown.items() if key in report.scalars}
        assert self._console is not None
        self._console.update(report.progress * trainer.budget[1], report.steps, self._values)

    def line(self, text: str) -> None:
        if self._console is None:
            print(text, file=sys.stderr, flush=True)
        else:
            self._console.line(text)

    def close(self) -> None:
        if self._console is not None:
            self._console.close()


class _Watcher(Listener):
    """Reads one scalar of the reports, and may stop the run for it."""

    def __init__(self, scalar: str):
        self._scalar = scalar

    def start(self, trainer: "Trainer") -> None:
        """Raises UsageError where nothing before it reports what it watches."""
        name = type(self).__name__
        before = trainer.listeners[: trainer.listeners.index(self)]
        evaluations = [listener._name for listener in before if isinstance(listener, Evaluate)]
        if self._scalar.rpartition("/")[0] not in (*evaluations, *TRAINER_SCALARS):
            others = ", ".join(f"{prefix}/..." for prefix in (*evaluations, *TRAINER_SCALARS))
            raise UsageError(
                f"{name}.scalar is {self._scalar!r}, which nothing before {name} in Trainer.listeners reports; put "
                f"@Evaluate(), which reports evaluation/mean_return, before it, or watch one of {others}"
            )

    def after_iteration(self, trainer: "Trainer", report: Report) -> None:
        if self._scalar in report.scalars and (reason := self.reason(report.scalars[self._scalar])):
            trainer.stop(reason)

    def reason(self, value: float) -> str | None:
        """Why the run is to stop now; None: it goes on."""
        raise NotImplementedError


@gin.configurable(module="alfish.training.listeners")
@checked
class StopAt(_Watcher):
    """Stops the run when a return is reached.

    Args:
      return_: the return, by default the mean of an evaluation.
      scalar: the watched one, by its name in metrics.csv. An `Evaluate` that reports it stands before this listener.
    """

    def __init__(self, return_: FiniteFloat = gin.REQUIRED, scalar: str = "evaluation/mean_return"):
        super().__init__(scalar)
        self._return = return_

    def reason(self, value: float) -> str | None:
        if value < self._return or math.isnan(value):
            return None
        return f"{self._scalar} is {significant(value)} (StopAt.return_ = {self._return:g})"


@gin.configurable(module="alfish.training.listeners")
@checked
class StopWithoutProgress(_Watcher):
    """Stops the run when a return has not risen for some time.

    Args:
      num_evaluations: values in a row that are not above the best one before them, until it stops; at least 1.
      min_increase: by how much a value must be above the best one to count; at least 0.
      scalar: as in `StopAt`.
    """

    def __init__(
        self,
        num_evaluations: PositiveInt = 10,
        min_increase: NonNegativeFloat = 0.0,
        scalar: str = "evaluation/mean_return",
    ):
        super().__init__(scalar)
        self._num_evaluations, self._min_increase = num_evaluations, min_increase
        self._best: float | None = None
        self._num_without = 0

    def reason(self, value: float) -> str | None:
        if math.isfinite(value) and (self._best is None or value > self._best + self._min_increase):
            self._best, self._num_without = value, 0
            return None
        self._num_without += 1
        if self._num_without < self._num_evaluations:
            return None
        best = "is not finite" if self._best is None else f"has not risen above {significant(self._best)}"
        return f"{self._scalar} {best} in {self._num_without} evaluations (StopWithoutProgress)"

    def state_dict(self) -> dict[str, Any]:
        return {"best": self._best, "num_without": self._num_without}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._best, self._num_without = state["best"], state["num_without"]


def default_listeners() -> list[Listener]:
    """Evaluation, checkpoints, summaries and the progress bar."""
    return [Evaluate(), CheckpointSaver(), Summaries(), Progress()]
