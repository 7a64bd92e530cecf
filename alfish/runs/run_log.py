"""A run's `log.txt`: lines of the trainer, and warnings printed to stderr while the run is open."""

import contextlib
import logging
import time
import warnings
from pathlib import Path
from typing import Any

from alfish.runs import files
from alfish.runs.files import DiskError

WARNING = "warning: "  # prefix of absl's warnings; Python's warnings begin with a category, such as UserWarning


class RunLog(logging.Handler):
    """Appends lines to a file, each with the time. Lines that are written before `open` stay in memory until `open`
    is called. After `close`, warnings are not appended any more.

    Args:
      path: path of the file; its directory must exist when `open` is called.
    """

    def __init__(self, path: Path):
        super().__init__(logging.WARNING)
        self._path = path
        self._waiting: list[str] | None = []  # None once the log is opened
        self._is_open = False

    def open(self) -> None:
        """Writes the lines in memory, and starts to record warnings of absl and of Python."""
        self._is_open = True
        waiting, self._waiting = self._waiting or [], None
        with contextlib.suppress(DiskError):  # ignored, because the lines have also been printed
            self._append(waiting)
        logging.getLogger("absl").addHandler(self)
        show = warnings.showwarning

        def show_and_write(
            message: Any, category: Any, filename: str, lineno: int, *rest: Any, **keywords: Any
        ) -> None:
            show(message, category, filename, lineno, *rest, **keywords)
            if self._is_open:
                self.copy(f"{filename}:{lineno}: {category.__name__}: {message}")

        self._show_before, self._show = show, show_and_write
        warnings.showwarning = show_and_write

    def write(self, text: str) -> None:
        """Appends one or more lines; raises DiskError if that fails."""
        line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n"
        if self._waiting is None:
            self._append([line])
        else:
            self._waiting.append(line)

    def copy(self, text: str) -> None:
        """Appends a text that is also printed to stderr; disk errors are ignored."""
        with contextlib.suppress(DiskError):
            self.write(text)

    def emit(self, record: logging.LogRecord) -> None:
        self.copy(f"{WARNING}{record.getMessage()}")

    def close(self) -> None:
        """Stops the recording of warnings."""
        super().close()
        if not self._is_open:
            return
        self._is_open = False
        logging.getLogger("absl").removeHandler(self)
        if warnings.showwarning is self._show:  # otherwise, a wrapper that was set later still calls `_show`
            warnings.showwarning = self._show_before

    def _append(self, lines: list[str]) -> None:
        if lines:
            with files.writing(self._path), files.open_own(self._path, "ab") as file:
                file.write("".join(lines).encode(errors="backslashreplace"))


def warnings_in(log: str) -> list[str]:
    """Returns the distinct warnings in the text of a `log.txt`, without their times."""
    lines = (line[len("YYYY-MM-DD HH:MM:SS ") :] for line in log.splitlines())
    return list(dict.fromkeys(line for line in lines if line.startswith(WARNING) or "Warning: " in line))
