"""Scalars against the clock: TensorBoard and CSV.

Every writer takes the run's counters and its wall time with the values, so that a curve can be drawn against any of
them later.
"""

import contextlib
import csv
import errno
import io
import os
import socket
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

from absl import logging

from alfish.errors import UsageError
from alfish.runs.files import make_directory, open_regular, write_atomically, writing

COUNTERS = ("steps", "env_steps", "iterations", "updates", "wall_seconds")


class Writer(Protocol):
    """Destination of summaries."""

    def scalars(
        self, values: dict[str, float], steps: int, env_steps: int, iterations: int, updates: int, wall_seconds: float
    ) -> None:
        """Writes values by name, together with the counters of the run."""

    def text(self, tag: str, text: str, steps: int) -> None:
        """Writes a text, such as the configuration; a writer may ignore texts."""

    def flush(self) -> None: ...

    def close(self) -> None: ...


class NullWriter:
    """Writes nothing."""

    def scalars(
        self, values: dict[str, float], steps: int, env_steps: int, iterations: int, updates: int, wall_seconds: float
    ) -> None:
        pass

    def text(self, tag: str, text: str, steps: int) -> None:
        pass

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


class MultiWriter:
    """Writes to each of `writers`, in order."""

    def __init__(self, writers: Iterable[Writer]):
        self._writers = tuple(writers)

    def scalars(
        self, values: dict[str, float], steps: int, env_steps: int, iterations: int, updates: int, wall_seconds: float
    ) -> None:
        for writer in self._writers:
            writer.scalars(values, steps, env_steps, iterations, updates, wall_seconds)

    def text(self, tag: str, text: str, steps: int) -> None:
        for writer in self._writers:
            writer.text(tag, text, steps)

    def flush(self) -> None:
        for writer in self._writers:
            writer.flush()

    def close(self) -> None:
        with contextlib.ExitStack() as stack:  # closes the others when one fails
            for writer in reversed(self._writers):
                stack.callback(writer.close)


class TensorBoardWriter:
    """TensorBoard event files; the other counters stand under `counters/`.

    If the disk fails, the writer logs a warning and stops; the run continues.

    Args:
      directory: of the event files.
      purge_step: first steps that a resumed run writes again: the steps of its checkpoint + 1, because values at the
        checkpoint stay. TensorBoard removes all values from these steps on.

    Raises:
      UsageError: if TensorBoard is not installed.
    """

    def __init__(self, directory: str | os.PathLike, purge_step: int | None = None):
        try:
            from tensorboard.compat.proto import (
                event_pb2,
                summary_pb2,
            )  # here, because it takes some tenths of a second
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ImportError as error:
            raise UsageError("TensorBoard is not installed; pip install tensorboard.") from error
        self._event, self._summary, self._path = event_pb2.Event, summary_pb2.Summary, Path(directory)
        # Not through torch's SummaryWriter, whose thread ends with a traceback where the disk fails.
        self._file: Any = None
        with self._unless_the_disk_fails():
            self._path.mkdir(parents=True, exist_ok=True)
            name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
            self._file = open(self._path / name, "ab", buffering=0)  # noqa: SIM115, closed by `close`
        self._records = RecordWriter(self._file)
        self._write(step=purge_step, file_version="brain.Event:2")
        if purge_step is not None:
            self._write(step=purge_step, session_log=event_pb2.SessionLog(status=event_pb2.SessionLog.START))

    def scalars(
        self, values: dict[str, float], steps: int, env_steps: int, iterations: int, updates: int, wall_seconds: float
    ) -> None:
        counters = zip(COUNTERS[1:], (env_steps, iterations, updates, wall_seconds), strict=True)
        all_values = values | {f"counters/{name}": counter for name, counter in counters}
        row = [self._summary.Value(tag=name, simple_value=float(value)) for name, value in all_values.items()]
        self._write(step=steps, summary=self._summary(value=row))

    def text(self, tag: str, text: str, steps: int) -> None:
        from torch.utils.tensorboard.summary import text as text_summary

        self._write(step=steps, summary=text_summary(tag, text))

    def flush(self) -> None:
        pass

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, **fields: Any) -> None:
        if self._file is not None:
            with self._unless_the_disk_fails():
                self._records.write(self._event(wall_time=time.time(), **fields).SerializeToString())

    @contextlib.contextmanager
    def _unless_the_disk_fails(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            logging.warning("%s cannot be written to (%s): its curves end here.", self._path, error.strerror or error)
            self.close()


class CSVWriter:
    """CSV table with the counters and a column for each name; a missing value is an empty cell.

    A new name adds a column at the end, for which the file is rewritten. Each row is flushed, so a killed process loses
    at most its last row. The next writer removes an incomplete last row.

    Args:
      path: of the file, usually `metrics.csv`; an existing one is continued.
      resume_steps: rows past these steps are removed, because a resumed run writes them again; None: no row.

    Raises:
      UsageError: if the existing file is not such a table.
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

    def scalars(
        self, values: dict[str, float], steps: int, env_steps: int, iterations: int, updates: int, wall_seconds: float
    ) -> None:
        if clash := values.keys() & set(COUNTERS):
            raise ValueError(f"The names {sorted(clash)} are taken by the counters.")
        if new := [name for name in values if name not in self._columns]:
            self._file.close()
            _, *rows = self._read()
            self._columns += new
            self._rewrite(rows)
        counters = (int(steps), int(env_steps), int(iterations), int(updates), float(wall_seconds))
        cells = (float(values[name]) if name in values else "" for name in self._columns[len(COUNTERS) :])
        row = io.StringIO(newline="")
        csv.writer(row, lineterminator="\n").writerow((*counters, *cells))
        with writing(self._path):
            content = row.getvalue().encode()
            if self._file.write(content) < len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def text(self, tag: str, text: str, steps: int) -> None:
        pass

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self._file.close()

    def _read(self) -> list[list[str]]:
        """Returns the header and the rows, without an incomplete last line."""
        try:
            with open_regular(self._path) as file:
                content = file.read()
            whole = content[: content.rfind(b"\n") + 1]
            table = list(csv.reader(io.StringIO(whole.decode(), newline="")))
        except (OSError, ValueError, csv.Error) as error:
            raise UsageError(f"{self._path} is no table of metrics ({error}); move it away.") from error
        if table and tuple(table[0][: len(COUNTERS)]) != COUNTERS:
            raise UsageError(f"{self._path} is no table of metrics (its columns are {table[0]}); move it away.")
        for number, row in enumerate(table[1:], start=2):
            if not row or not (row[0].isascii() and row[0].isdigit()):
                raise UsageError(f"{self._path}, row {number}, does not start with its steps; mend or move the file.")
        return table

    def _rewrite(self, rows: list[list[str]]) -> None:
        """Replaces the file by the columns and rows, and opens it; rows may lack the newest columns."""
        content = io.StringIO(newline="")
        writer = csv.writer(content, lineterminator="\n")
        writer.writerow(self._columns)
        writer.writerows(row + [""] * (len(self._columns) - len(row)) for row in rows)
        write_atomically(self._path, content.getvalue())
        # Unbuffered, because `close` would write a buffer again after the disk has failed.
        with writing(self._path):
            self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115, closed by `close`
