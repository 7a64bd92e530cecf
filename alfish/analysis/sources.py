"""Finds the runs that the user's arguments name: directories, globs or files, with optional labels."""

import glob
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from absl import logging

from alfish.analysis.foreign import MONITOR, MonitorSource, is_monitor, read_table
from alfish.analysis.run_source import METRICS_FILE, RunSeriesSource, is_run
from alfish.analysis.series import Series, SeriesSource
from alfish.errors import UsageError

TRIALS = "trials.csv"  # file of a sweep with a row for each trial, not a curve; see `sweeps.table`
RUN_ID = "run_id"  # file that is written when a run starts
Note = Callable[[str], Any]  # function that receives a sentence for the user


def find(words: Iterable[str | Path], note: Note = logging.warning) -> list[SeriesSource]:
    """Returns the runs that the arguments name, without duplicates.

    An argument is a run directory, a directory that contains runs, a directory of monitor files of stable-baselines3, a
    single monitor file, a CSV of another program, or a glob of these. `LABEL=WORD` labels the runs. A directory without
    a run is left out with a note if other arguments name runs.

    Raises:
      UsageError: an argument does not name a run.
    """
    found: dict[Path, list[SeriesSource]] = {}
    others = []
    for word in map(str, words):
        try:
            label, pattern = _split(word)
            paths = _expanded(pattern)
        except OSError as error:
            raise UsageError(f"{word} cannot be read: {error.strerror}") from error
        for path in paths:
            runs = _runs(path)
            if not runs:
                others.append(
                    f"{path} is not a run: neither it nor its subdirectories contain config.gin or metrics.csv"
                )
            for run in runs:
                found.setdefault(run.resolve(), _read(run, label))
    if not found:
        raise UsageError(others[0] if others else "no run is given; give run directories, as in runs/ppo-*")
    for other in others:
        note(f"{other}; it is left out")
    return [source for sources in found.values() for source in sources]


def read_all(sources: Sequence[SeriesSource], metric: str, note: Note) -> dict[SeriesSource, Series]:
    """Returns the series of the metric for each run that has it; calls `note` for each run without it.

    Raises:
      UsageError: no run has the metric.
    """
    series, missing = {}, []
    for source in sources:
        try:
            series[source] = source.series(metric)
        except UsageError as error:
            missing.append(error)
    if not series:
        raise missing[0]
    for words in [*(f"{error}; it is left out" for error in missing), *(w for one in sources for w in one.notes)]:
        note(words)
    return series


def _split(word: str) -> tuple[str | None, str]:
    """Returns label and path of `LABEL=PATH`; an existing path has no label."""
    labelled = re.fullmatch(r"([^/=]+)=(.+)", word)
    return (labelled[1], labelled[2]) if labelled and not Path(word).exists() else (None, word)


def _expanded(pattern: str) -> Sequence[Path]:
    """Returns the directories and CSV files that a glob finds, or the path itself if it exists."""
    path = Path(pattern)
    if path.exists():
        return [path]
    found = sorted(Path(one) for one in glob.glob(pattern, recursive=True))
    if not found:
        raise UsageError(f"there is no run {pattern!r}")
    return [one for one in found if one.is_dir() or (one.suffix == ".csv" and one.name != TRIALS)]


def _runs(path: Path) -> list[Path]:
    """Returns the run directories and files that a path names."""
    if not path.is_dir() or is_run(path) or _monitors(path):
        return [path]
    return [one for one in sorted(path.iterdir()) if _has_begun(one) or _monitors(one)]


def _has_begun(path: Path) -> bool:
    """Returns True if a run was started in the directory; the base of a sweep has a configuration only."""
    return any((path / name).is_file() for name in (METRICS_FILE, RUN_ID))


def _read(path: Path, label: str | None) -> list[SeriesSource]:
    if path.is_dir():
        return [RunSeriesSource(path, label) if is_run(path) else MonitorSource(_monitors(path), label)]
    if is_monitor(path):
        return [MonitorSource([path], label)]
    if path.suffix != ".csv":
        remedy = f"; unpack it: alfish unpack --input={path} --root_dir=DIRECTORY" if path.suffix == ".zip" else ""
        raise UsageError(f"{path} is not a run: it is neither a directory nor a CSV file{remedy}")
    return list(read_table(path, label))


def _monitors(directory: Path) -> list[Path]:
    return sorted(directory.glob(f"*{MONITOR}"))
