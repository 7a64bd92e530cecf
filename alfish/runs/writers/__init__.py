"""Destinations of a run's summaries: files in its directory, and experiment trackers.

Nothing here is specific to RL.
"""

import importlib
from typing import TYPE_CHECKING, Any

from alfish.runs.writers.csv_writer import CSVWriter
from alfish.runs.writers.tensorboard import TensorBoardWriter
from alfish.runs.writers.writer import COUNTERS, Counters, Histogram, Image, MultiWriter, RunOrigin, Shown, Writer

if TYPE_CHECKING:
    from alfish.runs.writers.mlflow_writer import MlflowWriter
    from alfish.runs.writers.trackio_writer import TrackioWriter
    from alfish.runs.writers.wandb_writer import WandbWriter

TRACKERS = {"MlflowWriter": "mlflow_writer", "TrackioWriter": "trackio_writer", "WandbWriter": "wandb_writer"}

__all__ = [
    "COUNTERS",
    "CSVWriter",
    "Counters",
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


def __getattr__(name: str) -> Any:
    """Imports an experiment tracker when it is first used."""
    if name not in TRACKERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{TRACKERS[name]}"), name)
