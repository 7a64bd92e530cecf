"""The interface of writers, and the values other than numbers that a run can show: histograms and images."""

import contextlib
import struct
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

MAX_VALUES = 10_000  # maximum number of values that a histogram counts; larger arrays are subsampled evenly
NUM_BINS = 32
LARGEST_BIN = 2.0**52  # above this size, float64 cannot represent an integer plus 0.5


class Histogram(NamedTuple):
    """Counts of values.

    Attributes:
      counts: number of values in each bin, `[K]` float64.
      edges: edges of the bins, `[K+1]` float64, ascending; bin k has the values from edges[k] to edges[k+1].
      sum, sum_squares: sum of the values, and of their squares.
    """

    counts: np.ndarray
    edges: np.ndarray
    sum: float
    sum_squares: float

    @classmethod
    def of(cls, values: Any) -> "Histogram":
        """Returns the histogram of the finite values of an array or tensor.

        If the values are integers and span fewer than `NUM_BINS`, each integer has a bin of its own.
        """
        flat = _on_host(values).reshape(-1)
        flat = flat[:: -(-len(flat) // MAX_VALUES) or 1].astype(np.float64)
        flat = flat[np.isfinite(flat)]
        low, high = (float(flat.min()), float(flat.max())) if len(flat) else (0.0, 0.0)
        if (flat == np.round(flat)).all() and high - low < NUM_BINS and max(-low, high) < LARGEST_BIN:
            edges = np.arange(low - 0.5, high + 1)
        else:
            margin = 0.0 if high - low > 1e-9 * max(-low, high) else max(1e-6 * max(-low, high), 1e-6)
            edges = np.linspace(low - margin, high + margin, NUM_BINS + 1)
        counts, _ = np.histogram(flat, edges)
        return cls(counts.astype(np.float64), edges, float(flat.sum()), float((flat**2).sum()))


class Image(NamedTuple):
    """A picture, `[H, W, 3]` uint8."""

    pixels: np.ndarray

    def to_png(self) -> bytes:
        """Returns the content of a PNG file."""
        height, width, _ = self.pixels.shape
        rows = np.concatenate([np.zeros((height, 1), np.uint8), self.pixels.reshape(height, -1)], 1)  # filter 0: none
        header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
        chunks = (b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes())), (b"IEND", b"")
        return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*chunk) for chunk in chunks)


Shown = float | Histogram | Image


def shown_value(value: Any) -> Shown:
    """Converts a value to a number, a histogram or an image.

    Args:
      value: value to convert. A number or an array with one entry becomes a number, `[H, W, 3]` or `[H, W, 1]` uint8 an
        image, and any other array a histogram of its entries. A `Histogram` or an `Image` is returned as it is.

    Raises:
      TypeError: the value is something else, such as a string.
    """
    if isinstance(value, (Histogram, Image)):
        return value
    array = _on_host(value)
    if array.dtype.kind not in "biuf" or array.size == 0:
        raise TypeError(f"{type(value).__name__} {value!r:.60}")
    if array.size == 1:
        return float(array.reshape(()))
    if array.ndim == 3 and array.dtype == np.uint8 and array.shape[2] in (1, 3):
        return Image(np.broadcast_to(array, (*array.shape[:2], 3)))
    return Histogram.of(array)


def _on_host(value: Any) -> np.ndarray:
    """Returns a number, array or tensor as an array; does not import torch."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = value.float() if value.is_floating_point() else value  # numpy lacks bfloat16
    return np.asarray(value)


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


class Counters(NamedTuple):
    """Counters of a run. Their names are the first columns of metrics.csv, in this order.

    Attributes:
      steps: clock of the values, see `Clock.value`.
      env_steps, iterations, updates, wall_seconds: values of the other counters of `Clock`.
    """

    steps: int
    env_steps: int
    iterations: int
    updates: int
    wall_seconds: float


COUNTERS = Counters._fields


class RunOrigin(NamedTuple):
    """The run whose values a writer writes.

    Attributes:
      directory: directory of the run.
      id: id of the run, which its directory stores, so it stays the same after a resume.
      log: function that shows a line to the user.
    """

    directory: Path
    id: str
    log: Any = print


class Writer:
    """Base class of writers of summaries. A subclass may leave out any method; `Writer()` writes nothing.

    `steps` is the clock of a value, as in `Counters.steps`. A name has segments separated by `/`.
    """

    def start(self, run: RunOrigin) -> None:
        """Prepares the writer; called once in each process, before anything is written."""

    def describe(self, settings: Mapping[str, Any], texts: Mapping[str, str], provenance: Mapping[str, Any]) -> None:
        """Writes the description of the run, once in each process.

        Args:
          settings: the configuration, each parameter by its name (`PPO.gamma`).
          texts: the configuration as gin files, by file name.
          provenance: origin of the process: versions, machine, seed.
        """

    def scalars(self, values: dict[str, float], counters: Counters) -> None:
        """Writes values by name, together with the counters of the run."""

    def histogram(self, name: str, histogram: Histogram, steps: int) -> None: ...

    def image(self, name: str, image: Image, steps: int) -> None: ...

    def film(self, name: str, path: Path, steps: int) -> None:
        """Shows a film, an mp4 file in the run's directory."""

    def text(self, name: str, text: str, steps: int) -> None:
        """Writes a text, such as the configuration."""

    def close(self) -> None:
        """Writes the remaining values, also after an error."""


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

    def scalars(self, values: dict[str, float], counters: Counters) -> None:
        for writer in self._writers:
            writer.scalars(values, counters)

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
        with contextlib.ExitStack() as stack:  # closes all writers even if one fails
            for writer in reversed(self._writers):
                stack.callback(writer.close)
