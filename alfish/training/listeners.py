"""Listeners: evaluation, checkpoints, progress, stopping. A listener may read report entries of earlier listeners."""

import inspect
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gin

from alfish import specs
from alfish.environments import Environment
from alfish.errors import RunError, UsageError, significant
from alfish.errors.user_code import check_methods
from alfish.parameters import FiniteFloat, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, checked
from alfish.parameters.kinds import shown
from alfish.policies.composites import GamesByPolicy
from alfish.processes import replicas
from alfish.runs.checkpoints import CODE_FILE
from alfish.runs.files import make_directory, write_atomically
from alfish.runs.writers.console import ConsoleProgress
from alfish.training.clock import next_due
from alfish.training.evaluations.evaluation import ENV_INFO, Evaluation, scalar_names
from alfish.training.evaluator import Evaluator
from alfish.training.films import FilmSchedule
from alfish.training.listener import Listener, Report, Run
from alfish.training.summaries import Summaries

# Prefixes of the scalars that the trainer reports.
TRAINER_SCALARS = ("train", "holdout", "metrics", "unroller", "time")


# An evaluation after a budget of environment steps is reported at the budget, if the run took fewer steps than this
# factor times the budget.
LARGEST_EXCESS = 1.1


@gin.configurable(module="alfish.training.listeners")
@checked
class Evaluate(Listener):
    """Evaluates the policy in separate environments, always on the same episodes, and writes results to `eval/`.

    File names, summaries and the log show the nominal clock of an evaluation: the multiple of the period, or the budget
    of environment steps, at which the evaluation was due. The iteration itself ends a little later, at a clock that
    depends on the seed. If an iteration exceeds the budget by a tenth or more, the clock at its end is shown.

    If an environment fails in a run that tolerates errors of environments (`AsyncUnroller.max_env_errors`), the
    evaluation is left out, with a line in the log.

    Args:
      period: number of clock steps between evaluations; 0 evaluates only at the end.
      num_episodes: number of complete episodes in one evaluation.
      num_envs: number of environments that step together; the result does not depend on it.
      seed: seed of the first episode; episode k has seed + k.
      name: name of the files and scalars, which must differ between several Evaluate listeners.
      video_period: number of clock steps between evaluations that are filmed; 0 means no films. The last evaluation of
        a run that spends its budget is also filmed. Films are in the directory `films` of the run, and need the extra
        'video'.
      video_episodes: number of episodes, the first of an evaluation, that a film shows side by side.
      video_captions: whether films show return, reward, value and action.
      lineup: policies of some agents in games, by patterns of agents' names, such as {'agent_*': 'random'}; each is
        'random' or the name of a policy. None means the lineup of the run.
      environment: factory or id of the environments, as `Trainer.evaluation_environment`; several listeners can thus
        evaluate on several tasks. None means the environments of the run's evaluations.

    Attributes:
      period, name: the constructor's arguments.
      samples: whether actions are sampled; if not, the policy takes its most probable action.
    """

    samples = False

    def __init__(
        self,
        period: NonNegativeInt = 10_000,
        num_episodes: PositiveInt = 20,
        num_envs: PositiveInt = 8,
        seed: NonNegativeInt = 0,
        name: str = "evaluation",
        video_period: NonNegativeInt = 0,
        video_episodes: PositiveInt = 1,
        video_captions: bool = False,
        lineup: Mapping[str, str] | None = None,
        environment: str | Callable[..., Environment] | None = None,
    ):
        given = {"lineup": lineup, "environment": environment}
        self._options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        self.period = period
        self._num_episodes = num_episodes
        self._num_envs = num_envs
        self._seed = seed
        self.name = name
        if not re.fullmatch(r"[\w-][\w.-]*", name, re.ASCII) or name in TRAINER_SCALARS:
            raise UsageError(
                f"Evaluate.name is {name!r}; it is part of the names of files and scalars: use ASCII letters, digits, "
                f"'_', '-' and '.' (not as the first character), and none of {', '.join(TRAINER_SCALARS)}"
            )
        if video_episodes > num_episodes:
            raise UsageError(
                f"Evaluate.video_episodes is {video_episodes}; it must be at most num_episodes, which is {num_episodes}"
            )
        self._films = FilmSchedule(video_period, video_episodes, video_captions) if video_period else None
        self._evaluator: Evaluator | None = None
        self._next = period
        self._last: tuple[int, int] | None = None  # steps and updates of the last evaluation

    def start(self, run: Run) -> None:
        names = [listener.name for listener in run.listeners if isinstance(listener, Evaluate)]
        if names.count(self.name) > 1:
            raise UsageError(
                f"{names.count(self.name)} Evaluate listeners are called {self.name!r} and would overwrite each "
                "other's files; give each a different Evaluate.name"
            )
        if self.period:
            self._next = next_due(run.clock.value, self.period, self._next)
        self._make_evaluator(run)

    def _make_evaluator(self, run: Run) -> None:
        if self._films is None:
            self._evaluator = run.evaluator(self._num_episodes, self._num_envs, **self._options)
        else:
            num_envs = max(self._num_envs, self._films.num_episodes)
            self._evaluator = run.evaluator(self._num_episodes, num_envs, render_mode="rgb_array", **self._options)
            self._films.start(self._evaluator.environment, run.clock.value)

    def is_behind(self, run: Run) -> bool:
        if run.clock.finished:  # nothing is due if a listener stopped the run just after an evaluation
            return (run.clock.value, run.clock.updates) != self._last
        return self.period > 0 and run.clock.value >= self._next

    def after_iteration(self, run: Run, report: Report) -> None:
        # An evaluation that is due during an interruption is made after the resume.
        if not self.is_behind(run) or (run.signals.number is not None and not run.clock.finished):
            return
        assert self._evaluator is not None
        nominal = self._nominal_clock(run, report)
        stem = f"{self.name}-{nominal:012d}"
        evaluation: Evaluation | None = None
        try:
            with run.signals.breaking():
                evaluation = self._evaluate(run, report, stem)
        except (RunError, UsageError) as error:
            if not run.unroller.tolerates_errors:
                raise
            run.log(f"The evaluation at {nominal:,} steps is left out, because an environment failed: {error}")
            self._evaluator.close()
            self._make_evaluator(run)
        self._last = report.clock, report.updates
        if self.period:
            self._next = next_due(report.clock, self.period)
        if evaluation is None:
            return
        directory = run.directory.path / "eval"
        make_directory(directory)
        write_atomically(directory / f"{stem}.csv", evaluation.to_csv())
        if next(one for one in run.listeners if isinstance(one, Evaluate)) is self:
            report.evaluation = evaluation
        report.scalars |= evaluation.scalars(self.name)
        report.nominal_clock[self.name] = nominal
        how = ", sampled actions" if self.samples else ""
        name = "" if self.name == "evaluation" else f" {self.name}"
        run.log(f"Evaluation{name} at {nominal:,} steps{how}: {evaluation.words()}")

    def _evaluate(self, run: Run, report: Report, stem: str) -> Evaluation:
        """Returns the evaluation, filmed if a film is due."""
        assert self._evaluator is not None
        arguments = self._num_episodes, self._seed, self.samples, report.env_steps
        films = self._films
        recorder = films and films.recorder(report.clock, run.clock.finished, run.directory.path, stem)
        if not (films and recorder):
            return self._evaluator.evaluate(*arguments)
        with recorder:
            evaluation = self._evaluator.evaluate(*arguments, recorder, films.captions)
        films.move_on(report.clock)
        report.films |= {f"{self.name}/film": path for path, _ in recorder.written}
        return evaluation

    def _nominal_clock(self, run: Run, report: Report) -> int:
        name, budget, _ = run.clock.budget
        at_budget = budget + run.clock.idle
        is_first = self._last is None or self._last[0] < at_budget  # False if the budget was lowered after evaluations
        # An iteration that is long compared with the budget may exceed the budget by far.
        if name == "num_env_steps" and budget <= report.env_steps < LARGEST_EXCESS * budget and is_first:
            return int(at_budget)
        # The period may have changed during the run; this evaluation was due at `_next`.
        return report.clock if run.clock.finished else max(report.clock // self.period * self.period, self._next)

    def close(self) -> None:
        if self._evaluator is not None:
            self._evaluator.close()

    def state_dict(self) -> dict[str, Any]:
        films = {"next_film": self._films.next} if self._films else {}
        return {"next": self._next, "last": self._last and list(self._last), **films}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._next = state["next"]
        if last := state.get("last"):  # older versions did not save it
            self._last = last[0], last[1]
        if self._films:
            self._films.next = state.get("next_film", self._films.next)


@gin.configurable(module="alfish.training.listeners")
@checked
class EvaluateSampled(Evaluate):
    """Evaluates sampled actions, as `alfish evaluate --sample` does; `Evaluate` evaluates the most probable actions.

    The settings of `Evaluate`, such as period and episodes, also apply to this listener.

    Args:
      name: name of the files and scalars.
    """

    samples = True

    def __init__(self, name: str = "sampled"):
        super().__init__(name=name)


class _InfoReader(Listener):
    """Base of listeners with a setting that may name a number in the infos of evaluations."""

    _has_warned = False

    def _warn_of_missing(self, run: Run, setting: str, scalar: str, evaluation: Evaluation) -> None:
        """Logs once that an evaluation lacks the number that a setting names as `env_info/NAME`."""
        name = scalar.removeprefix(ENV_INFO)
        if name == scalar or name in evaluation.info_means() or self._has_warned:
            return
        self._has_warned = True
        found = ", ".join(evaluation.infos) or "no numbers (Trainer.evaluation_infos names those to read)"
        run.log(f"{setting} names {scalar}, but the infos at the ends of episodes have {found}")


@gin.configurable(module="alfish.training.listeners")
@checked
class CheckpointSaver(_InfoReader):
    """Saves checkpoints periodically, at the end, and when a policy has the best evaluation so far.

    A checkpoint is due when `period` or `period_minutes` has passed; its name contains the clock. A checkpoint of the
    best policy that is saved in between has no replay rows, because replay may be large. Such a checkpoint can be
    evaluated and played (`--checkpoint=best`). A killed run continues from the newest checkpoint with replay rows, or
    from the newest checkpoint if the run saves no rows.

    Args:
      period: number of clock steps between checkpoints. 0 means that checkpoints are saved only of the best policy, and
        at the end or an interruption; it also disables `period_minutes`.
      period_minutes: minutes of training after which a checkpoint is also due, so that a killed run in a slow
        environment loses at most these minutes. Evaluations and saving do not count. None means no such limit.
      keep_last: number of newest checkpoints to keep.
      keep_period: number of clock steps between checkpoints that are kept permanently; 0 keeps none permanently.
      keep_best: whether to keep the checkpoint with the best mean evaluation return; if returns are equal, the
        newest checkpoint counts. With several `Evaluate` listeners, the first listener decides.
      best_of: name of the policy (in a run of several policies) or of the reward entry (of a vector reward) whose mean
        return decides which checkpoint is best, or `env_info/NAME` for the mean of a number in the infos
        (`Trainer.evaluation_infos`), such as 'env_info/success', or 'env_info/POLICY/success' in a run of several
        policies. None means the return. In a run of several policies, None keeps no best checkpoint, because a mean
        over players does not measure progress.
    """

    on_every_learner = True

    def __init__(
        self,
        period: NonNegativeInt = 50_000,
        keep_last: PositiveInt = 3,
        keep_period: NonNegativeInt = 0,
        keep_best: bool = True,
        period_minutes: PositiveFloat | None = 10.0,
        best_of: str | None = None,
    ):
        self._best_of = best_of
        self._period_seconds = math.inf if period_minutes is None else 60 * period_minutes
        self._saved_seconds = 0.0  # `Report.wall_seconds` of the last checkpoint that was due
        self._period = period
        self._keep_last = keep_last
        self._keep_period = keep_period
        self._keep_best = keep_best
        self._next = period
        self._best: float | None = None
        self._best_clock: int | None = None  # steps of the checkpoint of the best policy

    def start(self, run: Run) -> None:
        names = specs.reward_names(run.environment.reward_spec)
        if self._best_of is not None and self._best_of not in names and not self._best_of.startswith(ENV_INFO):
            known = ", ".join([*names, f"{ENV_INFO}NAME"])
            raise UsageError(f"CheckpointSaver.best_of is {self._best_of!r}; it must be one of {known}")
        if isinstance(run.environment, GamesByPolicy) and len(names) > 1 and self._best_of is None:
            self._keep_best = False
        checkpoints = run.directory.checkpoints
        checkpoints.keep(self._keep_last, self._keep_period)
        if self._period:
            self._next = next_due(run.clock.value, self._period, self._next)
        self._saved_seconds = run.clock.wall_seconds
        if self._best is None or self._best_clock == checkpoints.best():
            return
        # The run may continue from an earlier checkpoint, or was killed before it marked the best checkpoint.
        if self._best_clock in checkpoints.steps():
            checkpoints.mark_best(self._best_clock)
        else:
            self._best = self._best_clock = None

    def after_iteration(self, run: Run, report: Report) -> None:
        # The seconds are equal in all learners, so all learners save together.
        waited = report.wall_seconds - self._saved_seconds
        due = report.finished or (self._period > 0 and (report.clock >= self._next or waited >= self._period_seconds))
        is_best = False
        if self._keep_best and report.evaluation is not None:
            value = self._value(report.evaluation)
            self._warn_of_missing(run, "CheckpointSaver.best_of", self._best_of or "", report.evaluation)
            is_best = math.isfinite(value) and (self._best is None or value >= self._best)
            if is_best:
                self._best, self._best_clock = value, report.clock
        is_repeated = run.interrupted_by is not None and run.is_saved and not report.is_missed
        if is_repeated or not (due or is_best or report.is_missed):
            return
        if due:
            self._saved_seconds = report.wall_seconds
        if due and self._period:
            self._next = next_due(report.clock, self._period)
        # A missed checkpoint is saved at once, so that a later process does not repeat the work. Its rows are not
        # saved, because replay has not changed.
        run.save(best=is_best, rows=due and not report.is_missed)

    def _value(self, evaluation: Evaluation) -> float:
        """Returns the number that ranks an evaluation."""
        if self._best_of is None:
            return evaluation.mean
        if self._best_of.startswith(ENV_INFO):
            return evaluation.info_means().get(self._best_of.removeprefix(ENV_INFO), math.nan)
        return evaluation.means().get(self._best_of, math.nan)

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next, "best": self._best, "best_clock": self._best_clock, "best_of": self._best_of}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._next = state["next"]
        if state.get("best_of", self._best_of) == self._best_of:  # otherwise, the values cannot be compared
            self._best = state["best"]
            self._best_clock = state.get("best_clock")  # older versions did not save it


@gin.configurable(module="alfish.training.listeners")
@checked
class CodeSnapshot(Listener):
    """Writes the source code of alfish and of the user's imported modules into `code.zip` in the run's directory.

    `alfish evaluate --code=run`, `play` and `verify` then work after the code has changed. When a run continues with
    other code, the archive is replaced.
    """

    def start(self, run: Run) -> None:
        from alfish.runs import code  # imported here, because few runs need its modules of the standard library

        write_atomically(run.directory.path / CODE_FILE, code.snapshot())


@gin.configurable(module="alfish.training.listeners")
@checked
class Progress(Listener):
    """Shows a progress bar on a terminal; otherwise prints a line every `period_seconds`."""

    def __init__(self, period_seconds: NonNegativeFloat = 5.0):
        self._period_seconds = period_seconds
        self._console: ConsoleProgress | None = None
        self._values: dict[str, float] = {}

    def start(self, run: Run) -> None:
        name, budget, _ = run.clock.budget
        unit = name.removeprefix("num_").replace("_", " ").replace("wall seconds", "seconds")
        self._console = ConsoleProgress(budget, unit, sys.stderr, self._period_seconds)
        self._console.update(run.clock.spent, run.clock.value, run.clock.wall_seconds, {})

    def after_iteration(self, run: Run, report: Report) -> None:
        shown = {"return": "metrics/average_return", "loss": "train/loss", "lag": "unroller/lag_mean"}
        self._values |= {name: report.scalars[key] for name, key in shown.items() if key in report.scalars}
        assert self._console is not None
        self._console.update(run.clock.spent, report.clock, report.wall_seconds, self._values)

    def show(self, line: str) -> bool:
        if self._console is not None:
            self._console.line(line)
        return self._console is not None

    def close(self) -> None:
        if self._console is not None:
            self._console.close()


class _Watcher(_InfoReader):
    """Reads one scalar of the reports, and stops the run on a condition."""

    def __init__(self, scalar: str):
        self._scalar = scalar

    def start(self, run: Run) -> None:
        check_scalar(run, self._scalar, f"{type(self).__name__}.scalar")

    def after_iteration(self, run: Run, report: Report) -> None:
        value = report.due(self._scalar)
        evaluation, _, scalar = self._scalar.partition("/")
        first = next((one.name for one in run.listeners if isinstance(one, Evaluate)), None)
        if report.evaluation is not None and evaluation == first:
            self._warn_of_missing(run, f"{type(self).__name__}.scalar", scalar, report.evaluation)
        if value is not None and (reason := self.reason(value)):
            run.stop(reason)

    def reason(self, value: float) -> str | None:
        """Returns the reason to stop the run; None if the run continues."""
        raise NotImplementedError


@gin.configurable(module="alfish.training.listeners")
@checked
class StopAt(_Watcher):
    """Stops the run when a return is reached.

    Args:
      return_: value at which the run stops.
      scalar: scalar to watch, by its name in metrics.csv: a scalar of `Evaluate` or of the trainer (`metrics/...`,
        `train/...`). Scalars of diagnostics and other listeners cannot be watched.
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
    """Stops the run when a return has stopped rising.

    Args:
      num_evaluations: number of consecutive values without progress after which the run stops, at least 1.
      min_increase: increase over the best value that a new value must exceed to count as progress, at least 0.
      scalar: scalar to watch, by its name in metrics.csv, as in `StopAt`.
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


def check_scalar(run: Run, scalar: str, name: str) -> None:
    """Raises UsageError if a scalar comes neither from an evaluation nor from the trainer.

    Args:
      run: run that reports the scalar.
      scalar: name in metrics.csv.
      name: name of the parameter in the message, such as 'StopAt.scalar'.
    """
    prefixes = [listener.name for listener in run.listeners if isinstance(listener, Evaluate)]
    names = scalar_names(specs.reward_names(run.environment.reward_spec))
    of_evaluations = [f"{prefix}/{each}" for prefix in prefixes for each in names]
    heads = [f"{prefix}/{ENV_INFO}" for prefix in prefixes] + [f"{prefix}/" for prefix in TRAINER_SCALARS]
    if scalar not in of_evaluations and not scalar.startswith(tuple(heads)):
        others = ", ".join((*of_evaluations, *(f"{head}..." for head in heads)))
        raise UsageError(f"{name} is {scalar!r}; it must be one of {others}; @Evaluate() adds evaluation/mean_return")


def checked_listeners(
    listeners: Sequence[Listener] | None, extra: Sequence[Listener], first: Sequence[Listener] = ()
) -> list[Listener]:
    """Returns the listeners of a run in the order of their calls.

    Listeners that change the algorithm come first, then evaluations, then all other listeners. Listeners that save
    checkpoints come last, so that checkpoints contain the state of all listeners after the iteration.

    With several learners, the first learner calls all listeners. Other learners call only listeners with
    `changes_algorithm` or `on_every_learner`.

    Args:
      listeners: listeners of the run; None means evaluation, checkpoints, summaries and the progress bar.
      extra: further listeners, each called after all other listeners of its kind.
      first: further listeners, each called before all other listeners of its kind.

    Raises:
      UsageError: an entry is not a Listener, or has a method with other arguments or a misspelt name.
    """
    if listeners is None:
        listeners = [Evaluate(), CheckpointSaver(), Summaries(), Progress()]
    together = [*first, *listeners, *extra]
    for listener in together:
        if not isinstance(listener, Listener):
            raise UsageError(
                f"Trainer.listeners has {shown(listener)}, which is not a Listener; derive its class from Listener"
            )
        check_methods(listener, Listener)
        methods = {name: method for name, method in vars(Listener).items() if inspect.isfunction(method)}
        if all(getattr(type(listener), name) is method for name, method in methods.items()):
            raise UsageError(
                f"{type(listener).__name__} has no method of Listener, so it would do nothing; define "
                "after_iteration(self, run, report), start(self, run) or close(self)"
            )
    everywhere = [each.changes_algorithm or each.on_every_learner for each in together]
    here = [listener for listener, is_needed in zip(together, everywhere) if is_needed or replicas.rank() == 0]

    def place(listener: Listener) -> tuple[bool, ...]:
        is_saver = isinstance(listener, CheckpointSaver)
        return not listener.changes_algorithm, not isinstance(listener, Evaluate), is_saver

    return sorted(here, key=place)
