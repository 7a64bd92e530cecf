"""A run's directory: its lock, log, configuration, identity and checkpoints."""

import contextlib
import json
import os
import shutil
import traceback
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from absl import logging

from alfish.errors import RunError, UsageError
from alfish.errors.user_code import CodeError
from alfish.nest import Nest
from alfish.parameters.description import CONFIG_FILE, as_gin
from alfish.processes import replicas
from alfish.runs import contents, files, trust
from alfish.runs.checkpoint_file import BrokenCheckpoint
from alfish.runs.checkpoints import CODE_FILE, RUN_FILE, SUPERSEDED, Checkpoints, Origin, new_run_id, run_id
from alfish.runs.files import DiskError, write_atomically
from alfish.runs.provenance import with_entry
from alfish.runs.run_log import RunLog
from alfish.training.clock import Clock

# Files that a run writes into its directory, in addition to its configuration.
FILES = ("metrics.csv", "log.txt", "provenance.json", CODE_FILE, RUN_FILE, "done")
DIRECTORIES = ("checkpoints", "replay", "eval", "tensorboard")


class RunDirectory:
    """The files of one run.

    Args:
      path: path of the directory; `open` creates it.
      arguments: arguments of the trainer by name; they are the configuration of a trainer that was built in Python.

    Attributes:
      path: the constructor's argument.
      is_open: whether this process writes in the directory, after `open`.
      is_whole: whether the directory is in place; False after it was deleted or moved while open.
      checkpoints: checkpoints of the state of the run, without the rows of replay.
      replay_checkpoints: checkpoints of the rows of replay.
      config: texts to save with the run, by file name; the command line puts the gin configuration here.
      config_hash: hash of the configuration without its budget; None means unknown. A checkpoint with a different
        configuration is refused, unless `accepts_config_change` is set.
    """

    def __init__(self, path: str | Path, arguments: Mapping[str, Any]):
        self.path = Path(path)
        origin = Origin(run_id(self.path))
        self.checkpoints = Checkpoints(self.path / "checkpoints", origin=origin)
        self.replay_checkpoints = Checkpoints(self.path / "replay", keep_last=2, origin=origin)
        self.config: dict[str, str] = {}
        self.config_hash: str | None = None
        self.accepts_config_change = False
        self._arguments = arguments
        self._described: dict[str, str] | None = None
        self._log = RunLog(self.path / "log.txt")
        self._unlock: Callable[[], Any] = lambda: None
        self._is_refused = False
        self._was_empty = False  # whether the directory was empty before `open`
        self._is_own = False  # whether `open` created the directory
        self._written: dict[str, str] = {}  # texts to write again if the directory was deleted, by name
        self._identity: tuple[int, int] | None = None
        self._is_taken = False  # whether another run uses the directory
        self.is_open, self.is_whole = False, True

    def open(self) -> None:
        """Creates and locks the directory, and starts its log.

        Raises:
          UsageError: another run writes in the directory, or a different kind of file is in its place.
        """
        self._is_own = not self.path.exists()
        self._lock()
        self._was_empty = not any(self.path.iterdir())
        files.check_places(self.path, (*FILES, *self.config), DIRECTORIES)
        self._log.open()
        weakref.finalize(self, self._log.close)
        self.is_open = True

    def close(self) -> None:
        """Stops the recording of warnings, and unlocks the directory."""
        self._log.close()
        if self._is_refused and self._was_empty and self.is_whole:
            self._remove_all()
        self._unlock()

    def _remove_all(self) -> None:
        """Removes the files that this process has written, and the directory if `open` has created it."""
        with contextlib.suppress(OSError):
            for name in (*FILES, CONFIG_FILE, *self.config):
                (self.path / name).unlink(missing_ok=True)
            for name in DIRECTORIES:
                shutil.rmtree(self.path / name, ignore_errors=True)
            if self._is_own:
                self.path.rmdir()

    def _lock(self) -> None:
        files.make_directory(self.path)
        unlock = files.lock(self.path, self)
        if unlock is None:
            raise UsageError(
                f"{self.path} is already used for training, by this program or another; choose another directory"
            )
        self._unlock()
        self._unlock, self._identity = unlock, _identity(self.path)

    def restore(self) -> None:
        """Rewrites and reports texts of the run that were deleted or moved while the directory is open.

        Raises:
          UsageError: another run now uses a directory at this path.
        """
        if not self.is_open:
            return
        is_gone = _identity(self.path) != self._identity
        missing = [name for name in self._written if is_gone or not os.path.lexists(self.path / name)]
        if is_gone:
            self.is_whole = False
            try:
                self._lock()
            except UsageError:
                self._log.close()
                self._log = RunLog(self.path / "log.txt")  # a log that is not open keeps its lines in memory
                self._is_taken = True
                raise
        for name in missing:
            write_atomically(self.path / name, self._written[name])
        if is_gone:
            logging.error(
                "%s WAS DELETED OR MOVED during training: its contents are missing unless you restore them; %s are "
                "written again, and so are all later results",
                self.path,
                ", ".join(missing) or "no files",
            )
        elif missing:
            logging.error(
                "%s of %s WAS DELETED OR MOVED during training and is written again",
                ", ".join(missing),
                self.path,
            )

    def _write(self, name: str, text: str) -> None:
        write_atomically(self.path / name, text)
        self._written[name] = text

    def log(self, text: str) -> str | None:
        """Writes a line to `log.txt`, once the directory is open.

        Returns:
          The line to print, with the error if writing failed; None if there is nothing to print.
        """
        try:
            self._log.write(text)
        except DiskError as error:  # the caller still prints the line
            return f"{text} [{error}]"
        return text

    def log_error(self, error: BaseException, is_first: bool) -> None:
        """Writes an error that ends the run to `log.txt`, as the sentence shown to the user or with its traceback.

        Args:
          error: error to log. After a UsageError in a new run, `close` removes the files of the run.
          is_first: whether the error came before the end of the first iteration.
        """
        self._is_refused = is_first and isinstance(error, UsageError)
        is_sentence = isinstance(error, (UsageError, RunError)) and not isinstance(error, CodeError)
        self._log.copy(f"{error}" if is_sentence else "".join(traceback.format_exception(error)).rstrip())

    def saved_config(self) -> dict[str, str]:
        """Returns `config`; for a trainer that was built in Python, a configuration that builds it again."""
        if not self.config and self._described is None:
            self._described = {CONFIG_FILE: as_gin(self._arguments)}
        return self.config or self._described or {}

    def write_config(self, provenance: Mapping[str, Any]) -> None:
        """Adds an entry to `provenance.json`, writes the configuration, and records it as trusted (`runs.trust`)."""
        self._write("provenance.json", with_entry(self.path, dict(provenance)))
        for name, text in self.saved_config().items():
            self._write(name, text)
        trust.record(self.saved_config().get(CONFIG_FILE, ""))

    def save(self, clock: int, state: Nest, rows: Nest | None, best: bool) -> Path:
        """Writes a checkpoint; returns its file.

        Args:
          clock: clock of the run, which names the file.
          state: state of the run without the replay rows.
          rows: state of the replay rows; None means that no rows are saved.
          best: whether the checkpoint has the best policy so far.
        """
        if self._is_taken:
            raise DiskError(f"another run now writes to {self.path}")
        if rows is not None:
            # Rows are written first. The newest checkpoint with rows keeps its rows until the new checkpoint is
            # complete.
            self.replay_checkpoints.save(clock, rows, keep=self.with_rows()[-1:])
        path = self.checkpoints.save(clock, state, best, keep=self.with_rows())
        # If the run has fewer learners than before, files of the removed learners were needed until this checkpoint.
        for directory in sorted(self.path.glob("ranks/rank-???"))[replicas.size() - 1 :]:
            superseded = directory.with_name(directory.name + SUPERSEDED)
            shutil.rmtree(superseded, ignore_errors=True)
            os.rename(directory, superseded)
        return path

    def with_rows(self) -> list[int]:
        """Returns the steps of the checkpoints that have replay rows, in ascending order."""
        rows = self.replay_checkpoints.steps()
        return [clock for clock in self.checkpoints.steps() if clock in rows]

    def load_newest(self, load: Callable[[Any], Any], needs_rows: bool) -> int | None:
        """Loads the newest checkpoint; returns the clock in its name, or None if there is no checkpoint.

        Args:
          load: function that is called with the state.
          needs_rows: whether checkpoints without replay rows are tried last.

        Raises:
          UsageError: the run is done but has no checkpoint; or as for `Checkpoints.load`.
        """
        run = run_id(self.path)
        self._set_origin(run)
        if not self.checkpoints.steps():
            if "checkpoint" in self._done():
                raise UsageError(
                    f"{self.path} is finished, but its checkpoints are missing; restore {self.checkpoints.directory} "
                    f"from a copy, or remove {self.path / 'done'} to train from the beginning and overwrite the "
                    "earlier results"
                )
            return None
        config = None if self.accepts_config_change else self.config_hash
        clock, _ = self.checkpoints.load("latest", load, config, first=self.with_rows() if needs_rows else ())
        self._set_origin(run or self.checkpoints.header(clock).run)
        return clock

    def load_rows(self, clock: int, load: Callable[[Any], Any]) -> str | None:
        """Loads the replay rows of a checkpoint; returns None, or the reason why rows are missing."""
        if clock not in self.replay_checkpoints.steps():
            return "was not saved"
        try:
            self.replay_checkpoints.load(clock, load, mmap=True)
        except BrokenCheckpoint as error:
            return f"is lost ({error})"
        return None

    def begin(self) -> None:
        """Writes the id of a new run, and removes the file `done`."""
        if run_id(self.path) is None:
            self._set_origin(self.checkpoints.origin.run or new_run_id())
        if self.checkpoints.origin.run is not None:
            self._write(RUN_FILE, f"{self.checkpoints.origin.run}\n")
        (self.path / "done").unlink(missing_ok=True)

    def mark_done(self, clock: Clock) -> None:
        """Writes the file `done`, which marks the run as finished."""
        content: dict[str, Any] = {
            "env_steps": clock.env_steps,
            "iterations": clock.iterations,
            "updates": clock.updates,
        }
        if clock.stop_reason is not None:
            content["reason"] = clock.stop_reason
        if steps := self.checkpoints.steps():
            content["checkpoint"] = steps[-1]
        write_atomically(self.path / "done", json.dumps(content) + "\n")

    def stop_reason(self) -> str | None:
        """Returns the reason in the file `done`; None if there is no such file, or the budget was spent."""
        return self._done().get("reason")

    def _done(self) -> dict[str, Any]:
        """Returns the content of the file `done`; empty if there is no such file."""
        try:
            return contents.record(self.path, "done", {"reason": str}, ["reason"]) or {}
        except UsageError as error:  # a file of another form does not mark a run as finished
            logging.warning("%s", error)
            return {}

    def _set_origin(self, run: str | None) -> None:
        self.checkpoints.origin = self.replay_checkpoints.origin = Origin(run, self.config_hash)


def _identity(path: Path) -> tuple[int, int] | None:
    """Returns an identifier of a directory that changes if the directory is replaced.

    Returns None if there is no directory.
    """
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino
