"""The base class of writers that send summaries to experiment trackers."""

import abc
import importlib.util
import json
import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from absl import logging

from alfish.errors import UsageError, first_line
from alfish.runs import contents
from alfish.runs.files import make_directory, temporary_of
from alfish.runs.writers.writer import Counters, Histogram, Image, RunOrigin, Writer

DIRECTORY = "trackers"  # directory of the records in a run's directory


class Tracker(Writer):
    """A writer that sends a run's summaries to an experiment tracker.

    A resumed run continues the same run of the tracker, without sending values twice. A process sends a value only if
    its clock is above the clocks of all values that earlier processes have sent under the same first segment of a name
    (`train` in `train/loss`). The run's directory stores these clocks and the id of the tracker's run in `trackers/`.

    If the tracker fails, the writer warns once, and sends nothing more in this process; training continues.

    A subclass implements the methods below. Each of them except `check` may raise any error.
    """

    title: ClassVar[str]  # name of the tracker, for messages
    package: ClassVar[str]  # name of the module to import
    extra: ClassVar[str]  # extra of alfish that installs the package
    environment: ClassVar[Mapping[str, str]] = {}  # environment variables to set before the import

    def check(self) -> None:
        """Raises UsageError if the settings cannot work, without connecting. Default: does nothing."""

    @abc.abstractmethod
    def connect(self, run: RunOrigin, id: str, is_new: bool, settings: Mapping[str, Any]) -> str:
        """Begins or continues the run of the tracker; returns its id, by which a resumed run finds it.

        Args:
          run: run whose summaries are sent.
          id: id that an earlier call returned; for a new run, an id that the tracker may use.
          is_new: whether no earlier process has connected the run to the tracker.
          settings: settings of the run, by name, with its provenance as `provenance.NAME`.
        """

    @abc.abstractmethod
    def send(self, values: dict[str, float], steps: int, wall_seconds: float) -> None:
        """Sends values by name; the run's counters are named `counters/NAME`."""

    @abc.abstractmethod
    def finish(self) -> None:
        """Ends the connection; another process may continue the run of the tracker."""

    def send_histogram(self, name: str, histogram: Histogram, steps: int) -> None:
        """Sends a histogram. Default: does nothing."""

    def send_image(self, name: str, image: Image, steps: int) -> None:
        """Sends an image. Default: does nothing."""

    def send_film(self, name: str, path: Path, steps: int) -> None:
        """Sends a film. Default: does nothing."""

    def send_texts(self, texts: Mapping[str, str]) -> None:
        """Sends the configuration files of a new run. Default: does nothing, and the tracker has only the settings."""

    def start(self, run: RunOrigin) -> None:
        if importlib.util.find_spec(self.package) is None:
            raise UsageError(
                f"{type(self).__name__} needs {self.package}, which is missing; pip install 'alfish[{self.extra}]'"
            )
        for name, value in self.environment.items():
            os.environ.setdefault(name, value)
        self.check()
        self._run = run
        self._is_open = False
        self._has_failed = False
        self._record = Record(run.directory / DIRECTORY / f"{self.extra}.json")

    def describe(self, settings: Mapping[str, Any], texts: Mapping[str, str], provenance: Mapping[str, Any]) -> None:
        is_new = self._record.id is None
        settings = {**settings, **{f"provenance.{name}": value for name, value in provenance.items()}}

        def connect() -> None:
            self._record.id = self.connect(self._run, self._record.id or self._run.id, is_new, settings)
            self._is_open = True
            self._record.save()
            if is_new:
                self.send_texts(texts)

        self._attempt(connect)

    def scalars(self, values: dict[str, float], counters: Counters) -> None:
        steps = counters.steps
        new = {name: float(value) for name, value in values.items() if self._record.is_new(name, steps)}
        if new:
            new |= {f"counters/{name}": float(counter) for name, counter in counters._asdict().items()}
            self._send([*new], steps, lambda: self.send(new, steps, counters.wall_seconds))

    def histogram(self, name: str, histogram: Histogram, steps: int) -> None:
        self._send([name], steps, lambda: self.send_histogram(name, histogram, steps))

    def image(self, name: str, image: Image, steps: int) -> None:
        self._send([name], steps, lambda: self.send_image(name, image, steps))

    def film(self, name: str, path: Path, steps: int) -> None:
        self._send([name], steps, lambda: self.send_film(name, path, steps))

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._attempt(self.finish)

    def _send(self, names: list[str], steps: int, send: Callable[[], Any]) -> None:
        if self._is_open and any(self._record.is_new(name, steps) for name in names):
            self._attempt(lambda: self._send_recorded(names, steps, send))

    def _send_recorded(self, names: list[str], steps: int, send: Callable[[], Any]) -> None:
        # Recorded before sending, so that a killed process loses values instead of sending them twice.
        self._record.add(names, steps)
        send()

    def _attempt(self, call: Callable[[], Any]) -> None:
        if self._has_failed:
            return
        try:
            call()
        except Exception as error:  # errors of any library and network, because training must continue
            self._has_failed, self._is_open = True, False
            logging.warning(
                "%s failed and receives nothing more from this process; metrics.csv and TensorBoard have all values "
                "(%s: %s)",
                self.title,
                type(error).__name__,
                first_line(error),
            )


class Record:
    """The id of a tracker's run, and the clocks up to which values were sent.

    Args:
      path: path of the file.

    Attributes:
      id: id that the tracker gave to the run; None before anything was sent.

    Raises:
      UsageError: the file was not written by a Record.
    """

    def __init__(self, path: Path):
        self._path = path
        self.id: str | None = None
        self._sent: dict[str, int] = {}  # newest clock, by the first segment of names
        if path.exists():
            try:
                content = contents.parsed(path, contents.content_of(path))
                self.id, self._sent = str(content["id"]), {str(name): int(n) for name, n in content["sent"].items()}
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                raise UsageError(
                    f"{path} is not the record of a tracker ({first_line(error)}); remove it to begin a new run of the "
                    "tracker"
                ) from error
        self._resumed = dict(self._sent)

    def is_new(self, name: str, steps: int) -> bool:
        """Returns True if no earlier process has sent a value of `name` at the clock `steps`."""
        return steps > self._resumed.get(name.partition("/")[0], -1)

    def add(self, names: list[str], steps: int) -> None:
        """Records that values of the given names are sent."""
        later = {name.partition("/")[0] for name in names}
        later = {segment for segment in later if steps > self._sent.get(segment, -1)}
        if later:
            self._sent |= dict.fromkeys(later, steps)
            self.save()

    def save(self) -> None:
        """Writes the file without waiting for the disk, because the file need not survive a power cut."""
        make_directory(self._path.parent)
        temporary = Path(f"{temporary_of(self._path)}.{secrets.token_hex(4)}")
        try:
            temporary.write_text(json.dumps({"id": self.id, "sent": self._sent}) + "\n")
            os.replace(temporary, self._path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
