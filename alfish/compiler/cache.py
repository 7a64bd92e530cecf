"""The directory that keeps compiled graphs for later runs.

The directory lies in the user's cache directory. It has a subdirectory for each version of torch and each type of
processor. If the user has set torch's variable TORCHINDUCTOR_CACHE_DIR, graphs are kept in that directory, which is
never trimmed.
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
from alfish.processes.inheritance import variable_set

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
GIVEN = os.environ.get(VARIABLE)  # the user's setting; torch's compiler may later set the variable to its default
LOCKS = "alfish-locks"
ROOM = 1 << 20  # required free space in bytes; enough for one graph
LARGEST_BYTES = 1 << 30  # maximum size of the whole cache in bytes; a graph takes less than 1 MB


def directory() -> Path:
    """Returns the directory for this version of torch and this processor, after making it if needed."""
    if GIVEN:
        try:
            Path(GIVEN).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"compiled graphs cannot be kept in {VARIABLE}={GIVEN} ({error.strerror}); set it to a writable "
                "directory, or unset it"
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
            file.write(bytes(ROOM))  # tests the free space; an empty file can be made on a full disk
        return path
    except OSError as error:
        own = Path(tempfile.gettempdir(), f"alfish-{os.getuid()}")
        own.mkdir(mode=0o700, exist_ok=True)
        if own.lstat().st_uid != os.getuid():  # otherwise code of another user could be loaded
            raise UsageError(
                f"compiled graphs can be kept neither in {root} ({first_line(error)}) nor in {own}, which belongs to "
                "another user; set XDG_CACHE_HOME to a writable directory"
            ) from error
        path = own / versions()
        path.mkdir(exist_ok=True)
        logging.warning(
            "Compiled graphs are kept in %s, because the cache in %s is not writable (%s); set XDG_CACHE_HOME to a "
            "writable directory",
            path,
            root,
            first_line(error),
        )
        return path


@functools.cache
def versions() -> str:
    """Returns a directory name that identifies the versions and the processor for which code is compiled."""
    described = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    with contextlib.suppress(OSError):  # only Linux has this file
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        described += " ".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
    processor = hashlib.sha256(described.encode()).hexdigest()[:8]
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return f"torch-{torch.__version__}-python-{python}-{processor}"


def environment() -> dict[str, str]:
    """Returns the environment variables with which another process uses the same cache."""
    own = {name: value for name, value in os.environ.items() if name != VARIABLE}
    return own | {VARIABLE: GIVEN} if GIVEN else own


@contextlib.contextmanager
def in_use() -> Iterator[Path]:
    """Makes torch's compiler use the directory within the context, in all threads of the process."""
    path = directory()
    with variable_set(VARIABLE, str(path)):
        yield path


@contextlib.contextmanager
def lock(name: str) -> Iterator[None]:
    """Holds the lock called `name` within the context, after waiting for other processes to release it.

    A process that ends releases its locks. On a file system without locks, processes do not wait, and may write the
    same files twice.
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
    """Removes the least recently used files until the cache has at most `largest` bytes.

    A process that needs a removed file compiles it again. Files for other versions and processors are removed, too.
    Lock files stay, because another process may hold a lock.
    """
    if GIVEN:
        return
    found = []
    for path in directory().parent.rglob("*"):
        with contextlib.suppress(OSError):  # another process has removed the file
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
