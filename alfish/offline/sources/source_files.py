"""Checks of files for all formats: the file exists, is complete, and has the expected kind."""

import contextlib
import json
import math
import os
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from alfish import nest
from alfish.errors import UsageError, optional_module, printable
from alfish.nest import Nest
from alfish.offline.limits import check_expansion, check_memory
from alfish.offline.sources.recognition import check_beginning, foreign_file, said_of_directory

BLOCK_ROWS, BLOCK_BYTES = 65_536, 2**25  # limits of a block: rows, and bytes of observations
HDF5_DAMAGE = (OSError, RuntimeError, KeyError, ValueError, TypeError)  # errors that h5py raises for damage
JSON_EXPANSION = 20  # bytes in memory for each byte of text
MAX_WORDS = 200  # maximum number of characters quoted from a library's error
SPECIAL = {
    "a pipe": Path.is_fifo,
    "a device": lambda path: path.is_char_device() or path.is_block_device(),
    "a socket": Path.is_socket,
    "a directory": Path.is_dir,
}


def said(error: BaseException) -> str:
    """Returns a library's error message in one line, shortened and without control characters."""
    return printable(str(error).strip() or type(error).__name__)[:MAX_WORDS]


def existing_file(path: str, what: str) -> Path:
    """Returns the path of a file.

    Raises:
      UsageError: the file does not exist, is empty, is a directory (the message says what is in it), is in a format of
        another library, cannot be read by this user, or fails `check_regular` or `check_beginning`.
    """
    found = Path(path).expanduser()
    if found.is_dir():
        raise UsageError(f"{path} is a directory, but {what} is one file; {said_of_directory(found)}")
    if not found.exists():
        raise UsageError(f"there is no file {path}; check the path of {what}{_beside(found)}")
    check_regular(found)
    if not os.access(found, os.R_OK):
        raise UsageError(f"you have no permission to read {path}; change its permissions")
    if found.stat().st_size == 0:
        raise UsageError(f"{path} is an empty file, not {what}; download it again")
    if (foreign := foreign_file(path)) is not None:
        raise UsageError(f"{path} is not {what}: {foreign}")
    check_beginning(found)
    return found


def check_regular(path: Path) -> None:
    """Checks that a path is a regular file, because reading a pipe or a device might never end. Links are followed.

    Raises:
      UsageError: the path is not a regular file; the message says what it is.
    """
    if not os.path.lexists(path):
        raise UsageError(f"there is no file {path}, which the data set needs; download the data set again")
    kind = next((word for word, is_one in SPECIAL.items() if is_one(path)), None)
    if kind is not None or not path.is_file():
        target = f", which leads to {path.resolve()}," if path.is_symlink() else ""
        raise UsageError(
            f"{path}{target} is {kind or 'no file'}, but data are read only from files; copy the data into a file"
        )


def existing_directory(path: str, what: str) -> Path:
    """Returns the path of a directory.

    Raises:
      UsageError: the directory does not exist, or is a file.
    """
    found = Path(path).expanduser()
    if found.is_file():
        raise UsageError(f"{path} is a file, but {what} is a directory")
    if not found.is_dir():
        raise UsageError(f"there is no directory {path}; check the path of {what}{_beside(found)}")
    return found


def read_json(path: Path) -> Any:
    """Returns the content of a JSON file.

    Raises:
      UsageError: the file is not a regular file, or larger than the available memory.
      OSError, ValueError, RecursionError: the file cannot be read, or is not JSON.
    """
    check_regular(path)
    check_memory(JSON_EXPANSION * path.stat().st_size, str(path))
    return json.loads(path.read_bytes())


def open_hdf5(path: Path, what: str, is_checked: bool = False) -> Any:
    """Opens an h5py File for reading and checks that all of its content lies in the file itself.

    Args:
      path: path of the file.
      what: name of the expected format, for messages.
      is_checked: whether to skip the check of the content, which takes as long as reading a small file.

    Raises:
      UsageError: the file is not HDF5, is truncated, refers to other files, or declares far more data than it stores.
    """
    h5py = optional_module("h5py", "hdf5", what)
    check_regular(path)
    check_beginning(path)
    size = path.stat().st_size
    try:
        file = h5py.File(path, "r")
    except OSError as error:
        if not h5py.is_hdf5(path):
            raise UsageError(f"{path} is not an HDF5 file, so it is not {what}") from error
        raise UsageError(
            f"{path} is truncated or damaged: none of its {size:,} bytes are readable, because the table of contents "
            f"of HDF5 is missing; download it again ({said(error)})"
        ) from error
    if is_checked:
        return file
    try:
        with damage_named(path):
            check_expansion(_declared(h5py, file, path), size, str(path))
    except BaseException:
        file.close()
        raise
    return file


MAX_GROUPS = 32  # maximum depth of groups in an HDF5 file


def _declared(h5py: Any, file: Any, path: Path) -> int:
    """Returns the memory that a file's data sets need, in bytes.

    Raises:
      UsageError: a part is in another file, or has several links, which could make the content infinite.
    """

    declared = 0
    # HDF5's own traversal is not used, because it recurses into nested groups.
    groups = [(h5py.h5g.open(file.id, b"/"), b"", 1)]
    while groups:
        group, above, depth = groups.pop()
        for name in group:
            whole = above + name
            if (foreign := _foreign(h5py, group, name, depth)) is not None:
                raise UsageError(
                    f"{path} is refused: its {_text(whole)} {foreign}, but data are read only from the file itself, "
                    "each part once; write it again without links and external parts"
                )
            kind = h5py.h5o.get_info(group, name).type
            if kind == h5py.h5o.TYPE_GROUP:
                groups.append((h5py.h5g.open(group, name), whole + b"/", depth + 1))
            elif kind == h5py.h5o.TYPE_DATASET:
                stored = h5py.h5d.open(group, name)
                settings = stored.get_create_plist()
                chunk = settings.get_chunk() if settings.get_layout() == h5py.h5d.CHUNKED else ()
                # A size of 0 counts as 1, and at least one chunk counts, because HDF5 reads whole chunks.
                numbers = max(math.prod(max(1, size) for size in stored.shape or ()), math.prod(chunk))
                declared += numbers * stored.dtype.itemsize
    return declared


def _foreign(h5py: Any, group: Any, name: bytes, depth: int) -> str | None:
    """Returns the reason why a part of a group is refused; None if it is accepted."""
    kind = group.links.get_info(name).type
    if kind != h5py.h5l.TYPE_HARD:
        return "is a link to another part" if kind == h5py.h5l.TYPE_SOFT else "is a link into another file"
    if depth > MAX_GROUPS:
        return f"is nested more than {MAX_GROUPS} deep"
    about = h5py.h5o.get_info(group, name)
    if about.rc > 1:
        return "is linked from several places"
    if about.type != h5py.h5o.TYPE_DATASET:
        return None
    settings = h5py.h5d.open(group, name).get_create_plist()
    if settings.get_layout() == h5py.h5d.VIRTUAL:
        return "is a virtual data set, made of other files"
    return "is stored in another file" if settings.get_external_count() else None


def _text(name: bytes) -> str:
    return repr(name.decode(errors="replace"))


@contextlib.contextmanager
def damage_named(path: Path) -> Iterator[None]:
    """Converts h5py's errors about damaged content to a UsageError."""
    try:
        yield
    except UsageError:
        raise
    except HDF5_DAMAGE as error:
        raise UsageError(f"{path} is damaged inside ({said(error)}); download it again") from error


def check_zip(path: Path, fits_memory: bool = True) -> None:
    """Checks that a zip file has a table of contents and declares no more data than it can hold.

    Args:
      path: path of the file.
      fits_memory: whether the whole content must fit in the available memory.

    Raises:
      UsageError: the file has no table of contents, declares more data than it can hold, or does not fit in memory.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            declared = sum(part.file_size for part in archive.infolist())
    except (OSError, ValueError, EOFError, RuntimeError, LookupError, NotImplementedError, zipfile.BadZipFile) as error:
        size = path.stat().st_size
        raise UsageError(
            f"{path} is truncated or damaged: none of its {size:,} bytes are readable, because the table of contents "
            f"at its end is missing; copy it again ({said(error)})"
        ) from error
    check_expansion(declared, path.stat().st_size, str(path))
    if fits_memory:
        check_memory(declared, str(path))


def hdf5_nest(node: Any) -> Nest:
    """Returns a data set, or the nest of a group: a dict, or a tuple if the names are `_index_0`, `_index_1`, ...."""
    if hasattr(node, "shape"):
        return node
    if len(node) and all(key.startswith("_index_") for key in node):
        return tuple(hdf5_nest(node[f"_index_{i}"]) for i in range(len(node)))
    return {key: hdf5_nest(node[key]) for key in sorted(node)}


def read_rows(stored: Nest, rows: slice) -> Nest:
    """Reads rows of a nest of arrays into memory.

    Raises:
      UsageError: the rows do not fit in memory.
    """
    check_memory(
        sum((rows.stop - rows.start) * math.prod(leaf.shape[1:]) * leaf.dtype.itemsize for leaf in nest.leaves(stored)),
        f"rows {rows.start:,} to {rows.stop - 1:,}",
    )
    return nest.map(lambda leaf: np.asarray(leaf[rows]), stored)


def blocks(ends: Sequence[int] | np.ndarray, start: int = 0, size: int = BLOCK_ROWS) -> Iterator[list[slice]]:
    """Yields blocks of consecutive episodes, each episode as a slice of rows; callers read each block at once.

    Args:
      ends: index after the last row of each episode, ascending.
      start: index of the first row of the first episode.
      size: number of rows from which a block is complete.
    """
    group: list[slice] = []
    for end in ends:
        group.append(slice(start, int(end)))
        start = int(end)
        if start - group[0].start >= size:
            yield group
            group = []
    if group:
        yield group


def inside(rows: slice, block: Sequence[slice]) -> slice:
    """Returns `rows` relative to the first row of its block."""
    return slice(rows.start - block[0].start, rows.stop - block[0].start)


def missing(present: Iterable[str], needed: Iterable[str]) -> list[str]:
    """Returns the names in `needed` that are not in `present`, in order."""
    present = set(present)
    return [name for name in needed if name not in present]


def _beside(path: Path) -> str:
    """Returns a clause that lists files in the directory of a path, or says that the directory is missing."""
    parent = path.parent
    if not parent.is_dir():
        return f" ({parent} does not exist either)"
    names = [name for name in os.listdir(parent) if not name.startswith(".")]
    names.sort(key=lambda name: (Path(name).suffix != path.suffix, name))  # files with the same suffix first
    return f" (in the same directory: {', '.join(names[:5])})" if names else ""
