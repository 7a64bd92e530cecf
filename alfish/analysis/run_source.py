"""Runs of `alfish train`: their configuration, metrics.csv and evaluations, read as text without gin and torch."""

import csv
import difflib
import io
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from alfish.analysis.series import AXIS_WORDS, Series
from alfish.errors import UsageError, first_line, printable
from alfish.parameters.description import CONFIG_FILE, OPERATIVE_FILE
from alfish.parameters.differences import name_of, reference, tail, values
from alfish.runs.files import open_regular
from alfish.training.evaluations.results import scalars_of
from alfish.writers import COUNTERS

METRICS_FILE = "metrics.csv"
EVALUATION = "evaluation"  # name of the listener Evaluate, by default


class RunSource:
    """A run directory; a `Source`.

    Args:
      directory: of the run.
      label: that the user has given it.
    """

    def __init__(self, directory: Path, label: str | None = None):
        self.directory, self.label, self.name = directory, label, str(directory)
        self.notes: list[str] = []

    @cached_property
    def bindings(self) -> Mapping[str, str]:
        """Each binding in force, defaults included; as it was given, if the run has saved no more."""
        for file in (OPERATIVE_FILE, CONFIG_FILE):
            if (self.directory / file).is_file():
                return values((self.directory / file).read_text(errors="replace"))
        return {}

    @property
    def seed(self) -> str | None:
        return self.bindings.get("Trainer.seed")

    @property
    def environment(self) -> str | None:
        """The id of gymnasium, or the name of the class or function that makes the environment."""
        default = "@make_environment" if "make_environment.env_id" in self.bindings else ""
        made = reference(self.bindings.get("Trainer.environment", default))
        names = [f"{name}.env_id" for name in (made, tail(made.rpartition("/")[2], 1))]
        env_id = next((self.bindings[name] for name in names if name in self.bindings), made)
        return name_of(env_id.strip("'\"")).rpartition(":")[2] or None

    @property
    def metrics(self) -> list[str]:
        """Names of the columns of metrics.csv that have a value, without its clocks."""
        header, rows = self._metrics
        return [name for k, name in enumerate(header) if name not in COUNTERS and any(row[k] for row in rows)]

    def series(self, metric: str) -> Series:
        header, rows = self._metrics
        if metric in header:
            return self._series(header, rows, header.index(metric), metric)
        name, _, column = metric.rpartition("/")
        if evaluations := read_evaluations(self.directory, name, column):
            return self._of_evaluations(name, evaluations)
        raise UsageError(self._missing(metric, header))

    @cached_property
    def _metrics(self) -> tuple[list[str], list[list[str]]]:
        """Header and rows of metrics.csv, and of the results of `alfish watch`, in the order of their steps."""
        watched = scalars_of(self.directory)
        if not watched:
            return self._written_metrics()
        is_alone = not (self.directory / METRICS_FILE).exists()
        header, rows = (list(COUNTERS), []) if is_alone else self._written_metrics()
        new = dict.fromkeys(name for row in watched for name in row if name not in header)
        header, rows = [*header, *new], [[*row, *("" for _ in new)] for row in rows]
        rows += [[str(row.get(name, "")) for name in header] for row in watched]
        return header, sorted(rows, key=lambda row: float(row[header.index("steps")]))

    def _written_metrics(self) -> tuple[list[str], list[list[str]]]:
        """Returns header and rows of metrics.csv, without an incomplete last row."""
        path = self.directory / METRICS_FILE
        try:
            with open_regular(path) as file:
                content = file.read()
        except FileNotFoundError as error:
            raise UsageError(
                f"{self.name} has no {METRICS_FILE} yet: it was not trained, or without the listener Summaries"
            ) from error
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {error.strerror or error}") from error
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            self.notes.append(f"{path} ends within a row, which is left out")
        header, rows = table(path, whole)
        missing = [name for name in COUNTERS if name not in header]
        if missing:
            raise UsageError(f"{path} is no table of metrics: it has no column {missing[0]}")
        return header, rows

    @property
    def clock_words(self) -> str:
        """The unit of the step numbers in the names of evaluation files."""
        header, rows = self._metrics
        steps, env_steps = (float(rows[-1][header.index(name)]) if rows else 0.0 for name in ("steps", "env_steps"))
        if not env_steps:
            return AXIS_WORDS["updates"]
        return AXIS_WORDS["env_steps"] if env_steps >= steps else "clock steps"  # also without acting

    def _series(self, header: list[str], rows: list[list[str]], index: int, metric: str) -> Series:
        rows = [row for row in rows if row[index]]
        if not rows:
            raise UsageError(self._missing(metric, []))
        return Series(self._clocks(header, rows), self._column(rows, index))

    def _clocks(self, header: list[str], rows: list[list[str]]) -> dict[str, np.ndarray]:
        columns = {name: self._column(rows, header.index(name)) for name in COUNTERS if name != "iterations"}
        # Evaluations have the nominal clock at which they were due as their `steps`, which is equal for all seeds.
        columns["env_steps"] = np.minimum(columns.pop("steps"), columns["env_steps"])
        return {name: column for name, column in columns.items() if column.any()}

    def _of_evaluations(self, name: str, evaluations: Mapping[int, tuple[float, ...]]) -> Series:
        """Returns the means over the episodes of evaluations, at the clocks that metrics.csv has for them."""
        header, rows = self._metrics
        own = [k for k, column in enumerate(header) if column.startswith(f"{name}/")][:1]
        rows = [row for row in rows if any(row[k] for k in own) and int(row[0]) in evaluations]
        if not rows:
            raise UsageError(f"{self.name} has evaluations without rows in {METRICS_FILE}, which has their clocks")
        return Series(self._clocks(header, rows), np.array([np.mean(evaluations[int(row[0])]) for row in rows]))

    def _column(self, rows: list[list[str]], index: int) -> np.ndarray:
        return numbers([row[index] for row in rows], self.directory / METRICS_FILE)

    def _missing(self, metric: str, header: list[str]) -> str:
        """Returns why there is no such metric."""
        prefix = metric.rpartition("/")[0]
        if prefix == EVALUATION and not any(name.startswith(f"{prefix}/") for name in header):
            if others := [name for name in header if name.endswith("/mean_return")]:
                return f"{self.name} has no evaluation of this name; one of its evaluations is --metric={others[0]}"
            return f"{self.name} has no evaluation yet; the first is due after Evaluate.period clock steps"
        close = difflib.get_close_matches(metric, header, 3, 0.4)
        hint = f"; close ones are {', '.join(close)}" if close else ""
        return f"{self.name} has no metric {metric!r}, neither in {METRICS_FILE} nor in its evaluations{hint}"


def is_run(directory: Path) -> bool:
    return any((directory / name).is_file() for name in (CONFIG_FILE, METRICS_FILE))


def read_evaluations(directory: Path, name: str = EVALUATION, column: str = "return") -> dict[int, tuple[float, ...]]:
    """Returns one column of the episodes of each evaluation of a run, by clock, ascending; empty if there is none.

    Args:
      directory: of the run.
      name: of the listener Evaluate.
      column: of the files in `eval/`.

    Raises:
      UsageError: a file is not whole.
    """
    found = {}
    for path in sorted((directory / "eval").glob(f"{name}-*.csv")) if name and "/" not in name else ():
        if clock := re.fullmatch(rf"{re.escape(name)}-(\d{{12,}})\.csv", path.name):
            try:
                with open(path, newline="") as file:
                    rows = list(csv.DictReader(file))
                if not rows or column not in rows[0]:
                    return {}
                found[int(clock[1])] = tuple(float(row[column]) for row in rows)
            except (TypeError, ValueError, csv.Error) as error:
                raise UsageError(
                    f"{path} is no whole table of episodes ({printable(str(error))}); restore it, or remove it"
                ) from error
    return found


def table(path: Path, content: bytes) -> tuple[list[str], list[list[str]]]:
    """Returns header and rows of a CSV.

    Raises:
      UsageError: it has none, or a row of another length.
    """
    try:
        header, *rows = [row for row in csv.reader(io.StringIO(content.decode(), newline="")) if row] or [[]]
    except (ValueError, csv.Error) as error:
        raise UsageError(f"{path} is no table: {printable(str(error))}") from error
    if not header:
        raise UsageError(f"{path} is empty; it should begin with the names of its columns")
    for number, row in enumerate(rows, start=1):
        if len(row) != len(header):
            raise UsageError(f"{path}, row {number}, has {len(row)} cells and not {len(header)}; mend or move the file")
    return header, rows


def numbers(cells: Sequence[str], path: Path) -> np.ndarray:
    """Returns a column of a CSV as numbers.

    Raises:
      UsageError: a cell is something else.
    """
    try:
        return np.array([float(cell) for cell in cells])
    except ValueError as error:
        raise UsageError(f"{path} has no number where it should: {first_line(error)}; mend or move the file") from error
