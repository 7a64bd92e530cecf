"""What every format's reader asks of files: that they are there, whole, and of the kind they are said to be."""

import contextlib
import importlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from alfish import nest
from alfish.errors import UsageError
from alfish.nest import Nest

BLOCK_ROWS = 65_536  # read at a time
HDF5_DAMAGE = (OSError, RuntimeError, KeyError, ValueError, TypeError)  # what h5py raises, as the place may be


def existing_file(path: str, what: str) -> Path:
    """The path of a file.

    Raises:
      UsageError: it is not there, or a directory (with the files in it).
    """
    found = Path(path).expanduser()
    if found.is_dir():
        inside = sorted(entry.name for entry in found.iterdir() if entry.is_file())
        hint = f"; it holds {', '.join(inside[:5])}" if inside else ", and it holds no file"
        raise UsageError(f"{path} is a directory, and {what} is one file{hint}")
    if not found.is_file():
        raise UsageError(f"there is no file {path}; check the path of {what}{_beside(found)}")
    if not os.access(found, os.R_OK):
        raise UsageError(f"{path} may not be read by who runs this; change its permissions")
    if found.stat().st_size == 0:
        raise UsageError(f"{path} is an empty file, not {what}; fetch it again")
    return found


def existing_directory(path: str, what: str) -> Path:
    """The path of a directory.

    Raises:
      UsageError: it is not there, or a file.
    """
    found = Path(path).expanduser()
    if found.is_file():
        raise UsageError(f"{path} is a file, and {what} is a directory")
    if not found.is_dir():
        raise UsageError(f"there is no directory {path}; check the path of {what}{_beside(found)}")
    return found


def extra(module: str, name: str, what: str) -> Any:
    """An optional module.

    Raises:
      UsageError: it is not installed; says how to install it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UsageError(f"{what} needs the extra {name!r}: pip install 'alfish[{name}]' ({error})") from error


def open_hdf5(path: Path, what: str) -> Any:
    """An h5py File to read.

    Raises:
      UsageError: it is no HDF5 file, or a part of one.
    """
    h5py = extra("h5py", "hdf5", what)
    try:
        return h5py.File(path, "r")
    except OSError as error:
        size = path.stat().st_size
        if not h5py.is_hdf5(path):
            raise UsageError(f"{path} is not an HDF5 file, so it is not {what}") from error
        raise UsageError(
            f"{path} is cut off or damaged: of its {size:,} bytes nothing is readable, since HDF5 keeps its table of "
            f"contents in what is missing; fetch it again ({error})"
        ) from error


@contextlib.contextmanager
def damage_named(path: Path) -> Iterator[None]:
    """Turns what h5py raises of a file that opens, and is damaged inside, into a UsageError."""
    try:
        yield
    except UsageError:
        raise
    except HDF5_DAMAGE as error:
        raise UsageError(f"{path} is damaged inside ({' '.join(str(error).split())}); fetch it again") from error


def hdf5_nest(node: Any) -> Nest:
    """A data set, or a nest of those in a group: a dict, or a tuple where its names are `_index_0`, `_index_1`."""
    if hasattr(node, "shape"):
        return node
    if len(node) and all(key.startswith("_index_") for key in node):
        return tuple(hdf5_nest(node[f"_index_{i}"]) for i in range(len(node)))
    return {key: hdf5_nest(node[key]) for key in sorted(node)}


def read_rows(stored: Nest, rows: slice) -> Nest:
    """Rows of a nest of arrays, in memory."""
    return nest.map(lambda leaf: np.asarray(leaf[rows]), stored)


def blocks(ends: Sequence[int] | np.ndarray, start: int = 0, size: int = BLOCK_ROWS) -> Iterator[list[slice]]:
    """Consecutive episodes in groups of about `size` rows, so that each group is one read.

    Args:
      ends: the row after the last one of each episode, ascending.
      start: the first one's first row.
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
    """`rows` counted from the first row of its block."""
    return slice(rows.start - block[0].start, rows.stop - block[0].start)


def missing(present: Iterable[str], needed: Iterable[str]) -> list[str]:
    """Those of `needed` that are not present, in their order."""
    present = set(present)
    return [name for name in needed if name not in present]


def _beside(path: Path) -> str:
    """A clause on how far a path exists, and what lies beside it."""
    parent = path.parent
    if not parent.is_dir():
        return f" ({parent} is not there either)"
    names = sorted(os.listdir(parent))
    return f" (beside it: {', '.join(names[:5])})" if names else ""
