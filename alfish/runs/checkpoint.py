"""Checkpoints that survive a kill, a full disk and a flipped bit, and that never execute what they load.

A file appears under its final name only when it is whole and on the disk. A directory has one writer at a time and any
number of readers; reading changes nothing in it. Steps are those of the run's clock, see `Trainer.steps`.

A file is what `torch.save` writes of the state, then two lines that `torch.load` passes over:

    alfish checkpoint {"alfish": "0.2.0", "schema": 1, "run": "5f2c...", "config": "9a01...", "steps": 12345}
    alfish sha256 ...

The first is the `Header`, the second is the checksum of all bytes before it. Files of alfish before schema 1 have no
header; they load as before.
"""

import hashlib
import json
import operator
import os
import pickle
import re
import uuid
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from absl import logging
from torch import nn

import alfish
from alfish.errors import RunError, UsageError, first_line
from alfish.nest import Nest
from alfish.runs.files import make_directory, open_atomically, open_regular, write_atomically, writing

# Raised whenever an older alfish could not read what this one saves.
SCHEMA = 1
RUN_FILE = "run_id"
SUPERSEDED = ".superseded"
# Of the files that a rewound run has superseded, those with the most steps that are kept.
NUM_SUPERSEDED = 2

_CONTAINERS = (dict, OrderedDict, list, tuple)
_LEAVES = (torch.Tensor, nn.Parameter, str, int, float, bool, type(None))
_ALIKE = ((int, float), (list, tuple), (dict, OrderedDict), (torch.Tensor, nn.Parameter))  # each serves as the others
_NAME = re.compile(r"checkpoint-(\d{12,})\.pt")
_HEADER_START = b"\nalfish checkpoint "
_HEADER_SIZE = 4096  # bytes at most
_TRAILER_START = b"\nalfish sha256 "
_TRAILER_SIZE = len(_TRAILER_START) + 64 + 1


class Origin(NamedTuple):
    """Where a checkpoint comes from.

    Attributes:
      run: the id of the run, see `run_id`; None: not known.
      config: hash of the run's configuration without its budget; None: not known.
    """

    run: str | None = None
    config: str | None = None


UNKNOWN = Origin()


class Header(NamedTuple):
    """What a file says of itself.

    Attributes:
      alfish: the version that wrote it; '' before schema 1.
      schema: of the state.
      run, config: see `Origin`.
      steps: those that the file was saved at.
    """

    alfish: str
    schema: int
    run: str | None
    config: str | None
    steps: int


class Checkpoints:
    """A directory of checkpoints named for their steps.

    Kept are the newest `keep_last`, the best one, and milestones: the first checkpoint at or past each positive
    multiple of `keep_period`. Of those that were superseded (see `save`), the two with the most steps are kept.

    The checksum is a trailer of the file itself and not a file beside it: two files cannot be renamed as one, so
    a kill between them would condemn a good checkpoint; and a copied checkpoint takes its checksum along. The
    zip format tolerates the trailer: plain `torch.load` reads these files too.

    Args:
      directory: made by the first `save`.
      keep_last: how many of the newest are kept, at least 1.
      keep_period: steps between milestones; 0 keeps none.
      origin: written into each file; a file of another run is refused.

    Attributes:
      directory, origin: the arguments.

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
        """Changes which checkpoints are kept; see the class.

        Raises:
          UsageError: if an argument is out of range.
        """
        if keep_last < 1 or keep_period < 0:
            raise UsageError(f"keep_last={keep_last} must be at least 1 and keep_period={keep_period} at least 0.")
        self._keep_last, self._keep_period = keep_last, keep_period

    def save(self, step: int, state: Nest, best: bool = False, keep: Iterable[int] = ()) -> Path:
        """Writes `state` and prunes the others; returns the file.

        Checkpoints past `step` belong to a future that a rewound run has given up (or that broke): they are
        renamed `*.superseded`, so that the next resume continues from here; the newest of these are kept.

        Args:
          step: at least 0.
          state: dicts, lists and tuples of tensors, str, int, float, bool and None.
          best: whether this is the best one so far.
          keep: steps that are not pruned this time.

        Raises:
          TypeError: names the first leaf that could not be loaded again.
          DiskError: if the disk fails; the earlier checkpoints are as they were.
          UsageError: if something of another kind stands in the file's place.
        """
        step = operator.index(step)
        if step < 0:
            raise ValueError(f"A checkpoint's steps must be at least 0, got {step}.")
        _check_loadable(state)
        path = self._path(step)
        make_directory(self.directory)
        with writing(path):
            self._remove_leftovers()
        with open_atomically(path) as file:
            # Straight into the file: a replay may be half of the machine's memory.
            hashing = _HashingWriter(file)
            try:
                torch.save(state, hashing)  # type: ignore[arg-type]  # it needs no more than `write` and `flush`
            except RuntimeError as error:
                if isinstance(error.__context__, OSError):  # torch, closing its archive, hides why that is cut off
                    raise error.__context__ from None
                raise
            header = Header(alfish.__version__, SCHEMA, self.origin.run, self.origin.config, step)
            hashing.write(_HEADER_START + json.dumps(header._asdict()).encode())
            file.write(_trailer(hashing.sha256))
        with writing(path):
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
        """The steps and the state of one checkpoint, on the CPU.

        Args:
          which: 'latest' (the newest that can be read; one that cannot is passed over with a warning), 'best', or its
            steps. The last two never fall back.
          into: called with the state. An exception of it, other than UsageError and RunError, means that the file does
            not hold what it should.
          config: hash of the configuration that the checkpoint must have been saved with; None: any.
          mmap: leave tensors in the file until they are read, for states that are copied leaf by leaf.
          first: steps that 'latest' tries before all others.

        Raises:
          UsageError: if there is no such checkpoint, if it cannot be read, or if it is of another run or configuration.
        """
        if which == "latest":
            return self._load_latest(into, config, mmap, first)
        if which == "best":
            step = self.best()
            if step is None:
                raise UsageError(f"No checkpoint in {self.directory} is marked as the best; load 'latest' instead.")
        elif isinstance(which, str):
            raise UsageError(f"Which checkpoint is {which!r}? Say 'latest', 'best' or its steps.")
        else:
            step = operator.index(which)
        self._check_exists(step)
        try:
            return step, self._read(step, into, config, mmap)
        except BrokenCheckpoint as error:
            raise BrokenCheckpoint(f"{error}; load another of the checkpoints {self.steps()}, or 'latest'.") from error

    def header(self, step: int) -> Header:
        """What the file at `step` says of itself, read without the state and without the checksum.

        Raises:
          UsageError: if the file cannot be read, or was not saved at `step`.
        """
        self._check_exists(step)
        path = self._path(step)
        try:
            with open_regular(path) as file:
                return _header(path, step, file)
        except OSError as error:
            raise BrokenCheckpoint(f"Checkpoint {path} cannot be read ({error})") from error

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
                logging.warning("%s; FALLING BACK to %s.", fault, self._path(step).name)
            return step, state
        raise UsageError(
            f"None of the {len(steps)} checkpoints in {self.directory} is readable ({broken[0]}); restore the files "
            "from a copy, or move the directory away to start from scratch."
        )

    def _read(self, step: int, into: Callable[[Any], Any] | None, config: str | None, mmap: bool) -> Nest:
        path = self._path(step)
        header, state = _read(path, step, mmap)
        if self.origin.run is not None and header.run not in (None, self.origin.run):
            raise UsageError(
                f"{path} is a checkpoint of another run ({header.run}, and this directory's run is {self.origin.run}); "
                "move it away"
            )
        if config is not None and header.config not in (None, config):
            raise UsageError(
                f"{path} was saved with another configuration than this run's; move it away, or go on from it with "
                "--on_config_change=new"
            )
        if into is not None:
            try:
                into(state)
            except (UsageError, RunError, MemoryError, torch.OutOfMemoryError):
                raise
            except Exception as error:
                raise _other_content(path, error) from error
        return state

    def _supersede(self, step: int) -> None:
        for later in self.steps():
            if later > step:
                path = self._path(later)
                os.replace(path, path.with_name(path.name + SUPERSEDED))
                logging.warning("%s is ahead of %d steps: renamed to *%s.", path, step, SUPERSEDED)

    def _prune(self, keep: Iterable[int]) -> None:
        steps = self.steps()
        kept = {*steps[-self._keep_last :], self.best(), *keep}
        if self._keep_period:
            # The first of a period is always kept, so it stays the first, whatever is pruned around it.
            first_of_period: dict[int, int] = {}
            for step in steps:
                first_of_period.setdefault(step // self._keep_period, step)
            kept.update(step for period, step in first_of_period.items() if period > 0)
        for step in steps:
            if step not in kept:
                self._path(step).unlink(missing_ok=True)
        for path in sorted(self.directory.glob(f"checkpoint-*.pt{SUPERSEDED}"))[:-NUM_SUPERSEDED]:
            path.unlink(missing_ok=True)

    def _remove_leftovers(self) -> None:
        """Removes what killed writers left. Here, by the only writer: a reader could hit a file in the making."""
        for path in self.directory.glob(".*.tmp"):
            path.unlink(missing_ok=True)

    def best(self) -> int | None:
        """The steps of the checkpoint marked as the best one; None where none is."""
        try:
            with open_regular(self._best_path) as file:
                return int(json.loads(file.read(_HEADER_SIZE))["steps"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            # Not worth the run, which is about to write the next one.
            logging.warning("%s is not readable (%s): no checkpoint counts as the best.", self._best_path, error)
            return None

    def _check_exists(self, step: int) -> None:
        steps = self.steps()
        if step not in steps:
            available = f"there are {steps}" if steps else "there is none"
            raise UsageError(f"There is no checkpoint at {step} steps in {self.directory}; {available}.")

    def _path(self, step: int) -> Path:
        return self.directory / f"checkpoint-{step:012d}.pt"

    @property
    def _best_path(self) -> Path:
        return self.directory / "best.json"


def run_id(root_dir: str | os.PathLike) -> str | None:
    """The id of the run in a directory; None where the run has none yet, or was made before there were ids.

    Raises:
      UsageError: the file of the id cannot be read.
    """
    path = Path(root_dir) / RUN_FILE
    try:
        with open_regular(path) as file:
            return file.read(_HEADER_SIZE).decode().strip() or None
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{path}, which holds the run's id, cannot be read ({error}); remove it, and the id is taken from the "
            "checkpoints"
        ) from error


def new_run_id() -> str:
    """A random id, which is not drawn from a seeded generator."""
    return uuid.uuid4().hex


def check_like(state: Any, example: Any, path: str = "") -> None:
    """Checks the kinds of plain values and containers, of which loading alone would not tell.

    Args:
      state: as it was loaded.
      example: what is saved here now. An entry that only one of the two has is left to who loads it, and None, on
        either side, stands for anything.
      path: of the entry, for the message.

    Raises:
      ValueError: names the first entry of another kind.
    """
    if state is None or example is None:
        return
    if isinstance(example, dict) and isinstance(state, dict):
        for key in example.keys() & state.keys():
            check_like(state[key], example[key], f"{path}.{key}" if path else str(key))
        return
    # Types are compared exactly, because a bool is an int too.
    alike = next((kinds for kinds in _ALIKE if type(example) in kinds), (type(example),))
    if type(state) not in alike:
        raise ValueError(f"{path} is a {type(state).__name__}, not a {type(example).__name__}")


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


def _read(path: Path, step: int, mmap: bool) -> tuple[Header, Nest]:
    """The header and the state of one file.

    The checksum is no signature: a forged file is left to `weights_only`, which executes nothing. What a forged file
    could make torch allocate is compared with its size.
    """
    try:
        with open_regular(path) as file:
            _check_trailer(path, file)
            header = _header(path, step, file)
            size = os.fstat(file.fileno()).st_size
            with zipfile.ZipFile(file) as archive:
                records = archive.infolist()
            if any(record.compress_type != zipfile.ZIP_STORED for record in records):
                raise ValueError("it is compressed")
            if sum(record.file_size for record in records) > size:
                raise ValueError("its parts are larger than the file")
            file.seek(0)
            # torch maps only files that it opens itself.
            state = torch.load(path if mmap else file, map_location="cpu", mmap=mmap, weights_only=True)
            _check_sizes(state, size)
            return header, state
    except OSError as error:
        raise BrokenCheckpoint(f"Checkpoint {path} cannot be read ({error})") from error
    except pickle.UnpicklingError as error:
        raise BrokenCheckpoint(f"Checkpoint {path} is refused: it holds more than tensors and plain values") from error
    except (UsageError, MemoryError):
        raise
    except Exception as error:
        raise _other_content(path, error) from error


def _header(path: Path, step: int, file: BinaryIO) -> Header:
    """The header, which stands before the checksum."""
    end = max(0, os.fstat(file.fileno()).st_size - _TRAILER_SIZE)
    file.seek(max(0, end - _HEADER_SIZE))
    tail = file.read(min(end, _HEADER_SIZE))
    start = tail.rfind(_HEADER_START)
    if start < 0:
        return Header("", 0, None, None, step)
    try:
        fields = json.loads(tail[start + len(_HEADER_START) :])
        version, schema = fields["alfish"], fields["schema"]
        if not isinstance(version, str) or type(schema) is not int:
            raise ValueError(f"alfish {version!r} of schema {schema!r}")
        for words in (version, fields.get("run"), fields.get("config")):
            if words is not None and not (isinstance(words, str) and words.isprintable() and len(words) <= 100):
                raise ValueError("what it says of itself is no short text")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise BrokenCheckpoint(f"Checkpoint {path} has a damaged header ({first_line(error)})") from error
    if schema > SCHEMA:
        raise BrokenCheckpoint(
            f"Checkpoint {path} was written by alfish {version}, which this one ({alfish.__version__}) cannot read"
        )
    header = Header(version, schema, fields.get("run"), fields.get("config"), fields.get("steps"))
    if header.steps != step:
        raise BrokenCheckpoint(f"Checkpoint {path} was saved at {header.steps} steps and has been renamed")
    return header


def _other_content(path: Path, error: Exception) -> "BrokenCheckpoint":
    """What to raise where a file with a good checksum does not hold what a checkpoint does."""
    logging.debug("Of %s:", path, exc_info=error)
    reason = f"{first_line(error)} is missing" if isinstance(error, KeyError) else first_line(error)
    return BrokenCheckpoint(f"Checkpoint {path} does not hold what this alfish saves ({reason})")


def _check_sizes(state: Nest, num_bytes: int) -> None:
    """Raises ValueError where a file of `num_bytes` declares more leaves or larger tensors than it can hold."""
    waiting, count = [state], 0
    while waiting:
        one = waiting.pop()
        count += 1
        if count > num_bytes:  # containers may share their parts
            raise ValueError(f"it declares more than {count} entries")
        if isinstance(one, torch.Tensor):
            if one.nbytes > num_bytes:
                raise ValueError(f"it declares a tensor of {one.nbytes} bytes")
        elif isinstance(one, dict):
            waiting += one.values()
        elif isinstance(one, (list, tuple)):
            waiting += one


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
