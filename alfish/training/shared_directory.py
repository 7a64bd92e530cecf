"""Run directories of several learners. Each learner saves its own state; all continue from the same checkpoint.

The first learner writes the run's directory as if it were the only learner. Learner r saves its environments, random
state, log and replay rows in `ranks/rank-00r`, in files of the same form. The files of learner r also contain extra
states of the algorithm's modules, such as returns by environment. Networks and optimizers are only in the first
learner's checkpoint.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from absl import logging

from alfish.errors import UsageError
from alfish.nest import Nest
from alfish.processes import replicas
from alfish.runs.checkpoint_file import BrokenCheckpoint
from alfish.runs.checkpoints import Checkpoints, run_id
from alfish.training.clock import Clock
from alfish.training.run_directory import RunDirectory

# Entries of a trainer's state that are the same in all learners.
COMMON = ("algorithm", "learner", "config")


def own_directory(path: str | Path, arguments: Mapping[str, Any]) -> RunDirectory:
    """Returns the run directory of this process; see `RunDirectory` for the arguments."""
    return SharedRunDirectory(path, arguments) if replicas.is_joined() else RunDirectory(path, arguments)


class SharedRunDirectory(RunDirectory):
    """Files of one learner among several; see `RunDirectory` for the arguments."""

    def __init__(self, path: str | Path, arguments: Mapping[str, Any]):
        super().__init__(replicas.own_directory(path), arguments)
        self._root = Path(path)
        self._first = self.checkpoints if replicas.rank() == 0 else Checkpoints(self._root / "checkpoints")

    def log(self, text: str) -> str | None:
        line = super().log(text)
        return line if replicas.rank() == 0 else None

    def write_config(self, provenance: Mapping[str, Any]) -> None:
        if replicas.rank() == 0:
            super().write_config({**provenance, "num_learners": replicas.size()})

    def save(self, clock: int, state: Nest, rows: Nest | None, best: bool) -> Path:
        if replicas.rank():
            extra = {name: entry for name, entry in state["algorithm"].items() if name.endswith("_extra_state")}
            state = {name: entry for name, entry in state.items() if name not in COMMON} | {"extra": extra}
        return super().save(clock, state, rows, best)

    def with_rows(self) -> list[int]:
        """Returns the steps of the checkpoints for which this learner has all its files, in ascending order.

        All learners continue from the same checkpoint, so the first learner returns only checkpoints that learner 1 has
        saved too; other learners are at most one iteration behind.
        """
        if replicas.rank():
            # The newest checkpoint is kept while this learner saves the next one, which others may not have yet.
            return self.checkpoints.steps()[-1:]
        rows, steps = self.replay_checkpoints.steps(), self.checkpoints.steps()
        if replicas.size() > 1:
            there = set(Checkpoints(self._root / "ranks" / "rank-001" / "checkpoints").steps())
            steps = [clock for clock in steps if clock in there]
        return [clock for clock in steps if clock in rows] if rows else steps

    def load_newest(self, load: Callable[[Any], Any], needs_rows: bool) -> int | None:
        """Loads the newest checkpoint that all learners can load.

        Raises:
          UsageError: there are checkpoints, but none that all learners can load.
        """
        run = replicas.of_first(run_id(self._root) or "") or None
        self._set_origin(run)
        untried = self._candidates()
        broken: BrokenCheckpoint | None = None
        while (clock := int(replicas.gather(next(untried, -1))[0][0])) >= 0:
            broken = self._load(clock, load)
            if not any(failed for (failed,) in replicas.gather(broken is not None)):
                self._set_origin(run or self._first.header(clock).run)
                return clock
            logging.warning(
                "%s; FALLING BACK to an older checkpoint.", broken or "Another learner cannot read its checkpoint"
            )
        if broken is not None or self._first.steps():
            raise UsageError(
                f"None of the {len(self._first.steps())} checkpoints in {self._root} is readable for all learners "
                f"({broken or 'another learner reports the reason'}); restore the files from a copy, or move the "
                "directory away to start from scratch."
            )
        return None

    def load_rows(self, clock: int, load: Callable[[Any], Any]) -> str | None:
        loss = super().load_rows(clock, load)
        if any(lost for (lost,) in replicas.gather(loss is not None)):
            return loss or "is lost by another learner"
        return None

    def begin(self) -> None:
        """Begins the run in its directory, and gives all learners the id of the run."""
        if replicas.rank() == 0:
            super().begin()
        self._set_origin(replicas.of_first(self.checkpoints.origin.run or ""))

    def mark_done(self, clock: Clock) -> None:
        if replicas.rank() == 0:
            super().mark_done(clock)

    def stop_reason(self) -> str | None:
        return replicas.of_first(super().stop_reason() or "") or None

    def _candidates(self) -> Iterator[int]:
        """Yields the checkpoints in the order in which they are tried, which the first learner determines."""
        first = self.with_rows()
        return iter(sorted(self._first.steps(), key=lambda clock: (clock in first, clock), reverse=True))

    def _load(self, clock: int, load: Callable[[Any], Any]) -> BrokenCheckpoint | None:
        """Calls `load` with the state of a checkpoint; returns the error if a file of the checkpoint cannot be read."""
        config = None if self.accepts_config_change else self.config_hash

        def load_own(state: dict[str, Any]) -> None:
            if replicas.rank() and state["counters"].get("num_learners", 1) == replicas.size():
                if clock not in self.checkpoints.steps():
                    raise BrokenCheckpoint(f"{self.checkpoints.directory} has no checkpoint at {clock:,} steps")
                own = self.checkpoints.load(clock, None, config)[1]
                extra = own.pop("extra", {})  # older versions did not save it
                state = state | own | {"algorithm": state["algorithm"] | extra}
            load(state)

        try:
            self._first.load(clock, load_own, config)
        except BrokenCheckpoint as error:
            return error
        return None

    def _set_origin(self, run: str | None) -> None:
        super()._set_origin(run)
        self._first.origin = self.checkpoints.origin
