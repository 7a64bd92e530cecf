"""Scalars against steps: TensorBoard, CSV, and a line for the person who waits.

Every writer takes the run's counters and its wall time with the values, so that a curve can be drawn against any of
them later.
"""

import contextlib
import csv
import errno
import io
import os
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TextIO

from absl import logging
from tqdm import tqdm

from alfish.errors import UsageError
from alfish.formatting import significant
from alfish.runs.files import make_directory, open_regular, write_atomically, writing

COUNTERS = ("steps", "env_steps", "iterations", "updates", "wall_seconds")


class Writer(Protocol):
    """Where summaries go."""

    def scalars(
        self, values: dict[str, float], steps: int, env_steps: int, iterations: int, updates: int, wall_seconds: float
    ) -> None:
        """Writes `values`, keyed by their names, at one moment of the run; `wall_seconds` of training, over resumes."""

    def text(self, tag: str, text: str, steps: int) -> None:
        """Writes a text, such as the operative config; a writer without a place for it drops it."""

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

    Where the disk fails, a warning says so and nothing more is written: curves alone are not worth a run.

    Args:
      directory: of the event files.
      purge_step: steps from which on a resumed run writes again (the resumed checkpoint's steps + 1, for
        what was written AT the checkpoint stays); TensorBoard forgets everything at or past them.

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
    """One wide table: the counters, then a column for each name; a cell without a value is empty.

    A name that was not there before adds a column at the end, for which the file is rewritten whole. Each row is
    flushed, so that a kill costs at most the row in the making; the next writer drops that half row.

    Args:
      path: of the file, usually `metrics.csv`; an existing one is continued.
      resume_steps: rows past these steps are cut, because a resumed run writes them again; None cuts none.

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
        """The header and the rows; a last line without its end, which a kill has left, is dropped."""
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
        """Replaces the file by the columns and `rows`, which may be short of the newest columns, and opens it."""
        content = io.StringIO(newline="")
        writer = csv.writer(content, lineterminator="\n")
        writer.writerow(self._columns)
        writer.writerows(row + [""] * (len(self._columns) - len(row)) for row in rows)
        write_atomically(self._path, content.getvalue())
        # Without a buffer, which `close` would try to write again where the disk has failed.
        with writing(self._path):
            self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115, closed by `close`


class _Moment(NamedTuple):
    seconds: float
    done: float
    steps: int


class ConsoleProgress:
    """How far a run is, for a person: a bar on a terminal, a plain line now and then in a pipe.

    Rates are those of the recent window, and the first `update` is only where counting starts: the steps of an
    earlier process are nobody's speed. So call it once before the first iteration.

    Args:
      budget: what `done` reaches at the end, positive.
      unit: of `budget` and `done`, such as 'env steps', 'iterations' or 'seconds'.
      stream: sys.stderr when None.
      period_seconds: between two lines in a pipe.
      window_seconds: over which rates are measured.
      clock: in seconds.
    """

    REDRAW_SECONDS = 0.1  # on a terminal; drawing costs more than a small network's step

    def __init__(
        self,
        budget: float,
        unit: str = "env steps",
        stream: TextIO | None = None,
        period_seconds: float = 5.0,
        window_seconds: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._budget = budget
        self._unit = unit
        self._stream = sys.stderr if stream is None else stream
        self._window_seconds = window_seconds
        self._clock = clock
        self._moments: deque[_Moment] = deque()  # the first is about a window old
        self._last_shown = clock()
        self._unshown: tuple[_Moment, dict[str, float]] | None = None
        self._bar = None
        self._period_seconds = period_seconds
        if self._stream.isatty():
            self._period_seconds = self.REDRAW_SECONDS
            bar_format = "{percentage:3.0f}%|{bar}| {desc}"
            self._bar = _Bar(total=budget, file=self._stream, bar_format=bar_format, dynamic_ncols=True)

    def update(self, done: float, steps: int, values: dict[str, float]) -> None:
        """Shows the state, if it is time to.

        Args:
          done: how much of the budget is spent, earlier processes included.
          steps: of the whole run.
          values: keyed by short names, such as 'return' and 'loss'; shown in their order.
        """
        moment = _Moment(self._clock(), done, steps)
        if not self._moments or moment.seconds - self._moments[-1].seconds >= self._window_seconds / 100:
            self._moments.append(moment)  # spaced, so that there are about a hundred of them however fast updates come
        while len(self._moments) > 1 and self._moments[1].seconds <= moment.seconds - self._window_seconds:
            self._moments.popleft()
        self._unshown = (moment, values)
        if moment.seconds - self._last_shown >= self._period_seconds:
            self._show()

    def line(self, text: str) -> None:
        """Prints a message above the bar."""
        if self._bar is None:
            print(text, file=self._stream, flush=True)
        else:
            self._bar.write(text, file=self._stream)

    def close(self) -> None:
        """Shows the last state, if it was not shown, and ends the bar."""
        self._show()
        if self._bar is not None:
            self._bar.close()

    def _show(self) -> None:
        if self._unshown is None:
            return
        moment, values = self._unshown
        self._unshown = None
        self._last_shown = moment.seconds
        share = min(max(moment.done / self._budget, 0.0), 1.0)
        budget = _grouped(self._budget)
        count = f"{_grouped(moment.done).rjust(len(budget))} / {budget} {self._unit}"
        parts = [*self._speed(moment), *(f"{name} {_short(value)}" for name, value in values.items())]
        parts += self._time_left(moment)
        if self._bar is None:
            self.line("  " + "  ".join([count, f"{share:.0%}", *parts]))
        else:
            self._bar.n = share * self._budget  # tqdm drops its total when n is past it
            self._bar.set_description_str("  ".join([count, *parts]), refresh=True)

    def _speed(self, now: _Moment) -> list[str]:
        seconds = now.seconds - self._moments[0].seconds
        if seconds <= 0:
            return []
        return [f"{_grouped((now.steps - self._moments[0].steps) / seconds)} steps/s"]

    def _time_left(self, now: _Moment) -> list[str]:
        seconds, done = now.seconds - self._moments[0].seconds, now.done - self._moments[0].done
        if seconds <= 0 or done <= 0:
            return []
        minutes, left = divmod(round(max(self._budget - now.done, 0.0) * seconds / done), 60)
        hours, minutes = divmod(minutes, 60)
        return [f"left {hours}:{minutes:02d}:{left:02d}" if hours else f"left {minutes}:{left:02d}"]


class _Bar(tqdm):
    monitor_interval = 0  # no watching thread: unrollers may fork


def _grouped(number: float) -> str:
    """`12288` as `12 288`."""
    return f"{number:,.0f}".replace(",", " ")


def _short(value: float) -> str:
    return _grouped(value) if 1000 <= abs(value) < 1e9 else significant(value)
