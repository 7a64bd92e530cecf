"""Destinations of what a run shows: files of its directory, and experiment trackers. Knows no RL."""

from alfish.writers.table import CSVWriter
from alfish.writers.tensorboard import TensorBoardWriter
from alfish.writers.values import Histogram, Image, Shown
from alfish.writers.writer import COUNTERS, MultiWriter, RunOrigin, Writer

__all__ = [
    "COUNTERS",
    "CSVWriter",
    "Histogram",
    "Image",
    "MultiWriter",
    "RunOrigin",
    "Shown",
    "TensorBoardWriter",
    "Writer",
]
