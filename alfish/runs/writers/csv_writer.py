"""The table of scalars of a run, `metrics.csv`."""

import contextlib
import csv
import errno
import io
import os
import stat
from pathlib import Path

from absl import logging

from alfish.errors import UsageError
from alfish.runs import contents
from alfish.runs.files import make_directory, write_atomically, writing
from alfish.runs.writers.writer import COUNTERS, Counters, Writer

MAX_DIGITS = 18  # maximum number of digits of a row's clock steps


class CSVWriter(Writer):
    """CSV table with a column for each counter and each scalar name; a missing value is an empty cell.

    For a new scalar, the file is rewritten with one more column. Each row is flushed, so a killed process loses
    at most its last row. The next writer removes an incomplete last row.

    Args:
      path: path of the file, usually `metrics.csv`; an existing file is continued.
      resume_steps: clock steps of the checkpoint from which a run resumes. Later rows are removed, because the run
        writes them again. None removes nothing.

    Raises:
      UsageError: if the existing file is not a table of metrics.
    """

    def __init__(self, path: str | os.PathLike, resume_steps: int | None = None):
        self._path = Path(path)
        make_directory(self._path.parent)
        self._columns = list(COUNTERS)
        rows = []
        if self._path.exists():
            header, *rows = self._read() or [self._columns]
            self._columns = header
            if resume_steps is not None:
                rows = [row for row in rows if int(row[0]) <= resume_steps]
        self._rewrite(rows)

    def scalars(self, values: dict[str, float], counters: Counters) -> None:
        if clash := values.keys() & set(COUNTERS):
            raise UsageError(
                f"a scalar is called {sorted(clash)[0]!r}, which is the name of a counter of the run; rename it"
            )
        self._restore()
        if new := [name for name in values if name not in self._columns]:
            self._file.close()
            _, *rows = self._read()
            self._columns += new
            self._rewrite(rows)
        cells = (float(values[name]) if name in values else "" for name in self._columns[len(COUNTERS) :])
        row = io.StringIO(newline="")
        csv.writer(row, lineterminator="\n").writerow((*map(int, counters[:-1]), float(counters.wall_seconds), *cells))
        with writing(self._path):
            content = row.getvalue().encode()
            if self._file.write(content) < len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        self._file.close()

    def _restore(self) -> None:
        """Writes the table again if it was deleted or moved; the open file still has its rows."""
        own = os.fstat(self._file.fileno())
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            there = os.stat(self._path)
            if (there.st_dev, there.st_ino) == (own.st_dev, own.st_ino) or not stat.S_ISREG(own.st_mode):
                return
        self._file.seek(0)
        content = self._file.read()
        self._file.close()
        logging.error("%s WAS DELETED OR MOVED during training and is written again with all its rows", self._path)
        make_directory(self._path.parent)
        write_atomically(self._path, content)
        self._open()

    def _open(self) -> None:
        # Unbuffered, because `close` would retry writing the buffer after a disk error.
        with writing(self._path):
            self._file = open(self._path, "a+b", buffering=0)  # noqa: SIM115, closed by `close`

    def _read(self) -> list[list[str]]:
        """Returns the header and the rows, without an incomplete last line."""
        content = contents.content_of(self._path)
        whole = content[: content.rfind(b"\n") + 1]
        if not whole:
            return []
        header, rows = contents.rows_of(self._path, whole)
        if tuple(header[: len(COUNTERS)]) != COUNTERS:
            raise UsageError(
                f"{self._path} is not a table of metrics: its first columns are not {', '.join(COUNTERS)}; move it away"
            )
        for number, row in enumerate(rows, start=1):
            if not (row[0].isascii() and row[0].isdigit() and len(row[0]) <= MAX_DIGITS):
                raise UsageError(
                    f"{self._path}, row {number}, does not start with a count of steps; fix or move the file"
                )
        return [header, *rows]

    def _rewrite(self, rows: list[list[str]]) -> None:
        """Replaces the file with the columns and rows, and opens it; rows may lack the newest columns."""
        content = io.StringIO(newline="")
        writer = csv.writer(content, lineterminator="\n")
        writer.writerow(self._columns)
        writer.writerows(row + [""] * (len(self._columns) - len(row)) for row in rows)
        write_atomically(self._path, content.getvalue())
        self._open()
