"""Sweeps: propose trials, and start, monitor and prune their runs until all trials are finished.

The parameters that differ between the runs of a sweep are written as follows:

    NAME=grid(...)         each of these values; with samplers other than grid, any of them
    NAME=choice(...)       any of these values
    NAME=uniform(a, b)     a number between a and b
    NAME=log(a, b)         a positive number whose logarithm is uniform
    NAME=int(a, b)         an integer, both ends included

NAME is a parameter as in a gin file, and values of grid and choice are written as in a gin file: `grid('relu',
'tanh')`.
"""

import io
import re
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from alfish.errors import UsageError, counted, significant
from alfish.parameters import NonNegativeInt, PositiveInt, checked
from alfish.parameters.varied import INTEGER, LISTS, NUMBER, RANGES, Parameter, check_range
from alfish.sweeps.base import Base
from alfish.sweeps.group import Due, RunGroup, Specification, bindings_text
from alfish.sweeps.table import write_csv
from alfish.sweeps.trial_samplers import MedianPruner, default_sampler, make_sampler
from alfish.sweeps.trials import Trial, TrialRun, Trials, is_over, mark_pruned

FORMS = "grid(...), choice(...), uniform(a, b), log(a, b) or int(a, b)"
NUM_TRIALS = 20  # default number of trials for samplers without a limit


@checked
@dataclass(frozen=True)
class SweepSpecification(Specification):
    """Settings of a sweep.

    Attributes:
      search: values to try, by parameter, written as in `--search`.
      sampler: method of choosing trials: 'grid', 'random' or 'tpe'.
      sampler_seed: seed of the sampler.
      seeds: number of runs of each trial; run k trains with `Trainer.seed` = seed + k.
      prune: whether bad trials are stopped early.
      trials: number of trials.
    """

    group = "sweep"
    varied = "search"
    example = "'PPO.gamma=grid(0.95, 0.99)'"
    extendable = "trials"
    factors = "seeds", "trials"

    search: Mapping[str, str]
    sampler: Literal["grid", "random", "tpe"]
    sampler_seed: NonNegativeInt
    seeds: PositiveInt
    prune: bool
    trials: PositiveInt

    @staticmethod
    def parse(argument: str) -> Parameter:
        return parameter_of(argument)

    @classmethod
    def completed(cls, known: Mapping[str, Any], base: Base) -> "SweepSpecification":
        defaults = {"sampler_seed": 0, "seeds": 1, "last": 1, "prune": False}
        parameters = [cls.parse(f"{name}={values}") for name, values in known["search"].items()]
        name = known.get("sampler") or default_sampler(parameters)
        # The sampler is made before anything is written, because make_sampler raises if a grid has a range, or if
        # Optuna is missing.
        sampler = make_sampler(name, parameters, known.get("sampler_seed", 0))
        if known.get("prune"):
            MedianPruner()
        trials = known.get("trials", sampler.size or NUM_TRIALS)
        if sampler.size is not None:
            trials = min(trials, sampler.size)
        return cls(**{**defaults, **known, "sampler": name, "trials": trials})


class Sweep(RunGroup[SweepSpecification]):
    """Trains the trials of a sweep."""

    def __post_init__(self) -> None:
        super().__post_init__()
        specification = self.specification
        self._sampler = make_sampler(specification.sampler, specification.parameters, specification.sampler_seed)
        self._pruner = MedianPruner() if specification.prune else None
        self._trials = trials_of(self.directory, specification)
        self._reported: set[int] = set()  # numbers of the trials whose ends were logged

    def run(self) -> None:
        self._reported = {trial.number for trial in self._look() if trial.state != "running"}
        if self._reported:
            self.log(f"{counted(len(self._reported), 'trial')} of {self.specification.trials} have already finished")
        self._train(self._due, self._is_over, "ended before its budget was spent")

    def _due(self) -> Iterator[Due]:
        """Prunes and reports trials, and returns the runs to train."""
        trials = self._look()
        self._report(trials)
        return self._runs(trials)

    def _runs(self, trials: list[Trial]) -> Iterator[Due]:
        """Yields the runs to train: first runs of existing trials, then runs of new trials."""
        for trial in trials:
            if trial.state == "running":
                yield from (_due(trial, run) for run in trial.runs if not run.state.is_done)
        known = {trial.number for trial in trials}
        for number in range(self.specification.trials):
            if number not in known:
                before = [trial for trial in trials if trial.number < number]
                bindings = self._sampler.propose(number, before)
                seen = [trial.number for trial in before if trial.state == "complete"]
                trial = self._trials.write(number, bindings, seen)
                trials.append(trial)
                self.log(f"Trial {number} begins: {bindings_text(bindings)}")
                yield from (_due(trial, run) for run in trial.runs)

    def _look(self) -> list[Trial]:
        """Prunes bad trials; returns all trials."""
        trials = self._trials.read()
        pruned = [self._prune(trial, trials, self._pruner) for trial in trials] if self._pruner is not None else []
        return self._trials.read() if any(pruned) else trials

    def _prune(self, trial: Trial, trials: Sequence[Trial], pruner: MedianPruner) -> bool:
        """Stops a trial if the pruner requires it; returns whether the trial was stopped.

        A trial that has completed since the last call is also checked, because one of its new evaluations may require
        pruning.
        """
        if trial.state not in ("running", "complete") or trial.number in self._reported:
            return False
        for place, run in enumerate(trial.runs):
            if (clock := pruner.pruned_at(trial, place, trials)) is not None:
                mark_pruned(run, clock)
                self._trials.forget(trial.number)
                for other in trial.runs:
                    self.jobs.stop(other.state.directory)
                return True
        return False

    def _is_over(self, directory: Path) -> bool:
        """Returns whether a run is done or was pruned, or another run has ended its trial."""
        trials = [trial for trial in self._trials.read() if trial.state != "running"]
        return is_over(directory) or any(run.state.directory == directory for trial in trials for run in trial.runs)

    def _report(self, trials: Sequence[Trial]) -> None:
        """Logs which trials have ended since the last call, and writes the table."""
        ended = [trial for trial in trials if trial.state != "running" and trial.number not in self._reported]
        for trial in ended:
            self._reported.add(trial.number)
            if trial.value is None:
                self.log(f"Trial {trial.number} failed: {trial.failure}")
                for run in trial.runs:  # runs of the trial's other seeds are useless
                    self.jobs.stop(run.state.directory)
            elif trial.state == "pruned":
                self.log(f"Trial {trial.number} was pruned at {trial.steps:,} steps")
            else:
                self.log(f"Trial {trial.number} is complete: {significant(trial.value)}")
        if ended:
            write_csv(self.directory, list(self.specification.search), trials)


def trials_of(directory: Path, specification: SweepSpecification) -> Trials:
    """Returns the trials in the directory of a sweep."""
    seeds = range(specification.seed, specification.seed + specification.seeds)
    return Trials(directory, specification.parameters, seeds, specification.last, specification.column)


def parameter_of(argument: str) -> Parameter:
    """Returns the parameter of a `--search` argument.

    Raises:
      UsageError: the argument is not a search, or the ends of a range are in the wrong order or infinite.
    """
    said = f"--search={argument}"
    match = re.fullmatch(r"\s*([\w./]+)\s*=\s*(\w+)\((.*)\)\s*", argument, re.DOTALL)
    if match is None or match[2] not in (*LISTS, *RANGES) or not argument.isprintable():
        raise UsageError(f"{said} is not a search space: write NAME={FORMS}")
    name, kind, inner = match.groups()
    items = _split(inner, said)
    if name == "Trainer.seed":
        raise UsageError(f"{said}: seeds repeat a trial; write --seeds=3 for three runs of each trial")
    if kind in LISTS:
        if not items or len(set(items)) < len(items):
            raise UsageError(f"{said}: {kind}(...) requires one or more distinct values")
        return Parameter(name, kind, items)
    number = INTEGER if kind == "int" else NUMBER
    if len(items) != 2 or not all(re.fullmatch(number, item) for item in items):
        raise UsageError(f"{said}: {kind}(a, b) requires two {'integers' if kind == 'int' else 'numbers'}")
    low, high = map(float, items)
    check_range(low, high, said, f"{kind}({items[1]}, {items[0]})")
    if kind == "log" and low <= 0:
        raise UsageError(f"{said}: log(a, b) requires positive numbers; use uniform(a, b) for other numbers")
    return Parameter(name, kind, items)


def _due(trial: Trial, run: TrialRun) -> Due:
    return Due(run.state.directory, {**trial.bindings, "Trainer.seed": run.seed})


def _split(text: str, said: str) -> tuple[str, ...]:
    """Returns the parts of a text between commas that are outside of brackets and quotes."""
    parts, depth, start = [], 0, 0
    try:
        for token in tokenize.generate_tokens(io.StringIO(text.replace("\n", " ")).readline):
            if token.type != tokenize.OP:
                continue
            depth += (token.string in "([{") - (token.string in ")]}")
            if token.string == "," and depth == 0:
                parts.append(text[start : token.start[1]])
                start = token.end[1]
    except (tokenize.TokenError, SyntaxError) as error:
        raise UsageError(f"{said}: its values are not valid gin ({error.args[0]})") from error
    last = text[start:]
    return tuple(part.strip() for part in [*parts, *([last] if last.strip() else [])])
