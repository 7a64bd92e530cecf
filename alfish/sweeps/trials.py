"""Trials of a sweep, as their runs' directories show them.

A trial is one setting of the searched parameters, trained by one run or, with several seeds, by one run for each seed.
The directory of a run is a run of `alfish train` like any other. Beside its files, the sweep writes:

    trial.json   before the run starts: number, bindings and seed, and which trials were complete when it was proposed
    pruned       the evaluation after which the run was stopped
    failed       why the run cannot go on; without this file it is tried again
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
from alfish.runs import contents
from alfish.runs.files import make_directory, write_atomically
from alfish.sweeps.run_state import DONE, RunState, mean_of_means
from alfish.sweeps.search import Parameter
from alfish.training.evaluations.evaluation import mean

TRIAL = "trial.json"
PRUNED = "pruned"
PLACE = re.compile(r"(\d{3,})(-\d+)?")  # names of the directories of runs

State = Literal["running", "complete", "pruned", "failed"]


@dataclass(frozen=True)
class Run:
    """A run of a trial.

    Attributes:
      state: what `alfish train` has written so far.
      seed: `Trainer.seed`.
      pruned_at: clock of the evaluation after which it was stopped; None: it was not pruned.
      last: number of evaluations at the end of a run whose mean is its value.
    """

    state: RunState
    seed: int
    pruned_at: int | None
    last: int

    @classmethod
    def read(cls, directory: Path, seed: int, last: int) -> "Run":
        pruned, state = contents.record(directory, PRUNED, {"clock": int}), RunState.read(directory)
        if pruned is not None and pruned["clock"] not in state.evaluations:
            raise UsageError(
                f"{directory / PRUNED} names the clock {pruned['clock']}, at which the run was not evaluated; remove it"
            )
        return cls(state, seed, None if pruned is None else pruned["clock"], last)

    @property
    def counting(self) -> dict[int, tuple[float, ...]]:
        """The evaluations whose mean is the run's value: the last ones, or the one after which it was pruned."""
        evaluations = self.state.evaluations
        clocks = list(evaluations)[-self.last :] if self.pruned_at is None else [self.pruned_at]
        return {clock: evaluations[clock] for clock in clocks}

    @property
    def value(self) -> float | None:
        """Mean of the means of the evaluations that count; None: there was none."""
        return mean_of_means(self.counting.values())

    @property
    def failure(self) -> str | None:
        """The reason for which the run has no value; None: it has one, or is not over.

        A run that failed may be done, because `alfish train` has continued it.
        """
        if not self.state.is_done:
            return self.state.failure
        if self.value is None:
            return "has no evaluation"
        return None if math.isfinite(self.value) else "has no finite value"


@dataclass(frozen=True)
class Trial:
    """A trial.

    Attributes:
      number: of the trial, from 0.
      bindings: gin texts of the searched parameters.
      seen: numbers of the trials that were complete when this one was proposed.
      runs: one for each seed.
    """

    number: int
    bindings: Mapping[str, str]
    seen: tuple[int, ...]
    runs: tuple[Run, ...]

    @cached_property
    def state(self) -> State:
        """'running' until a run has failed or was pruned, or all are done; the first of these runs decides."""
        for run in self.runs:
            if run.failure is not None:
                return "failed"
            if run.pruned_at is not None:
                return "pruned"
        return "complete" if all(run.state.is_done for run in self.runs) else "running"

    @property
    def failure(self) -> str | None:
        """The reason for which the trial failed; None: it did not."""
        return next((run.failure for run in self.runs if run.failure is not None), None)

    @property
    def counting(self) -> tuple[Run, ...]:
        """The runs whose mean is the trial's value: all of a complete trial, the pruned one of a pruned trial."""
        if self.state == "pruned":
            return (next(run for run in self.runs if run.pruned_at is not None),)
        return self.runs if self.state == "complete" else ()

    @property
    def values(self) -> list[float]:
        """Values of the runs that count."""
        return [run.value for run in self.counting if run.value is not None]

    @property
    def value(self) -> float | None:
        """Mean of `values`; None: there is none."""
        return mean(self.values) if self.values else None

    @property
    def steps(self) -> int | None:
        """Clock of the evaluation that `value` ends with; None: there is no value."""
        return max((max(run.counting) for run in self.counting), default=None)


class Trials:
    """The trials in the directory of a sweep.

    Args:
      directory: of the sweep.
      parameters: that the trials bind.
      seeds: `Trainer.seed` of each run of a trial.
      last: as in `Run`.
    """

    def __init__(self, directory: Path, parameters: Sequence[Parameter], seeds: Sequence[int], last: int):
        self._directory, self._parameters, self._seeds, self._last = directory, parameters, seeds, last
        self._over: dict[int, Trial] = {}  # trials that have ended; they are read once

    def read(self) -> list[Trial]:
        """Returns the trials, by number."""
        # Other directories, such as a copy named 001_old, are the user's own.
        paths = (path for path in self._directory.glob("[0-9]*") if os.path.lexists(path / TRIAL))
        places = (PLACE.fullmatch(path.name) for path in paths)
        numbers = {int(place[1]) for place in places if place}
        trials = [self._over.get(number) or self._read_one(number) for number in sorted(numbers)]
        self._over = {trial.number: trial for trial in trials if trial.state != "running"}
        return trials

    def forget(self, number: int) -> None:
        """Makes the next `read` read a trial again that has ended."""
        self._over.pop(number, None)

    def write(self, number: int, bindings: Mapping[str, str], seen: Sequence[int]) -> Trial:
        """Writes a new trial, or the rest of one whose writer was killed; returns it."""
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
        runs = tuple(Run.read(directory, seed, self._last) for directory, seed in places)
        return Trial(number, content["bindings"], tuple(content["seen"]), runs)

    def _content(self, path: Path) -> dict[str, Any]:
        """Returns the content of a `trial.json`, which may come from another person.

        Raises:
          UsageError: it is not of this sweep.
        """
        content = contents.record(path.parent, path.name, {"bindings": dict, "seen": list})
        if content is None:
            raise UsageError(f"{path} was removed; move its directory away")
        bindings, names = content["bindings"], [one.name for one in self._parameters]
        has_texts = list(bindings) == names and all(isinstance(text, str) for text in bindings.values())
        has_texts = has_texts and all(one.has(bindings[one.name]) for one in self._parameters)
        if not has_texts or not all(type(number) is int for number in content["seen"]):
            raise UsageError(f"{path} is not of a trial of this sweep ({shown(bindings)}); move its directory away")
        return content

    def _places(self, number: int) -> list[tuple[Path, int]]:
        """Returns directory and seed of each run of a trial."""
        if len(self._seeds) == 1:
            return [(self._directory / f"{number:03d}", self._seeds[0])]
        return [(self._directory / f"{number:03d}-{k}", seed) for k, seed in enumerate(self._seeds)]


def is_over(directory: Path) -> bool:
    """Returns True if a run is done or was pruned."""
    return any((directory / name).is_file() for name in (DONE, PRUNED))


def mark_pruned(run: Run, clock: int) -> None:
    """Writes that a run was pruned after its evaluation at `clock`."""
    write_atomically(run.state.directory / PRUNED, json.dumps({"clock": clock}) + "\n")
