"""Sweeps: propose trials, and start, monitor and prune their runs until all trials are finished."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from alfish.errors import counted, significant
from alfish.parameters import NonNegativeInt, PositiveInt, checked
from alfish.parameters.varied import Parameter
from alfish.sweeps.base import Base
from alfish.sweeps.group import Due, RunGroup, Specification, bindings_text
from alfish.sweeps.search import parse
from alfish.sweeps.table import write_csv
from alfish.sweeps.trial_samplers import MedianPruner, default_sampler, make_sampler
from alfish.sweeps.trials import Trial, TrialRun, Trials, is_over, mark_pruned

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
        return parse(argument)

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
    return Trials(directory, specification.parameters, seeds, specification.last)


def _due(trial: Trial, run: TrialRun) -> Due:
    return Due(run.state.directory, {**trial.bindings, "Trainer.seed": run.seed})
