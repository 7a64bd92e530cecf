"""State of a run, read from its directory by other processes."""

import json
import math
import signal
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from alfish.analysis.run_source import read_evaluations
from alfish.errors import printable
from alfish.runs import contents
from alfish.runs.checkpoints import Checkpoints
from alfish.runs.files import write_atomically
from alfish.runs.stop_signals import SIGNALS, exit_status
from alfish.sweeps.jobs import OUTPUT, JobEnded
from alfish.training.evaluations.evaluation import mean

DONE = "done"  # file in a run's directory: the budget is spent, or a listener has stopped the run
FAILED = "failed"  # file in a run's directory with the reason why the run cannot continue
INTERRUPTED = tuple(map(exit_status, SIGNALS))  # exit statuses of runs that can be continued
# Number of consecutive processes of a run, killed without saving a new checkpoint, after which the run has failed.
MAX_DEATHS = 5


class RunState(NamedTuple):
    """State of a run.

    Attributes:
      directory: directory of the run.
      is_done: whether the directory has the file `done`.
      failure: reason why the run failed; None if the run did not fail.
      checkpoint: clock of the newest checkpoint; None if there is no checkpoint.
      evaluations: values of each evaluation's episodes, by ascending clock; empty if no episode has the value.
    """

    directory: Path
    is_done: bool
    failure: str | None
    checkpoint: int | None
    evaluations: Mapping[int, tuple[float, ...]]

    @classmethod
    def read(cls, directory: Path, column: str = "return") -> "RunState":
        """Reads the directory of a run, which need not exist.

        Args:
          directory: directory of the run.
          column: column of the values in the tables of the evaluations.
        """
        is_done = (directory / DONE).is_file()  # read first, because a finished run writes nothing more
        failed = contents.record(directory, FAILED, {"reason": str}) or {}
        checkpoints = Checkpoints(directory / "checkpoints").steps()
        evaluations = read_evaluations(directory)
        if column != "return":
            found = read_evaluations(directory, column=column)
            evaluations = {clock: found.get(clock, ()) for clock in evaluations}
        newest = checkpoints[-1] if checkpoints else None
        return cls(directory, is_done, failed.get("reason"), newest, evaluations)

    @property
    def means(self) -> dict[int, float]:
        """Mean value of each evaluation that has values, by clock, ascending."""
        return {clock: mean(values) for clock, values in self.evaluations.items() if values}


def mean_of_means(evaluations: Collection[Collection[float]]) -> float | None:
    """Returns the mean of the mean values of evaluations; nan if one has no values, None without evaluations."""
    return mean([mean(values) if values else math.nan for values in evaluations]) if evaluations else None


def mark_failed(directory: Path, reason: str) -> None:
    """Writes the reason why a run cannot continue; while this file exists, the run is not continued."""
    write_atomically(directory / FAILED, json.dumps({"reason": reason}) + "\n")


class Endings:
    """Decides whether a run has failed or can be continued, after its process has ended."""

    def __init__(self) -> None:
        self._deaths: dict[Path, tuple[int | None, int]] = {}  # newest checkpoint, and deaths since then, by run

    def failure(self, ended: JobEnded) -> str | None:
        """Returns the reason why a run has failed; None if the run is done or can be continued."""
        directory, status = ended
        if status == 0 or status in INTERRUPTED:
            return None
        if status > 0:
            return _last_words(directory, status)
        checkpoint = RunState.read(directory).checkpoint
        before, deaths = self._deaths.get(directory, (checkpoint, 0))
        deaths = deaths + 1 if checkpoint == before else 1
        self._deaths[directory] = checkpoint, deaths
        if deaths < MAX_DEATHS:
            return None
        return f"was killed by {signal.Signals(-status).name} {deaths} times without saving a new checkpoint in between"


def _last_words(directory: Path, status: int) -> str:
    """Returns the last sentence that `alfish train` printed, or else the last line of its output."""
    lines = [line for line in contents.last_text(directory, OUTPUT).splitlines() if line.strip()]
    said = [line.removeprefix("alfish train: ") for line in lines if line.startswith("alfish train: ")]
    words = (said or lines or [f"exit status {status}"])[-1].strip()
    return printable(f"{words} {lines[-1].strip()}" if words.endswith(":") and lines[-1] != words else words)
