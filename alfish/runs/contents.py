"""Reads a run's files as untrusted input, because the directory may be damaged or come from another person.

Each function accepts only a regular file of limited size with the expected kind of content. Functions that take a
directory and a name also refuse links that lead out of the directory, and return None if the file does not exist
(`last_text`: ''). A refused file raises a UsageError that names the file.
"""

import csv
import io
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from alfish.errors import UsageError, first_line, printable
from alfish.runs.files import open_regular

MAX_TEXT = 2**26  # maximum bytes of a text, or of a JSON value
MAX_TABLE = 2**31  # maximum bytes of a CSV
MAX_DEPTH = 32  # maximum depth of lists and objects in a JSON value
LARGEST_CLOCK = 2**63  # largest number of steps or seconds

# For each Python type: a predicate for JSON values of this type, and a description for messages.
_KINDS = {
    int: (lambda value: type(value) is int and abs(value) < LARGEST_CLOCK, "an integer"),
    float: (lambda value: type(value) in (int, float) and _is_finite(value), "a number"),
    bool: (lambda value: type(value) is bool, "true or false"),
    str: (lambda value: type(value) is str, "text"),
    list: (lambda value: type(value) is list, "a list"),
    dict: (lambda value: type(value) is dict, "an object"),
}


def content(directory: Path, name: str, max_size: int = MAX_TEXT) -> bytes | None:
    """Returns the bytes of a file of a run; None if the file does not exist.

    Args:
      directory: directory of the run.
      name: path of the file, relative to the directory.
      max_size: largest size that is accepted, in bytes.

    Raises:
      UsageError: the file is not a regular file, is too large, cannot be read, or a link leads out of the directory.
    """
    check_inside(directory, name)
    try:
        return content_of(directory / name, max_size)
    except FileNotFoundError:
        return None


def check_inside(directory: Path, name: str) -> None:
    """Raises UsageError if a path is a broken link, or leads out of the run's directory through links."""
    try:
        target, root = os.path.realpath(directory / name), os.path.realpath(directory)
    except ValueError as error:  # raised for a NUL in the name
        raise UsageError(f"{str(directory / name)!r} cannot be read: {error}") from error
    if os.path.islink(directory / name) and not os.path.lexists(target):
        raise UsageError(f"{directory / name} is a link to a file that does not exist; remove the link")
    if not Path(target).is_relative_to(root):
        raise UsageError(
            f"{directory / name} is a link that leads out of the run, to {target}; put the file itself there, or "
            "remove the link"
        )


def content_of(path: Path, max_size: int = MAX_TABLE) -> bytes:
    """Returns the bytes of a file.

    Raises:
      UsageError: as for `content`.
      FileNotFoundError: the file does not exist.
    """
    try:
        with open_regular(path) as file:
            found = b"" if os.fstat(file.fileno()).st_size > max_size else file.read(max_size + 1)
            if not found and os.fstat(file.fileno()).st_size or len(found) > max_size:
                raise UsageError(
                    f"{path} is larger than {max_size / 2**20:,.0f} MiB, the largest size that alfish writes there; "
                    "move it away"
                )
            return found
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(*error.args) from error
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}; move it away, or restore it") from error


def text(directory: Path, name: str) -> str | None:
    """Returns a file of a run as text; None if it does not exist. Raises as `content` and `decoded`."""
    found = content(directory, name)
    return None if found is None else decoded(directory / name, found)


def decoded(path: Path, found: bytes) -> str:
    """Returns the content of a file as text, with all line ends converted to newlines.

    Raises:
      UsageError: the content is not UTF-8.
    """
    try:
        return io.StringIO(found.decode("utf-8-sig"), newline=None).read()
    except UnicodeDecodeError as error:
        line = found.count(b"\n", 0, error.start) + 1
        raise UsageError(
            f"{path} is not text in UTF-8: line {line} has the byte 0x{found[error.start]:02x}; save it as UTF-8, or "
            "restore it from a copy"
        ) from error


def last_text(directory: Path, name: str, max_size: int = 2**24) -> str:
    """Returns the end of a text file, which may be large and contain invalid UTF-8; '' if it does not exist.

    Args:
      directory, name: directory of the run and path of the file in it, as for `content`.
      max_size: largest number of bytes to return.

    Raises:
      UsageError: as for `content`.
    """
    check_inside(directory, name)
    try:
        with open_regular(directory / name) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - max_size))
            return file.read(max_size).decode(errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError as error:
        raise UsageError(f"{directory / name} cannot be read: {error.strerror or error}; move it away") from error


def json_value(directory: Path, name: str) -> Any:
    """Returns the JSON value of a file of a run; None if the file does not exist.

    Raises:
      UsageError: as for `content`; or the file is not JSON, or has more than `MAX_DEPTH` levels.
    """
    found = content(directory, name)
    return None if found is None else parsed(directory / name, found)


def parsed(path: Path, found: bytes) -> Any:
    """Returns the JSON value in the content of a file; raises as `json_value`."""
    try:
        value = json.loads(found)
        json.dumps(value, ensure_ascii=False).encode()  # raises for half of a surrogate pair
    except RecursionError as error:
        raise _is_too_deep(path) from error
    except ValueError as error:
        raise UsageError(f"{path} is not JSON ({first_line(error)}); restore it, or move it away") from error
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [part for one in level if isinstance(one, list | dict) for part in _parts(one)]
    if level:
        raise _is_too_deep(path)
    return value


def record(directory: Path, name: str, kinds: Mapping[str, type], may_lack: Sequence[str] = ()) -> dict | None:
    """Returns the JSON object in a file of a run; None if the file does not exist.

    Args:
      directory, name: directory of the run and path of the file in it, as for `content`.
      kinds: type of each entry: int, float, bool, str, list or dict. Other entries are not checked.
      may_lack: names of entries that may be missing.

    Raises:
      UsageError: as for `json_value`, or an entry is missing or has the wrong type.
    """
    found, path = content(directory, name), directory / name
    return None if found is None else checked_entries(path, parsed(path, found), kinds, may_lack)


def checked_entries(path: Path, value: Any, kinds: Mapping[str, type], may_lack: Sequence[str] = ()) -> dict:
    """Checks a JSON value as `record` does, and returns it; `path` is the file of the value, for messages."""
    if not isinstance(value, dict):
        raise UsageError(f"{path} is not what alfish writes there: it is not a JSON object; move it away")
    for entry, kind in kinds.items():
        is_right, words = _KINDS[kind]
        if entry not in value:
            if entry in may_lack:
                continue
            raise UsageError(f"{path} is not what alfish writes there: it has no {entry!r}; move it away")
        if not is_right(value[entry]):
            raise UsageError(f"{path} is not what alfish writes there: {entry!r} is not {words}; move it away")
    return value


def table(directory: Path, name: str) -> tuple[list[str], list[list[str]]] | None:
    """Returns header and rows of a run's CSV file; None if it does not exist. Raises as `content` and `rows_of`."""
    found = content(directory, name, MAX_TABLE)
    return None if found is None else rows_of(directory / name, found)


def rows_of(path: Path, found: bytes) -> tuple[list[str], list[list[str]]]:
    """Returns header and rows of a CSV.

    Raises:
      UsageError: the CSV has no header, has a row whose length differs from the header's, or is not UTF-8.
    """
    try:
        lines = csv.reader(io.StringIO(found.decode("utf-8-sig"), newline=""), strict=True)
        header, *rows = [row for row in lines if row] or [[]]
    except (ValueError, csv.Error) as error:
        raise UsageError(f"{path} is not a table: {printable(str(error))}; restore it, or move it away") from error
    if not header:
        raise UsageError(f"{path} is empty; it should begin with the names of its columns")
    for number, row in enumerate(rows, start=1):
        if len(row) != len(header):
            raise UsageError(
                f"{path}, row {number}, has {len(row)} cells instead of {len(header)}; fix or move the file"
            )
    return header, rows


def numbers(cells: Sequence[str], path: Path) -> np.ndarray:
    """Returns a column of a CSV as numbers, which may be nan or infinite.

    Raises:
      UsageError: a cell is not a number.
    """
    try:
        return np.array([float(cell) for cell in cells])
    except ValueError as error:
        raise UsageError(f"{path} has a cell without a number: {first_line(error)}; fix or move the file") from error


def clocks(cells: Sequence[str], path: Path) -> np.ndarray:
    """Returns a column of a CSV as steps or seconds.

    Raises:
      UsageError: a cell is not a number from 0 to `LARGEST_CLOCK`.
    """
    found = numbers(cells, path)
    wrong = ~((found >= 0) & (found <= LARGEST_CLOCK))  # True for nan, too
    if wrong.any():
        cell = printable(cells[int(np.argmax(wrong))][:40])
        raise UsageError(f"{path} has {cell!r} where it should have steps or seconds; fix or move the file")
    return found


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an int that is too large for a float
        return False


def _parts(value: list | dict) -> list:
    return list(value.values()) if isinstance(value, dict) else value


def _is_too_deep(path: Path) -> UsageError:
    return UsageError(f"{path} is not what alfish writes there: it has more than {MAX_DEPTH} levels; move it away")
