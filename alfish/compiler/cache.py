"""The directory in which compiled graphs are kept from one run to the next.

It lies in the user's cache directory, with a subdirectory for each version of torch and each kind of processor. A
directory that the user set for torch (TORCHINDUCTOR_CACHE_DIR) is used as it is, and is never trimmed.
"""

import contextlib
import fcntl
import functools
import hashlib
import os
import platform
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from absl import logging

from alfish.errors import UsageError, first_line
from alfish.runs.processes import variable_set

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
GIVEN = os.environ.get(VARIABLE)  # by the user, before torch's compiler writes its own default there
LOCKS = "alfish-locks"
ROOM = 1 << 20  # bytes that must fit; more than a graph takes
LARGEST_BYTES = 1 << 30  # of the whole cache; a graph takes less than 1 MB


def directory() -> Path:
    """Returns the directory for this version of torch and this processor, which exists."""
    if GIVEN:
        try:
            Path(GIVEN).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"compiled graphs cannot be kept in {VARIABLE}={GIVEN} ({error.strerror}); set it to a directory that "
                "can be written, or unset it"
            ) from error
        return Path(GIVEN)
    return _own_directory(str(_root()))


def _root() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "alfish"


@functools.cache
def _own_directory(root: str) -> Path:
    path = Path(root, "graphs", versions())
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(bytes(ROOM))  # an empty file can be made on a full disk
        return path
    except OSError as error:
        own = Path(tempfile.gettempdir(), f"alfish-{os.getuid()}")
        own.mkdir(mode=0o700, exist_ok=True)
        if own.lstat().st_uid != os.getuid():  # whose code would be loaded
            raise UsageError(
                f"compiled graphs can be kept neither in {root} ({first_line(error)}) nor in {own}, which belongs to "
                "another user; set XDG_CACHE_HOME to a directory that can be written"
            ) from error
        path = own / versions()
        path.mkdir(exist_ok=True)
        logging.warning(
            "Compiled graphs are kept in %s, because the cache in %s cannot be written (%s); set XDG_CACHE_HOME to a "
            "directory that can",
            path,
            root,
            first_line(error),
        )
        return path


@functools.cache
def versions() -> str:
    """Returns a directory's name for the versions and the processor that compiled code depends on."""
    described = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    with contextlib.suppress(OSError):  # only Linux has this file
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        described += " ".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
    processor = hashlib.sha256(described.encode()).hexdigest()[:8]
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return f"torch-{torch.__version__}-python-{python}-{processor}"


def environment() -> dict[str, str]:
    """Returns the environment variables of another process that shall use the same cache."""
    own = {name: value for name, value in os.environ.items() if name != VARIABLE}
    return own | {VARIABLE: GIVEN} if GIVEN else own


@contextlib.contextmanager
def in_use() -> Iterator[Path]:
    """Makes torch's compiler use the directory within the context, in the whole process."""
    path = directory()
    with variable_set(VARIABLE, str(path)):
        yield path


@contextlib.contextmanager
def lock(name: str) -> Iterator[None]:
    """Waits until no other process holds the lock of this name; a process that ends releases its locks.

    A file system without locks grants all, so that two processes may make the same files.
    """
    path = directory() / LOCKS
    path.mkdir(parents=True, exist_ok=True)
    with open(path / name, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            logging.debug("%s cannot be locked: %s", path, error)
        yield


def trim(largest: int = LARGEST_BYTES) -> None:
    """Removes files until the cache is small enough, those first that were used the longest time ago.

    A process that misses a removed file makes it again. Directories of other versions and processors take part. Locks
    stay, because another process may hold them.
    """
    if GIVEN:
        return
    found = []
    for path in directory().parent.rglob("*"):
        with contextlib.suppress(OSError):  # another process has removed it
            if path.is_file() and path.parent.name != LOCKS:
                status = path.stat()
                found.append((max(status.st_mtime, status.st_atime), status.st_size, path))
    excess = sum(size for _, size, _ in found) - largest
    for _, size, path in sorted(found):
        if excess <= 0:
            return
        with contextlib.suppress(OSError):
            path.unlink()
            excess -= size
