"""Trials of a sweep, as read from the directories of their runs.

A trial is one setting of the searched parameters, trained by one run or, with several seeds, by one run for each seed.
Each run is trained by `alfish train` in an ordinary run directory. The sweep also writes the following files into that
directory:

    trial.json   before the run starts: number, bindings, seed, and the trials that were complete when it was proposed
    pruned       clock of the evaluation after which the run was stopped
    failed       reason why the run cannot continue; without this file, the run is started again
"""

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from alfish.errors import UsageError
from alfish.parameters.kinds import shown
from alfish.parameters.varied import Parameter
from alfish.runs import contents
from alfish.runs.files import make_directory, write_atomically
from alfish.sweeps.run_state import DONE, RunState, mean_of_means
from alfish.training.evaluations.evaluation import mean

TRIAL = "trial.json"
PRUNED = "pruned"
PLACE = re.compile(r"(\d{3,})(-\d+)?")  # names of the directories of runs

State = Literal["running", "complete", "pruned", "failed"]


@dataclass(frozen=True)
class TrialRun:
    """A run of a trial.

    Attributes:
      state: state of the run, read from the files of `alfish train`.
      seed: value of `Trainer.seed`.
      pruned_at: clock of the evaluation after which the run was stopped; None if it was not pruned.
      last: number of final evaluations of a run; their mean is the run's value.
      column: column of the values in the tables of the evaluations.
    """

    state: RunState
    seed: int
    pruned_at: int | None
    last: int
    column: str = "return"

    @classmethod
    def read(cls, directory: Path, seed: int, last: int, column: str) -> "TrialRun":
        pruned, state = contents.record(directory, PRUNED, {"clock": int}), RunState.read(directory, column)
        if pruned is not None and pruned["clock"] not in state.evaluations:
            raise UsageError(
                f"{directory / PRUNED} has the step count {pruned['clock']}, at which the run was not evaluated; "
                "remove it"
            )
        return cls(state, seed, None if pruned is None else pruned["clock"], last, column)

    @property
    def counting(self) -> dict[int, tuple[float, ...]]:
        """Evaluations whose mean is the run's value: the last `last`, or the evaluation at which the run was pruned."""
        evaluations = self.state.evaluations
        clocks = list(evaluations)[-self.last :] if self.pruned_at is None else [self.pruned_at]
        return {clock: evaluations[clock] for clock in clocks}

    @property
    def value(self) -> float | None:
        """Mean of the means of the evaluations that count; None without evaluations."""
        return mean_of_means(self.counting.values())

    @property
    def failure(self) -> str | None:
        """Reason why the run has no value; None if the run has a value, or is not over.

        A run with the file `failed` may be done, because the user may have continued it with `alfish train`.
        """
        if not self.state.is_done:
            return self.state.failure
        if self.value is None:
            return "has no evaluation"
        if not all(self.counting.values()):
            return f"has an evaluation without {self.column} (Trainer.evaluation_infos)"
        return None if math.isfinite(self.value) else "has no finite value"


@dataclass(frozen=True)
class Trial:
    """A trial.

    Attributes:
      number: number of the trial, from 0.
      bindings: value of each searched parameter as gin text, by the parameter's name.
      seen: numbers of the trials that were complete when this trial was proposed.
      runs: runs of the trial, one for each seed.
    """

    number: int
    bindings: Mapping[str, str]
    seen: tuple[int, ...]
    runs: tuple[TrialRun, ...]

    @cached_property
    def state(self) -> State:
        """State of the trial: the state of the first failed or pruned run; else 'running' until all runs are done."""
        for run in self.runs:
            if run.failure is not None:
                return "failed"
            if run.pruned_at is not None:
                return "pruned"
        return "complete" if all(run.state.is_done for run in self.runs) else "running"

    @property
    def failure(self) -> str | None:
        """Reason why the trial failed; None if the trial did not fail."""
        return next((run.failure for run in self.runs if run.failure is not None), None)

    @property
    def counting(self) -> tuple[TrialRun, ...]:
        """Runs whose mean is the trial's value: all runs of a complete trial, or the pruned run of a pruned trial."""
        if self.state == "pruned":
            return (next(run for run in self.runs if run.pruned_at is not None),)
        return self.runs if self.state == "complete" else ()

    @property
    def values(self) -> list[float]:
        """Values of the runs that count."""
        return [run.value for run in self.counting if run.value is not None]

    @property
    def value(self) -> float | None:
        """Mean of `values`; None without values."""
        return mean(self.values) if self.values else None

    @property
    def steps(self) -> int | None:
        """Clock of the last evaluation in `value`; None without a value."""
        return max((max(run.counting) for run in self.counting), default=None)


class Trials:
    """The trials in the directory of a sweep.

    Args:
      directory: directory of the sweep.
      parameters: parameters that the trials bind.
      seeds: value of `Trainer.seed` in each run of a trial.
      last, column: number of final evaluations of a run, and column of their values, as in `TrialRun`.
    """

    def __init__(self, directory: Path, parameters: Sequence[Parameter], seeds: Sequence[int], last: int, column: str):
        self._directory = directory
        self._parameters = parameters
        self._seeds = seeds
        self._read = last, column
        self._over: dict[int, Trial] = {}  # trials that have ended and are not read again

    def read(self) -> list[Trial]:
        """Returns the trials, by number."""
        # Other directories, such as a copy named 001_old, belong to the user.
        paths = (path for path in self._directory.glob("[0-9]*") if os.path.lexists(path / TRIAL))
        places = (PLACE.fullmatch(path.name) for path in paths)
        numbers = {int(place[1]) for place in places if place}
        trials = [self._over.get(number) or self._read_one(number) for number in sorted(numbers)]
        self._over = {trial.number: trial for trial in trials if trial.state != "running"}
        return trials

    def forget(self, number: int) -> None:
        """Makes the next call of `read` read an ended trial again."""
        self._over.pop(number, None)

    def write(self, number: int, bindings: Mapping[str, str], seen: Sequence[int]) -> Trial:
        """Writes a new trial, or completes a trial whose writer was killed; returns the trial."""
        for directory, seed in self._places(number):
            content = {"trial": number, "bindings": dict(bindings), "seed": seed, "seen": list(seen)}
            make_directory(directory)
            write_atomically(directory / TRIAL, json.dumps(content, indent=2) + "\n")
        return self._read_one(number)

    def _read_one(self, number: int) -> Trial:
        places = self._places(number)
        paths = [directory / TRIAL for directory, _ in places]
        content = self._content(next(filter(os.path.lexists, paths), paths[0]))
        if not all(map(os.path.lexists, paths)):
            return self.write(number, content["bindings"], content["seen"])
        runs = tuple(TrialRun.read(directory, seed, *self._read) for directory, seed in places)
        return Trial(number, content["bindings"], tuple(content["seen"]), runs)

    def _content(self, path: Path) -> dict[str, Any]:
        """Returns the content of a `trial.json`, which may come from another person.

        Raises:
          UsageError: the file does not belong to this sweep.
        """
        content = contents.record(path.parent, path.name, {"bindings": dict, "seen": list})
        if content is None:
            raise UsageError(f"{path} was removed; move its directory away")
        bindings, names = content["bindings"], [one.name for one in self._parameters]
        has_texts = list(bindings) == names and all(isinstance(text, str) for text in bindings.values())
        has_texts = has_texts and all(one.has(bindings[one.name]) for one in self._parameters)
        if not has_texts or not all(type(number) is int for number in content["seen"]):
            raise UsageError(
                f"{path} does not belong to a trial of this sweep ({shown(bindings)}); move its directory away"
            )
        return content

    def _places(self, number: int) -> list[tuple[Path, int]]:
        """Returns directory and seed of each run of a trial."""
        if len(self._seeds) == 1:
            return [(self._directory / f"{number:03d}", self._seeds[0])]
        return [(self._directory / f"{number:03d}-{k}", seed) for k, seed in enumerate(self._seeds)]


def is_over(directory: Path) -> bool:
    """Returns True if a run is done or was pruned."""
    return any((directory / name).is_file() for name in (DONE, PRUNED))


def mark_pruned(run: TrialRun, clock: int) -> None:
    """Records that a run was pruned after its evaluation at `clock`."""
    write_atomically(run.state.directory / PRUNED, json.dumps({"clock": clock}) + "\n")
