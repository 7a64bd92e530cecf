"""Values that a run can show besides numbers: histograms and images."""

import struct
import zlib
from typing import Any, NamedTuple

import numpy as np

MAX_VALUES = 10_000  # of a histogram; of more, evenly spaced ones are counted
NUM_BINS = 32
LARGEST_BIN = 2.0**52  # from there on, a whole number plus 0.5 is no float64


class Histogram(NamedTuple):
    """Counts of values.

    Attributes:
      counts: `[K]` float64.
      edges: `[K+1]` float64, ascending; bin k has the values from edges[k] to edges[k+1].
      sum, sum_squares: of the values.
    """

    counts: np.ndarray
    edges: np.ndarray
    sum: float
    sum_squares: float

    @classmethod
    def of(cls, values: Any) -> "Histogram":
        """Returns the histogram of the finite values of an array or tensor; whole numbers have a bin each."""
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
        rows = np.concatenate([np.zeros((height, 1), np.uint8), self.pixels.reshape(height, -1)], 1)  # no filter
        header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
        chunks = (b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes())), (b"IEND", b"")
        return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*chunk) for chunk in chunks)


Shown = float | Histogram | Image


def shown_value(value: Any) -> Shown:
    """Returns a number, a histogram or an image.

    Args:
      value: a number or an array of one; `[H, W, 3]` or `[H, W, 1]` uint8, an image; other arrays, the values of a
        histogram; or a `Histogram` or an `Image`.

    Raises:
      TypeError: it is something else, such as a string.
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
    """Returns a number, array or tensor as an array; torch is not imported here."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = value.float() if value.is_floating_point() else value  # numpy has no bfloat16
    return np.asarray(value)


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
