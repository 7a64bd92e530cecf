"""Files that appear under their names only when they are whole and on the disk."""

import contextlib
import os
import stat
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from absl import logging


def write_atomically(path: str | os.PathLike, content: str | bytes) -> None:
    """Writes the whole file or, if killed or out of disk, leaves what was there; on the disk when it returns."""
    with open_atomically(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def open_atomically(path: str | os.PathLike) -> Iterator[BinaryIO]:
    """A file to write, which takes its place when the block ends without an error; see `write_atomically`.

    The temporary file is `.NAME.PID.tmp` in the same directory, since a rename is atomic within a file system only.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # before the rename, or a power cut may leave the new name on an empty file
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)  # the rename itself
    finally:
        os.close(directory)


def open_regular(path: str | os.PathLike) -> BinaryIO:
    """Opens a file for reading, whose bytes end: no pipe, device or socket, also behind a link.

    Raises:
      OSError: it is no regular file, or cannot be opened.
    """
    # Without O_NONBLOCK the open of a pipe waits for a writer.
    file = open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb")  # noqa: SIM115, the caller closes it
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError("it is not a regular file")
    return file


def lock(directory: str | os.PathLike, holder: object) -> Callable[[], Any] | None:
    """Locks a directory, until what is returned is called, or the holder or the process is gone.

    Whoever does not ask for the lock reads and writes as ever.

    Returns:
      None where it is locked already, by this process or another. On a file system without locks it never is.
    """
    import fcntl  # here, because Windows has none

    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError as error:
        logging.debug("%s cannot be locked: %s", directory, error)
    return weakref.finalize(holder, os.close, descriptor)
