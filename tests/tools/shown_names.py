"""Names that runs show, and the table of them in docs/monitoring.md."""

import csv
import functools
import re
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

PAGE = Path(__file__).parents[2] / "docs" / "monitoring.md"


def names_in(run):
    """Returns the names of everything in a run's metrics.csv and TensorBoard files, without the configuration."""
    with open(run / "metrics.csv") as file:
        columns = next(csv.reader(file))[5:]
    events = EventAccumulator(str(run / "tensorboard")).Reload().Tags()
    return {*columns, *events["scalars"], *events["histograms"], *events["images"]}


@functools.cache
def patterns():
    """Returns a pattern of each name in the table; names of users' own parts are left out."""
    rows = re.findall(r"^\| (`[^|]+) \| ([^|]+) \|$", PAGE.read_text(), re.MULTILINE)
    names = [name for cell, text in rows if "of your own" not in text for name in re.findall(r"`([^`]+)`", cell)]
    return [re.compile(re.sub(r"[A-Z]+", r"[^/]+", re.escape(name))) for name in names if "/" in name]


def is_documented(name):
    return any(pattern.fullmatch(name) for pattern in patterns())
