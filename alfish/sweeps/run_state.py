"""State of a run, as its directory shows it to other processes."""

import json
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
from alfish.sweeps.jobs import OUTPUT, Ended
from alfish.training.evaluations.evaluation import mean

DONE = "done"  # a file in a run's directory: its budget is spent, or a listener has stopped it
FAILED = "failed"  # a file in a run's directory: why the run cannot go on. Without the file it is tried again.
INTERRUPTED = tuple(map(exit_status, SIGNALS))  # exit statuses of a run that the same command continues
# Processes of a run that may be killed, one after another, without a new checkpoint.
MAX_DEATHS = 5


class RunState(NamedTuple):
    """State of a run.

    Attributes:
      directory: of the run.
      is_done: True if it has the file `done`.
      failure: why it failed; None: it did not.
      checkpoint: clock of the newest checkpoint; None: there is none.
      evaluations: returns of the episodes of each evaluation, by clock, ascending.
    """

    directory: Path
    is_done: bool
    failure: str | None
    checkpoint: int | None
    evaluations: Mapping[int, tuple[float, ...]]

    @classmethod
    def read(cls, directory: Path) -> "RunState":
        """Reads the directory of a run, which need not exist."""
        is_done = (directory / DONE).is_file()  # first: a run that is done writes nothing more
        failed = contents.record(directory, FAILED, {"reason": str}) or {}
        checkpoints = Checkpoints(directory / "checkpoints").steps()
        return cls(
            directory,
            is_done,
            failed.get("reason"),
            checkpoints[-1] if checkpoints else None,
            read_evaluations(directory),
        )

    @property
    def means(self) -> dict[int, float]:
        """Mean return of each evaluation, by clock, ascending."""
        return {clock: mean(returns) for clock, returns in self.evaluations.items()}


def mean_of_means(evaluations: Collection[Collection[float]]) -> float | None:
    """Returns the mean of the mean returns of evaluations; None: there is none."""
    return mean([mean(returns) for returns in evaluations]) if evaluations else None


def mark_failed(directory: Path, reason: str) -> None:
    """Writes why a run cannot go on; while the file is there, the run is not continued."""
    write_atomically(directory / FAILED, json.dumps({"reason": reason}) + "\n")


class Endings:
    """Tells a run that is to be continued from one that has failed, when its process has ended."""

    def __init__(self) -> None:
        self._deaths: dict[Path, tuple[int | None, int]] = {}  # by run: newest checkpoint, deaths since it was written

    def failure(self, ended: Ended) -> str | None:
        """Returns why a run has failed; None: it is done, or the same command continues it."""
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
        return f"was killed by {signal.Signals(-status).name} {deaths} times without a new checkpoint in between"


def _last_words(directory: Path, status: int) -> str:
    """Returns the sentence with which `alfish train` ended, with the last line of a cause, or that of a traceback."""
    lines = [line for line in contents.last_text(directory, OUTPUT).splitlines() if line.strip()]
    said = [line.removeprefix("alfish train: ") for line in lines if line.startswith("alfish train: ")]
    words = (said or lines or [f"exit status {status}"])[-1].strip()
    return printable(f"{words} {lines[-1].strip()}" if words.endswith(":") and lines[-1] != words else words)
