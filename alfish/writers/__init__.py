"""Destinations of what a run shows: files of its directory, and experiment trackers. Knows no RL."""

from alfish.writers.mlflow_writer import MlflowWriter
from alfish.writers.table import CSVWriter
from alfish.writers.tensorboard import TensorBoardWriter
from alfish.writers.trackio_writer import TrackioWriter
from alfish.writers.values import Histogram, Image, Shown
from alfish.writers.wandb_writer import WandbWriter
from alfish.writers.writer import COUNTERS, MultiWriter, RunOrigin, Writer

__all__ = [
    "COUNTERS",
    "CSVWriter",
    "Histogram",
    "Image",
    "MlflowWriter",
    "MultiWriter",
    "RunOrigin",
    "Shown",
    "TensorBoardWriter",
    "TrackioWriter",
    "WandbWriter",
    "Writer",
]
