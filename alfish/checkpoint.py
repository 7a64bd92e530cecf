"""Checkpoints that survive a kill, a full disk and a flipped bit, and that never execute what they load.

A file appears under its final name only when it is whole and on the disk. A directory has one writer at a time and any
number of readers; reading changes nothing in it. Steps are those of the run's clock, see `Trainer.steps`.
"""

import hashlib
import json
import operator
import os
import pickle
import re
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

import torch
from absl import logging
from torch import nn

from alfish.errors import UsageError
from alfish.files import open_atomically, write_atomically
from alfish.nest import Nest

_CONTAINERS = (dict, OrderedDict, list, tuple)
_LEAVES = (torch.Tensor, nn.Parameter, str, int, float, bool, type(None))
_NAME = re.compile(r"checkpoint-(\d{12,})\.pt")
_TRAILER_START = b"\nalfish sha256 "
_TRAILER_SIZE = len(_TRAILER_START) + 64 + 1


class Checkpoints:
    """A directory of checkpoints named for their steps.

    Kept are the newest `keep_last`, the best one, and milestones: the first checkpoint at or past each positive
    multiple of `keep_period`.

    The checksum is a trailer of the file itself and not a file beside it: two files cannot be renamed as one, so
    a kill between them would condemn a good checkpoint; and a copied checkpoint takes its checksum along. The
    zip format tolerates the trailer: plain `torch.load` reads these files too.

    Args:
      directory: made by the first `save`.
      keep_last: how many of the newest are kept, at least 1.
      keep_period: steps between milestones; 0 keeps none.

    Raises:
      UsageError: if `keep_last` or `keep_period` is out of range.
    """

    def __init__(self, directory: str | os.PathLike, keep_last: int = 3, keep_period: int = 0):
        if keep_last < 1 or keep_period < 0:
            raise UsageError(f"keep_last={keep_last} must be at least 1 and keep_period={keep_period} at least 0.")
        self._directory = Path(directory)
        self._keep_last = keep_last
        self._keep_period = keep_period

    def save(self, step: int, state: Nest, best: bool = False, keep: Iterable[int] = ()) -> Path:
        """Writes `state` and prunes the others; returns the file.

        Checkpoints past `step` belong to a future that a rewound run has given up (or that broke): they are
        renamed `*.superseded`, so that the next resume continues from here.

        Args:
          step: at least 0.
          state: dicts, lists and tuples of tensors, str, int, float, bool and None.
          best: whether this is the best one so far.
          keep: steps that are not pruned this time.

        Raises:
          TypeError: names the first leaf that could not be loaded again.
          OSError: if the disk fails; the earlier checkpoints are as they were.
        """
        step = operator.index(step)
        if step < 0:
            raise ValueError(f"A checkpoint's steps must be at least 0, got {step}.")
        _check_loadable(state)
        self._directory.mkdir(parents=True, exist_ok=True)
        self._remove_leftovers()
        path = self._path(step)
        with open_atomically(path) as file:
            # Straight into the file: a replay may be half of the machine's memory.
            hashing = _HashingWriter(file)
            torch.save(state, hashing)  # type: ignore[arg-type]  # it needs no more than `write` and `flush`
            file.write(_trailer(hashing.sha256))
        self._supersede(step)
        if best:
            self.mark_best(step)
        self._prune(keep)
        return path

    def mark_best(self, step: int) -> None:
        """Remembers the checkpoint at `step` as the best one, to be kept until another is better."""
        self._check_exists(step)
        write_atomically(self._best_path, json.dumps({"steps": int(step)}) + "\n")

    def steps(self) -> list[int]:
        """Of the checkpoints, ascending; unfinished files are not among them."""
        if not self._directory.is_dir():
            return []
        matches = (_NAME.fullmatch(entry.name) for entry in self._directory.iterdir())
        return sorted(int(match[1]) for match in matches if match)

    def load(self, which: str | int = "latest", map_location: torch.device | str | None = "cpu") -> tuple[int, Nest]:
        """The steps and the state of one checkpoint.

        Args:
          which: 'latest' (the newest that is intact; a broken one is passed over with a warning), 'best', or its
            steps. The last two never fall back.
          map_location: as in `torch.load`.

        Raises:
          UsageError: if there is no such checkpoint, or if it is broken.
        """
        if which == "latest":
            return self._load_latest(map_location)
        if which == "best":
            step = self._best()
            if step is None:
                raise UsageError(f"No checkpoint in {self._directory} is marked as the best; load 'latest' instead.")
        elif isinstance(which, str):
            raise UsageError(f"Which checkpoint is {which!r}? Say 'latest', 'best' or its steps.")
        else:
            step = operator.index(which)
        self._check_exists(step)
        try:
            return step, _read(self._path(step), map_location)
        except BrokenCheckpoint as error:
            raise BrokenCheckpoint(f"{error}; load another of the checkpoints {self.steps()}, or 'latest'.") from error

    def _load_latest(self, map_location: torch.device | str | None) -> tuple[int, Nest]:
        steps = self.steps()
        if not steps:
            raise UsageError(f"There is no checkpoint in {self._directory}; check the path, or train first.")
        broken: list[BrokenCheckpoint] = []
        for step in reversed(steps):
            try:
                state = _read(self._path(step), map_location)
            except BrokenCheckpoint as error:
                broken.append(error)
                continue
            for fault in broken:
                logging.warning("%s; FALLING BACK to %s.", fault, self._path(step).name)
            return step, state
        raise UsageError(
            f"None of the {len(steps)} checkpoints in {self._directory} is readable ({broken[0]}); restore the files "
            "from a copy, or move the directory away to start from scratch."
        )

    def _supersede(self, step: int) -> None:
        for later in self.steps():
            if later > step:
                path = self._path(later)
                os.replace(path, path.with_name(path.name + ".superseded"))
                logging.warning("%s is ahead of %d steps: renamed to *.superseded.", path, step)

    def _prune(self, keep: Iterable[int]) -> None:
        steps = self.steps()
        kept = {*steps[-self._keep_last :], self._best(), *keep}
        if self._keep_period:
            # The first of a period is always kept, so it stays the first, whatever is pruned around it.
            first_of_period: dict[int, int] = {}
            for step in steps:
                first_of_period.setdefault(step // self._keep_period, step)
            kept.update(step for period, step in first_of_period.items() if period > 0)
        for step in steps:
            if step not in kept:
                self._path(step).unlink(missing_ok=True)

    def _remove_leftovers(self) -> None:
        """Removes what killed writers left. Here, by the only writer: a reader could hit a file in the making."""
        for path in self._directory.glob(".*.tmp"):
            path.unlink(missing_ok=True)

    def _best(self) -> int | None:
        try:
            return int(json.loads(self._best_path.read_text())["steps"])
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            # Not worth the run, which is about to write the next one.
            logging.warning("%s is not readable (%s): no checkpoint counts as the best.", self._best_path, error)
            return None

    def _check_exists(self, step: int) -> None:
        steps = self.steps()
        if step not in steps:
            available = f"there are {steps}" if steps else "there is none"
            raise UsageError(f"There is no checkpoint at {step} steps in {self._directory}; {available}.")

    def _path(self, step: int) -> Path:
        return self._directory / f"checkpoint-{step:012d}.pt"

    @property
    def _best_path(self) -> Path:
        return self._directory / "best.json"


def load_model(module: nn.Module, state_dict: dict[str, Any], name: str) -> None:
    """Loads `state_dict` into `module` in place, all of it or nothing.

    Args:
      module: whose parameters and buffers are overwritten.
      state_dict: of a module of the same architecture.
      name: of the module, for the message.

    Raises:
      UsageError: names the first entries that are missing, unexpected or of another shape.
    """
    here = module.state_dict()
    wrong = [f"missing {key}" for key in here if key not in state_dict]
    wrong += [f"unexpected {key}" for key in state_dict if key not in here]
    for key, value in here.items():
        there = state_dict.get(key)
        if isinstance(value, torch.Tensor) and isinstance(there, torch.Tensor) and value.shape != there.shape:
            wrong.append(f"{key} is {list(there.shape)} there and {list(value.shape)} here")
    if wrong:
        shown = "; ".join(wrong[:3]) + (f"; and {len(wrong) - 3} more" if len(wrong) > 3 else "")
        raise UsageError(
            f"The checkpoint does not fit {name} ({shown}): build it with the networks, observations and actions it "
            "was saved with, or start in an empty directory."
        )
    module.load_state_dict(state_dict)


class BrokenCheckpoint(UsageError):
    """A file under a checkpoint's name that cannot be one."""


class _HashingWriter:
    """Passes bytes on to a file, and knows the checksum of all of them."""

    def __init__(self, file: BinaryIO):
        self._file = file
        self.sha256 = hashlib.sha256()

    def write(self, content: bytes | memoryview) -> int:
        self.sha256.update(content)
        return self._file.write(content)

    def flush(self) -> None:
        self._file.flush()


def _trailer(sha256: Any) -> bytes:
    return _TRAILER_START + sha256.hexdigest().encode() + b"\n"


def _read(path: Path, map_location: torch.device | str | None) -> Nest:
    """The state in one file.

    Once the checksum holds the bytes are those that were written, so any other failure of `torch.load` (no such
    device, out of memory) is not the file's and is passed on: falling back would hide it. The checksum is no
    signature: a forged file is left to `weights_only`, which executes nothing.
    """
    try:
        with open(path, "rb") as file:
            _check_trailer(path, file)
            file.seek(0)
            return torch.load(file, map_location=map_location, weights_only=True)
    except OSError as error:
        raise BrokenCheckpoint(f"Checkpoint {path} cannot be read ({error})") from error
    except pickle.UnpicklingError as error:
        raise BrokenCheckpoint(f"Checkpoint {path} is refused: it holds more than tensors and plain values") from error


def _check_trailer(path: Path, file: BinaryIO) -> None:
    left = os.fstat(file.fileno()).st_size - _TRAILER_SIZE
    sha256 = hashlib.sha256()
    while left > 0 and (block := file.read(min(left, 1 << 20))):
        sha256.update(block)
        left -= len(block)
    trailer = file.read()
    if not trailer.startswith(_TRAILER_START):
        raise BrokenCheckpoint(f"Checkpoint {path} is truncated, or no checkpoint: its checksum is missing")
    if trailer != _trailer(sha256):
        raise BrokenCheckpoint(f"Checkpoint {path} is corrupt: its checksum does not match")


def _check_loadable(state: Nest, path: str = "") -> None:
    """Raises TypeError at the first leaf that `torch.load(weights_only=True)` would refuse.

    Types are compared exactly: a NamedTuple, an IntEnum or a numpy float (which is a float) pickles as its own class.
    """
    if type(state) in _CONTAINERS:
        if isinstance(state, dict):
            for key, child in state.items():
                _check_loadable(key, f"{path} (a key)")
                _check_loadable(child, f"{path}.{key}" if path else str(key))
        else:
            for index, child in enumerate(state):
                _check_loadable(child, f"{path}.{index}" if path else str(index))
    elif type(state) not in _LEAVES:
        kind = f"{type(state).__module__}.{type(state).__qualname__}"
        raise TypeError(
            f"The checkpoint's leaf '{path}' is a {kind}, which cannot be loaded without executing code; make it "
            "a tensor, str, int, float, bool or None, in dicts, lists and tuples."
        )
