"""Checkpoints that survive killed processes, full disks and flipped bits; loading executes no code.

A file gets its final name only when it is complete and on disk. A directory has one writer at a time and any number of
readers, which change nothing. Steps are clock steps, see `training.clock`.
"""

import json
import operator
import os
import re
import uuid
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from absl import logging

import alfish
from alfish.errors import RunError, UsageError, argument
from alfish.nest import Nest
from alfish.runs import contents
from alfish.runs.checkpoint_file import (
    SCHEMA,
    BrokenCheckpoint,
    Header,
    check_loadable,
    is_short_text,
    other_content,
    read_file,
    read_header,
    write_file,
)
from alfish.runs.files import make_directory, write_atomically, writing

RUN_FILE = "run_id"
CODE_FILE = "code.zip"  # name of the archive of the run's source code, see `runs.code`
SUPERSEDED = ".superseded"
# Number of superseded files to keep; the files with the most steps are kept.
NUM_SUPERSEDED = 2
MAX_NOTE_SIZE = 4096  # maximum bytes of best.json

_NAME = re.compile(r"checkpoint-(\d{12,})\.pt")


class Origin(NamedTuple):
    """Origin of a checkpoint.

    Attributes:
      run: id of the run, see `run_id`; None means unknown.
      config: hash of the run's configuration without its budget; None means unknown.
    """

    run: str | None = None
    config: str | None = None


UNKNOWN = Origin()


class Checkpoints:
    """Directory of checkpoints; files are named by their clock steps.

    The directory keeps the newest `keep_last` checkpoints, the best checkpoint, and milestones: the first checkpoint at
    or after each positive multiple of `keep_period`. It also keeps the two superseded checkpoints with the most steps
    (see `save`).

    The checksum is at the end of the file instead of in a second file: two files cannot be renamed atomically, and a
    copied checkpoint keeps its checksum. The zip format permits text at the end, so `torch.load` can read the files.

    Args:
      directory: directory of the checkpoints, created by the first `save`.
      keep_last: number of newest checkpoints to keep, at least 1.
      keep_period: number of clock steps between milestones; 0 means no milestones.
      origin: run and configuration to write into each file; files of other runs are refused.

    Attributes:
      directory, origin: values of the arguments.

    Raises:
      UsageError: if `keep_last` or `keep_period` is out of range.
    """

    def __init__(
        self,
        directory: str | os.PathLike,
        keep_last: int = 3,
        keep_period: int = 0,
        origin: Origin = UNKNOWN,
    ):
        self.directory, self.origin = Path(directory), origin
        self.keep(keep_last, keep_period)

    def keep(self, keep_last: int, keep_period: int = 0) -> None:
        """Changes the rules for keeping checkpoints; see the class.

        Raises:
          UsageError: if an argument is out of range.
        """
        if keep_last < 1 or keep_period < 0:
            raise UsageError(f"keep_last={keep_last} must be at least 1 and keep_period={keep_period} at least 0.")
        self._keep_last, self._keep_period = keep_last, keep_period

    def save(self, step: int, state: Nest, best: bool = False, keep: Iterable[int] = ()) -> Path:
        """Writes a checkpoint, and removes checkpoints that need not be kept; returns the file.

        If the run was continued from an earlier checkpoint, checkpoints after `step` may exist. They are renamed to
        `*.superseded`, so that the next resume continues from `step`.

        Args:
          step: clock steps of the run, at least 0.
          state: nest of dicts, lists and tuples of tensors, str, int, float, bool and None.
          best: whether this is the best checkpoint so far.
          keep: steps of checkpoints that this call must not remove.

        Raises:
          UsageError: a leaf has a type that loading would refuse; the message names the first such leaf.
          DiskError: if the disk fails; the earlier checkpoints are unchanged.
          UsageError: if the file's path is not a regular file.
        """
        step = operator.index(step)
        if step < 0:
            raise ValueError(f"A checkpoint's steps must be at least 0, got {step}.")
        check_loadable(state)
        path = self.path(step)
        make_directory(self.directory)
        with writing(path):
            self._remove_leftovers()
        write_file(path, Header(alfish.__version__, SCHEMA, *self.origin, step), state)
        with writing(path):
            self._supersede(step)
            if best:
                self.mark_best(step)
            self._prune(keep)
        return path

    def mark_best(self, step: int) -> None:
        """Marks the checkpoint at `step` as the best; it is kept until another checkpoint is marked."""
        self._check_exists(step)
        write_atomically(self._best_path, json.dumps({"steps": int(step)}) + "\n")

    def steps(self) -> list[int]:
        """Returns the steps of all complete checkpoints, ascending."""
        if not self.directory.is_dir():
            return []
        matches = (_NAME.fullmatch(entry.name) for entry in self.directory.iterdir())
        return sorted(int(match[1]) for match in matches if match)

    def load(
        self,
        which: str | int = "latest",
        into: Callable[[Any], Any] | None = None,
        config: str | None = None,
        mmap: bool = False,
        first: Collection[int] = (),
    ) -> tuple[int, Nest]:
        """Returns the steps and the state of one checkpoint, on the CPU.

        Args:
          which: name of the checkpoint: 'latest', 'best', or a number of steps. 'latest' is the newest readable
            checkpoint; unreadable checkpoints are skipped with a warning. 'best' and a number do not fall back to other
            checkpoints.
          into: function called with the state. If it raises an error other than UsageError or RunError, the content of
            the file is treated as invalid.
          config: hash of the configuration that the checkpoint must have; None means any.
          mmap: whether to map the file into memory, so that each tensor is read when it is used; useful if leaves are
            copied one by one.
          first: steps of checkpoints that 'latest' tries first.

        Raises:
          UsageError: if the checkpoint does not exist, cannot be read, or belongs to another run or configuration.
        """
        if which == "latest":
            return self._load_latest(into, config, mmap, first)
        if which == "best":
            step = self.best()
            if step is None:
                raise UsageError(f"No checkpoint in {self.directory} is marked as the best; load 'latest' instead.")
            if step not in self.steps():
                raise UsageError(
                    f"{self._best_path} names the checkpoint at {step} steps, which is missing; load 'latest' instead"
                )
        elif isinstance(which, str):
            raise UsageError(f"The checkpoint is {which!r}; it must be 'latest', 'best' or a number of steps.")
        else:
            step = operator.index(which)
        self._check_exists(step)
        try:
            return step, self._read(step, into, config, mmap)
        except BrokenCheckpoint as error:
            raise BrokenCheckpoint(f"{error}; load another of the checkpoints {self.steps()}, or 'latest'.") from error

    def header(self, step: int) -> Header:
        """Returns the header of the file at `step`, without reading the state or the checksum.

        Raises:
          UsageError: if the file cannot be read, or was not saved at `step`.
        """
        self._check_exists(step)
        return read_header(self.path(step), step)

    def _load_latest(
        self, into: Callable[[Any], Any] | None, config: str | None, mmap: bool, first: Collection[int]
    ) -> tuple[int, Nest]:
        steps = self.steps()
        if not steps:
            raise UsageError(f"There is no checkpoint in {self.directory}; check the path, or train first.")
        broken: list[BrokenCheckpoint] = []
        for step in sorted(steps, key=lambda step: (step in first, step), reverse=True):
            try:
                state = self._read(step, into, config, mmap)
            except BrokenCheckpoint as error:
                broken.append(error)
                continue
            for fault in broken:
                logging.warning("%s; FALLING BACK to %s.", fault, self.path(step).name)
            return step, state
        raise UsageError(
            f"None of the {len(steps)} checkpoints in {self.directory} is readable ({broken[0]}); restore the files "
            "from a copy, or move the directory away to start from scratch."
        )

    def _read(self, step: int, into: Callable[[Any], Any] | None, config: str | None, mmap: bool) -> Nest:
        path = self.path(step)
        header, state = read_file(path, step, mmap)
        if self.origin.run is not None and header.run not in (None, self.origin.run):
            raise UsageError(
                f"{path} is a checkpoint of another run ({header.run}, while this directory's run is "
                f"{self.origin.run}); move it away"
            )
        if config is not None and header.config not in (None, config):
            raise UsageError(
                f"{path} was saved with a configuration other than this run's; move it away, or continue from it with "
                f"{argument('on_config_change', 'new')}"
            )
        if into is not None:
            try:
                into(state)
            except UsageError as error:
                error.args = (f"{path}: {error}",)
                raise
            except (RunError, MemoryError, torch.OutOfMemoryError):
                raise
            # `load_state_dict` of the user's parts may raise any error if the content does not fit.
            except Exception as error:
                raise other_content(path, error) from error
        return state

    def _supersede(self, step: int) -> None:
        for later in self.steps():
            if later > step:
                path = self.path(later)
                os.replace(path, path.with_name(path.name + SUPERSEDED))
                logging.warning("%s is later than the %d steps of the run; renamed to *%s.", path, step, SUPERSEDED)

    def _prune(self, keep: Iterable[int]) -> None:
        steps = self.steps()
        kept = {*steps[-self._keep_last :], self.best(), *keep}
        if self._keep_period:
            # The first checkpoint of a period is never removed, so it stays the first of its period.
            first_of_period: dict[int, int] = {}
            for step in steps:
                first_of_period.setdefault(step // self._keep_period, step)
            kept.update(step for period, step in first_of_period.items() if period > 0)
        for step in steps:
            if step not in kept:
                self.path(step).unlink(missing_ok=True)
        for path in sorted(self.directory.glob(f"checkpoint-*.pt{SUPERSEDED}"))[:-NUM_SUPERSEDED]:
            path.unlink(missing_ok=True)

    def _remove_leftovers(self) -> None:
        """Removes temporary files of killed writers. Readers must not call it: they could remove a file in use."""
        for path in self.directory.glob(".*.tmp"):
            path.unlink(missing_ok=True)

    def best(self) -> int | None:
        """Returns the steps of the checkpoint that is marked as the best; None if no checkpoint is marked."""
        try:
            content = contents.content_of(self._best_path, MAX_NOTE_SIZE)
            found = contents.parsed(self._best_path, content)
            return contents.checked_entries(self._best_path, found, {"steps": int})["steps"]
        except FileNotFoundError:
            return None
        except UsageError as error:  # a warning suffices, because the next best checkpoint replaces the file
            logging.warning("%s: no checkpoint is treated as the best", error)
            return None

    def _check_exists(self, step: int) -> None:
        steps = self.steps()
        if step not in steps:
            available = f"there are {steps}" if steps else "there is none"
            raise UsageError(f"There is no checkpoint at {step} steps in {self.directory}; {available}.")

    def path(self, step: int) -> Path:
        """Returns the file of the checkpoint at `step`, which need not exist."""
        return self.directory / f"checkpoint-{step:012d}.pt"

    @property
    def _best_path(self) -> Path:
        return self.directory / "best.json"


def run_id(root_dir: str | os.PathLike) -> str | None:
    """Returns the id of the run in a directory; None if the run has no id.

    Raises:
      UsageError: the file of the id cannot be read.
    """
    found = (contents.text(Path(root_dir), RUN_FILE) or "").strip()
    if not is_short_text(found):
        raise UsageError(
            f"{Path(root_dir) / RUN_FILE} does not hold the id of a run; remove it, then the id is taken from the "
            "checkpoints"
        )
    return found or None


def checkpoints_of(root_dir: str | os.PathLike, name: str = "checkpoints") -> Checkpoints:
    """Returns the checkpoints of a run, or of its replay if `name` is 'replay'; refuses files of other runs.

    Raises:
      UsageError: the file of the run's id cannot be read.
    """
    return Checkpoints(Path(root_dir) / name, origin=Origin(run_id(root_dir)))


def new_run_id() -> str:
    """Returns a random id, without using a seeded generator."""
    return uuid.uuid4().hex
