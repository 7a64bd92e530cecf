"""Format, writing and reading of checkpoint files. Reading executes no code from the file.

A file contains the output of `torch.save`, then two lines that `torch.load` skips:

    alfish checkpoint {"alfish": "0.2.0", "schema": 1, "run": "5f2c...", "config": "9a01...", "steps": 12345}
    alfish sha256 ...

The first line is the `Header`; the second is the checksum of all bytes before that line. Files from before schema 1
have no header, and can still be loaded.
"""

import hashlib
import json
import os
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from absl import logging
from torch import nn

import alfish
from alfish.errors import UsageError, first_line
from alfish.nest import Nest
from alfish.runs.files import open_atomically, open_regular

# Version of the state's structure, increased when older versions of alfish cannot read new files.
SCHEMA = 1

_CONTAINERS = (dict, OrderedDict, list, tuple)
_LEAVES = (torch.Tensor, nn.Parameter, str, int, float, bool, type(None))
_HEADER_START = b"\nalfish checkpoint "
_HEADER_SIZE = 4096  # maximum number of bytes of the header
_TRAILER_START = b"\nalfish sha256 "
_TRAILER_SIZE = len(_TRAILER_START) + 64 + 1


class BrokenCheckpoint(UsageError):
    """Raised if the file of a checkpoint is damaged, or is not a checkpoint."""


class Header(NamedTuple):
    """Header of a checkpoint file.

    Attributes:
      alfish: version of alfish that wrote the file; '' before schema 1.
      schema: version of the state's structure.
      run, config: id of the run and hash of its configuration, see `Origin`.
      steps: clock steps at which the file was saved, see `training.clock`.
    """

    alfish: str
    schema: int
    run: str | None
    config: str | None
    steps: int


def write_file(path: Path, header: Header, state: Nest) -> None:
    """Writes a checkpoint atomically, see `runs.files`.

    Raises:
      DiskError: the disk fails.
      UsageError: a directory has the name of the file.
    """
    with open_atomically(path) as file:
        # The state is written directly to the file, because a replay buffer may fill half of the memory.
        hashing = _HashingWriter(file)
        try:
            torch.save(state, hashing)  # type: ignore[arg-type]  # torch.save uses only `write` and `flush`
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):  # torch hides a disk error when it closes its archive
                raise error.__context__ from None
            raise
        hashing.write(_HEADER_START + json.dumps(header._asdict()).encode())
        file.write(_trailer(hashing.sha256))


def read_header(path: Path, step: int) -> Header:
    """Returns the header of a file without reading the state or verifying the checksum.

    Raises:
      BrokenCheckpoint: the file cannot be read, or was not saved at `step`.
    """
    try:
        with open_regular(path) as file:
            return _header(path, step, file)
    except OSError as error:
        raise BrokenCheckpoint(f"Checkpoint {path} cannot be read ({error})") from error


def read_file(path: Path, step: int, mmap: bool) -> tuple[Header, Nest]:
    """Returns the header and the state of one file.

    The checksum detects damage, not forgery. A forged file cannot execute code, because of `weights_only`. It cannot
    fill the memory, because declared tensor sizes are compared with the size of the file.
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
        raise BrokenCheckpoint(
            f"Checkpoint {path} is refused: it contains objects other than tensors and plain values"
        ) from error
    except (UsageError, MemoryError):
        raise
    except Exception as error:  # zipfile and torch.load raise many kinds of errors for damaged content
        raise other_content(path, error) from error


class _HashingWriter:
    """Writes bytes to a file, and computes the checksum of all of them."""

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


def _header(path: Path, step: int, file: BinaryIO) -> Header:
    """Reads the header, the line before the checksum."""
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
            if words is not None and not is_short_text(words):
                raise ValueError("its version, run id or configuration hash is not a short text")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise BrokenCheckpoint(f"Checkpoint {path} has a damaged header ({first_line(error)})") from error
    if schema > SCHEMA:
        raise BrokenCheckpoint(
            f"Checkpoint {path} was written by a newer version of alfish ({version} with schema {schema}, while this "
            f"version, {alfish.__version__}, reads schema {SCHEMA}); update alfish"
        )
    header = Header(version, schema, fields.get("run"), fields.get("config"), fields.get("steps"))
    if header.steps != step:
        raise BrokenCheckpoint(f"Checkpoint {path} was saved at {header.steps} steps and has been renamed")
    return header


def is_short_text(value: Any) -> bool:
    """Returns whether a value is a printable string of at most 100 characters, such as a version or an id."""
    return isinstance(value, str) and value.isprintable() and len(value) <= 100


def other_content(path: Path, error: Exception) -> "BrokenCheckpoint":
    """Returns the error for a file with a correct checksum but invalid content."""
    logging.debug("Error while reading %s:", path, exc_info=error)
    reason = f"{first_line(error)} is missing" if isinstance(error, KeyError) else first_line(error)
    return BrokenCheckpoint(
        f"Checkpoint {path} does not have the contents that this version of alfish saves ({reason})"
    )


def _check_sizes(state: Nest, num_bytes: int) -> None:
    """Raises ValueError if a file of `num_bytes` declares more leaves or larger tensors than it can contain."""
    waiting, count = [state], 0
    while waiting:
        one = waiting.pop()
        count += 1
        if count > num_bytes:  # a small file can declare many entries by repeating one container
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
        raise BrokenCheckpoint(f"Checkpoint {path} is truncated or not a checkpoint: its checksum is missing")
    if trailer != _trailer(sha256):
        raise BrokenCheckpoint(f"Checkpoint {path} is corrupt: its checksum does not match")


def check_loadable(state: Nest, path: str = "") -> None:
    """Raises UsageError at the first leaf that `torch.load(weights_only=True)` would refuse.

    Types must match exactly. An instance of a subclass (a NamedTuple, an IntEnum, a numpy float64) is pickled with its
    class, which `weights_only` refuses.
    """
    if type(state) in _CONTAINERS:
        if isinstance(state, dict):
            for key, child in state.items():
                check_loadable(key, f"{path} (a key)")
                check_loadable(child, f"{path}.{key}" if path else str(key))
        else:
            for index, child in enumerate(state):
                check_loadable(child, f"{path}.{index}" if path else str(index))
    elif type(state) not in _LEAVES:
        kind = f"{type(state).__module__}.{type(state).__qualname__}"
        raise UsageError(
            f"The checkpoint's leaf '{path}' is a {kind}, which cannot be loaded without executing code; make it "
            "a tensor, str, int, float, bool or None, in dicts, lists and tuples"
        )
