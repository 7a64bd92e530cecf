"""Sweeps: trials are proposed, their runs are started, watched and pruned, until all trials are over."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from alfish.formatting import counted, significant
from alfish.runs.stop_signals import StopSignals
from alfish.sweeps.base import gin_file
from alfish.sweeps.jobs import Ended, Jobs
from alfish.sweeps.run_state import Endings, mark_failed
from alfish.sweeps.samplers import MedianPruner, make_sampler
from alfish.sweeps.specification import Specification
from alfish.sweeps.table import write_csv
from alfish.sweeps.trials import Run, Trial, Trials, mark_pruned

PERIOD_SECONDS = 1.0  # between two looks at the evaluations of runs


class Sweep:
    """Runs a sweep. It keeps nothing that the directories do not have, so that it can be killed at any moment.

    Args:
      directory: of the sweep, with its specification and its configuration.
      specification: of the sweep.
      jobs: for the processes of its runs.
      signals: of this process; after the first one, `run` returns.
      log: receives a line for each event.
    """

    def __init__(
        self,
        directory: Path,
        specification: Specification,
        jobs: Jobs,
        signals: StopSignals,
        log: Callable[[str], None],
    ):
        self._directory, self._specification, self._jobs = directory, specification, jobs
        self._signals, self._log = signals, log
        self._sampler = make_sampler(specification.sampler, specification.parameters, specification.sampler_seed)
        self._pruner = MedianPruner() if specification.prune else None
        self._trials = trials_of(directory, specification)
        self._endings = Endings()
        self._reported: set[int] = set()  # trials whose end was logged

    def run(self) -> None:
        """Runs the sweep to its end, or until a signal is received. The caller closes the jobs."""
        trials = self._look()
        self._reported = {trial.number for trial in trials if trial.state != "running"}
        if self._reported:
            self._log(f"{counted(len(self._reported), 'trial')} of {self._specification.trials} are over already")
        while self._signals.number is None:
            self._start_due(trials)
            if not self._jobs.running:
                return
            ended: list[Ended] = []
            while not ended and self._signals.number is None:
                ended = self._jobs.wait(PERIOD_SECONDS)
                for one in ended:
                    self._settle(one)
                trials = self._look()
                self._report(trials)

    def _look(self) -> list[Trial]:
        """Returns the trials, after those that are to be pruned were pruned."""
        trials = self._trials.read()
        return self._trials.read() if self._pruner is not None and self._prune(trials) else trials

    def _report(self, trials: Sequence[Trial]) -> None:
        """Logs which trials have ended since the last call, and writes the table."""
        ended = [trial for trial in trials if trial.state != "running" and trial.number not in self._reported]
        for trial in ended:
            self._reported.add(trial.number)
            self._log(_ending(trial))
        if ended:
            write_csv(self._directory, self._specification, trials)

    def _start_due(self, trials: list[Trial]) -> None:
        """Starts runs until all jobs are taken, or nothing is due."""
        due = self._due(trials)
        while len(self._jobs.running) < self._jobs.size and self._signals.number is None:
            found = next(due, None)
            if found is None:
                return
            trial, run = found
            bindings = [f"--gin_param={name}={value}" for name, value in trial.bindings.items()]
            seed = f"--gin_param=Trainer.seed={run.seed}"
            self._jobs.start(run.state.directory, [gin_file(self._directory), *bindings, seed])

    def _due(self, trials: list[Trial]) -> Iterator[tuple[Trial, Run]]:
        """Yields the runs that are to be started: first those of trials that exist, then those of new trials."""
        for trial in trials:
            if trial.state == "running":
                yield from ((trial, run) for run in trial.runs if self._is_due(run))
        known = {trial.number for trial in trials}
        for number in range(self._specification.trials):
            if number not in known:
                before = [trial for trial in trials if trial.number < number]
                bindings = self._sampler.propose(number, before)
                seen = [trial.number for trial in before if trial.state == "complete"]
                trial = self._trials.write(number, bindings, seen)
                trials.append(trial)
                self._log(f"Trial {number} begins: {_settings(trial)}")
                yield from ((trial, run) for run in trial.runs)

    def _is_due(self, run: Run) -> bool:
        return not run.state.is_done and run.state.directory not in self._jobs.running

    def _settle(self, ended: Ended) -> None:
        """Marks a run as failed if its process shows that it cannot go on."""
        reason = self._endings.failure(ended)
        if reason is None and ended.status == 0 and not (ended.directory / "done").is_file():
            reason = "ended before its budget was spent"
        if reason is not None:
            mark_failed(ended.directory, reason)
        elif ended.status < 0:
            self._log(f"{ended.directory} was killed by signal {-ended.status}; it is continued")

    def _prune(self, trials: Sequence[Trial]) -> bool:
        """Stops the trials that are to be pruned; returns True if there was one.

        A trial that has completed since the last call is looked at, too, because its evaluations may have been faster
        than these looks.
        """
        assert self._pruner is not None
        found = False
        for trial in trials:
            if trial.state not in ("running", "complete") or trial.number in self._reported:
                continue
            for place, run in enumerate(trial.runs):
                if (clock := self._pruner.pruned_at(trial, place, trials)) is not None:
                    mark_pruned(run, clock)
                    self._trials.forget(trial.number)
                    for other in trial.runs:
                        self._jobs.stop(other.state.directory)
                    found = True
                    break
        return found


def trials_of(directory: Path, specification: Specification) -> Trials:
    """Returns the trials in the directory of a sweep."""
    return Trials(directory, specification.parameters, specification.seeds, specification.last)


def _settings(trial: Trial) -> str:
    return ", ".join(f"{name} = {value}" for name, value in trial.bindings.items())


def _ending(trial: Trial) -> str:
    if trial.failure is not None:
        return f"Trial {trial.number} failed: {trial.failure}"
    assert trial.value is not None
    words = (
        f"is complete: {significant(trial.value)}"
        if trial.state == "complete"
        else f"was pruned at {trial.steps:,} steps"
    )
    return f"Trial {trial.number} {words}"
