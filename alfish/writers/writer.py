"""The interface of writers.

Every writer takes the run's counters and its wall time with the values, so that a curve can be drawn against any of
them later.
"""

import contextlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from alfish.writers.values import Histogram, Image

COUNTERS = ("steps", "env_steps", "iterations", "updates", "wall_seconds")


class RunOrigin(NamedTuple):
    """The run that a writer writes for.

    Attributes:
      directory: of the run.
      id: of the run, in its directory; the same after a resume.
      log: receives a line for the user.
    """

    directory: Path
    id: str
    log: Any = print


class Writer:
    """Destination of summaries. Every method may be left out, so that `Writer()` writes nothing.

    `steps` is the clock that a value belongs to. A name has segments, separated by `/`.
    """

    def start(self, run: RunOrigin) -> None:
        """Prepares the writer, before anything is written and after a resume."""

    def describe(self, settings: Mapping[str, Any], texts: Mapping[str, str], provenance: Mapping[str, Any]) -> None:
        """Receives what the run is, once in each process.

        Args:
          settings: the configuration, each parameter by its name (`PPO.gamma`).
          texts: the configuration as gin files, by file name.
          provenance: of the process: versions, machine, seed.
        """

    def scalars(
        self, values: dict[str, float], steps: int, env_steps: int, iterations: int, updates: int, wall_seconds: float
    ) -> None:
        """Writes values by name, together with the counters of the run."""

    def histogram(self, name: str, histogram: Histogram, steps: int) -> None: ...

    def image(self, name: str, image: Image, steps: int) -> None: ...

    def film(self, name: str, path: Path, steps: int) -> None:
        """Shows a film, an mp4 file in the run's directory."""

    def text(self, name: str, text: str, steps: int) -> None:
        """Writes a text, such as the configuration."""

    def close(self) -> None:
        """Writes what is left, also after an error."""


class MultiWriter(Writer):
    """Writes to each of `writers`, in order."""

    def __init__(self, writers: Iterable[Writer]):
        self._writers = tuple(writers)

    def start(self, run: RunOrigin) -> None:
        for writer in self._writers:
            writer.start(run)

    def describe(self, settings: Mapping[str, Any], texts: Mapping[str, str], provenance: Mapping[str, Any]) -> None:
        for writer in self._writers:
            writer.describe(settings, texts, provenance)

    def scalars(
        self, values: dict[str, float], steps: int, env_steps: int, iterations: int, updates: int, wall_seconds: float
    ) -> None:
        for writer in self._writers:
            writer.scalars(values, steps, env_steps, iterations, updates, wall_seconds)

    def histogram(self, name: str, histogram: Histogram, steps: int) -> None:
        for writer in self._writers:
            writer.histogram(name, histogram, steps)

    def image(self, name: str, image: Image, steps: int) -> None:
        for writer in self._writers:
            writer.image(name, image, steps)

    def film(self, name: str, path: Path, steps: int) -> None:
        for writer in self._writers:
            writer.film(name, path, steps)

    def text(self, name: str, text: str, steps: int) -> None:
        for writer in self._writers:
            writer.text(name, text, steps)

    def close(self) -> None:
        with contextlib.ExitStack() as stack:  # closes the others when one fails
            for writer in reversed(self._writers):
                stack.callback(writer.close)
