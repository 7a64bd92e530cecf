"""TensorBoard event files."""

import contextlib
import os
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from absl import logging

from alfish.errors import UsageError
from alfish.runs.film_file import as_gif
from alfish.runs.writers.writer import COUNTERS, Counters, Histogram, Image, Writer


class TensorBoardWriter(Writer):
    """Writes TensorBoard event files; counters other than steps are named `counters/NAME`.

    If the disk fails, the writer logs a warning and stops; the run continues.

    Args:
      directory: directory of the event files.
      purge_step: step from which on TensorBoard discards values of earlier processes, because a resumed run writes them
        again: 1 + the step of the checkpoint from which the run resumes. None discards nothing.

    Raises:
      UsageError: if TensorBoard is not installed.
    """

    def __init__(self, directory: str | os.PathLike, purge_step: int | None = None):
        try:
            from tensorboard.compat.proto import (
                event_pb2,
                summary_pb2,
            )  # imported here, because it takes some tenths of a second
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ImportError as error:
            raise UsageError("TensorBoard is not installed; pip install tensorboard.") from error
        self._event = event_pb2.Event
        self._summary = summary_pb2.Summary
        self._path = Path(directory)
        self._histogram, self._record_writer = summary_pb2.HistogramProto, RecordWriter
        self._file: Any = None
        self._open(purge_step)
        if purge_step is not None:
            self._write(step=purge_step, session_log=event_pb2.SessionLog(status=event_pb2.SessionLog.START))

    def scalars(self, values: dict[str, float], counters: Counters) -> None:
        others = zip(COUNTERS[1:], counters[1:])
        all_values = values | {f"counters/{name}": counter for name, counter in others}
        row = [self._summary.Value(tag=name, simple_value=float(value)) for name, value in all_values.items()]
        self._write(step=counters.steps, summary=self._summary(value=row))

    def histogram(self, name: str, histogram: Histogram, steps: int) -> None:
        counts, edges = histogram.counts, histogram.edges
        proto = self._histogram(
            min=edges[0], max=edges[-1], num=counts.sum(), sum=histogram.sum, sum_squares=histogram.sum_squares,
            bucket_limit=edges.tolist(), bucket=[0.0, *counts],
        )  # fmt: skip
        self._write(step=steps, summary=self._summary(value=[self._summary.Value(tag=name, histo=proto)]))

    def image(self, name: str, image: Image, steps: int) -> None:
        height, width, _ = image.pixels.shape
        encoded = self._summary.Image(height=height, width=width, colorspace=3, encoded_image_string=image.to_png())
        self._write(step=steps, summary=self._summary(value=[self._summary.Value(tag=name, image=encoded)]))

    def film(self, name: str, path: Path, steps: int) -> None:
        """Shows a film as a small GIF, because TensorBoard shows pictures only."""
        content = as_gif(path)
        width, height = struct.unpack_from("<HH", content, 6)  # size in the header of a GIF
        encoded = self._summary.Image(height=height, width=width, colorspace=3, encoded_image_string=content)
        self._write(step=steps, summary=self._summary(value=[self._summary.Value(tag=name, image=encoded)]))

    def text(self, name: str, text: str, steps: int) -> None:
        from torch.utils.tensorboard.summary import text as text_summary

        self._write(step=steps, summary=text_summary(name, text))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self, step: int | None) -> None:
        # torch's SummaryWriter is not used, because its thread ends with a traceback after a disk error.
        self._file = None
        with self._unless_the_disk_fails():
            self._path.mkdir(parents=True, exist_ok=True)
            name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
            self._file = open(self._path / name, "ab", buffering=0)  # noqa: SIM115, closed by `close`
        self._records = self._record_writer(self._file)
        self._write(step=step, file_version="brain.Event:2")

    def _write(self, **fields: Any) -> None:
        if self._file is not None and not os.path.lexists(self._file.name):  # deleted or moved; the run reports that
            self._file.close()
            self._open(None)
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
