"""Atomic files: a file gets its name only when it is complete and on disk."""

import contextlib
import errno
import functools
import hashlib
import os
import platform
import re
import shutil
import stat
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal

from absl import logging

from alfish.errors import RunError, UsageError

MAX_NAME = 200  # bytes; a temporary name has the hash of a longer file name, because file systems allow 255


class DiskError(RunError):
    """Raised if a file cannot be written because the disk is full, over its quota, read-only or broken."""


def absolute(path: str | Path) -> Path:
    """Returns an absolute path; `~` is the home directory."""
    try:
        return Path(path).expanduser().absolute()
    except RuntimeError:  # there is no such user, so `~` is part of a name
        return Path(path).absolute()


def nearest(path: Path) -> Path:
    """Returns a path for messages, relative to the working directory if the path is inside that directory."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


@contextlib.contextmanager
def writing(path: str | os.PathLike) -> Iterator[None]:
    """Converts an OSError that occurs while the context writes `path` into an error of one sentence.

    Raises:
      UsageError: a file is where a directory is needed, a directory is where a file is needed, or `path` is a link.
      DiskError: the disk fails.
    """
    try:
        yield
    except OSError as error:
        path = Path(path)
        if error.errno == errno.ELOOP:
            raise UsageError(f"{path} is a link, but alfish does not write through links; remove the link") from error
        if isinstance(error, (FileExistsError, IsADirectoryError, NotADirectoryError)):
            in_the_way = next((one for one in (path, *path.parents) if os.path.lexists(one)), path)
            kind = "a directory" if in_the_way.is_dir() else "not a directory"
            raise UsageError(f"{in_the_way} is {kind}, but {path} must be written there; move it away") from error
        directory = path if path.is_dir() else path.parent
        raise DiskError(f"{directory} cannot be written to: {error.strerror or error} ({path.name})") from error


def check_places(directory: str | os.PathLike, files: Iterable[str], directories: Iterable[str]) -> None:
    """Checks that files and directories to be written do not exist, or have the right kind.

    Raises:
      UsageError: a path has the wrong kind, or is a link; the message names the first such path.
    """
    for name, is_right, kind in [
        *((name, Path.is_file, "file") for name in files),
        *((name, Path.is_dir, "directory") for name in directories),
    ]:
        path = Path(directory) / name
        if os.path.lexists(path) and not is_right(path):
            raise UsageError(f"{path} is not a {kind}, but alfish must write a {kind} of that name; move it away")
        if path.is_symlink():
            raise UsageError(f"{path} is a link, but alfish does not write through links; put the {kind} itself there")


def reserve(path: str | os.PathLike, size: int) -> None:
    """Creates a file of `size` bytes, and reserves its disk space immediately.

    Raises:
      OSError: the file cannot be created, for example because the disk is full.
    """
    with open(path, "wb") as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)
        else:
            file.truncate(size)


def make_directory(path: str | os.PathLike) -> None:
    """Creates a directory and its missing parents; raises as `writing` does."""
    with writing(path):
        Path(path).mkdir(parents=True, exist_ok=True)


def write_atomically(path: str | os.PathLike, content: str | bytes) -> None:
    """Writes a complete file; the old file remains if the process is killed or the disk is full.

    After the call, the content is on disk.

    Raises: as for `writing`.
    """
    with open_atomically(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def open_atomically(path: str | os.PathLike) -> Iterator[BinaryIO]:
    """Yields a file to write, and renames it to `path` if the context ends without an error.

    The temporary file is in the same directory, because a rename is atomic only within one file system.
    """
    path = Path(path)
    with writing(path):
        temporary = temporary_of(path)
        try:
            with open_own(temporary, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())  # otherwise a power cut after the rename could leave an empty file
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)  # writes the rename to disk
        finally:
            os.close(directory)


def open_own(path: str | os.PathLike, mode: Literal["ab", "wb"]) -> BinaryIO:
    """Opens a file to write, but not through a link, which may lead to another file of the user.

    Raises:
      OSError: the file is a link, or cannot be opened.
    """
    kind = os.O_APPEND if mode == "ab" else os.O_TRUNC
    return open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | kind, 0o666), mode)


def temporary_of(path: Path) -> Path:
    """Returns the path of the temporary file for `path`, in the same directory: `.NAME.PID-MACHINE.tmp`.

    The caller may append a suffix. Also removes temporary files for `path` that killed processes left on this machine.
    """
    name = path.name if len(os.fsencode(path.name)) <= MAX_NAME else hashlib.sha256(os.fsencode(path.name)).hexdigest()
    pattern = re.compile(rf"{re.escape(f'.{name}.')}(\d+)-{_machine()}\.tmp.*")
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(path.parent) as entries:
        for left, found in [(entry.path, found) for entry in entries if (found := pattern.fullmatch(entry.name))]:
            if not _is_alive(int(found[1])):
                remove(Path(left))
    return path.with_name(f".{name}.{os.getpid()}-{_machine()}.tmp")


def remove(path: Path) -> None:
    """Removes a file, or a directory with its contents; ignores errors."""
    with contextlib.suppress(OSError):
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() and not path.is_symlink() else path.unlink()


@functools.cache
def _machine() -> str:
    """Returns a short name of this machine; process ids are unique only within one machine."""
    return hashlib.sha256(platform.node().encode()).hexdigest()[:6]


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # process of another user
        return True
    return True


def open_regular(path: str | os.PathLike) -> BinaryIO:
    """Opens a regular file for reading; refuses pipes, devices and sockets, also behind a link.

    Raises:
      OSError: the file is not regular, or cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # otherwise opening a pipe waits for a writer
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError("it is not a regular file")
    return open(descriptor, "rb")


def sha256(path: str | os.PathLike) -> str:
    """Returns the hash of a regular file, as `sha256sum` prints it."""
    with open_regular(path) as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def lock(directory: str | os.PathLike, holder: object) -> Callable[[], Any] | None:
    """Locks a directory until the returned function is called, `holder` is deleted, or the process ends.

    The lock is advisory: a program that does not call `lock` reads and writes as usual.

    Returns:
      A function that unlocks the directory; None if it is already locked, by this process or another one. On a file
      system without locks, every call succeeds.
    """
    import fcntl  # imported here, because Windows lacks the module

    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError as error:
        logging.debug("%s cannot be locked: %s", directory, error)
    return weakref.finalize(holder, os.close, descriptor)
