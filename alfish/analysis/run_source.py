"""Runs of `alfish train`: configurations, metrics.csv and evaluations, read without gin and torch."""

import difflib
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from alfish.analysis.series import AXIS_WORDS, Series
from alfish.errors import UsageError, argument
from alfish.parameters.description import CONFIG_FILE, OPERATIVE_FILE
from alfish.parameters.differences import name_of, reference, tail, values
from alfish.runs import contents
from alfish.runs.writers.writer import COUNTERS
from alfish.training.evaluations.evaluation import mean
from alfish.training.evaluations.results import scalars_of

METRICS_FILE = "metrics.csv"
EVALUATION = "evaluation"  # default name of the listener Evaluate


class RunSeriesSource:
    """A run directory; a `SeriesSource`.

    Args:
      directory: directory of the run.
      label: label that the user has given to the run; None means no label.
    """

    def __init__(self, directory: Path, label: str | None = None):
        self.directory = directory
        self.label = label
        self.name = str(directory)
        self.notes: list[str] = []

    @cached_property
    def bindings(self) -> Mapping[str, str]:
        """All bindings of the run with defaults, or only the user's bindings if defaults were not saved."""
        for file in (OPERATIVE_FILE, CONFIG_FILE):
            if (text := contents.text(self.directory, file)) is not None:
                return values(text, str(self.directory / file))
        return {}

    @property
    def seed(self) -> str | None:
        return self.bindings.get("Trainer.seed")

    @property
    def environment(self) -> str | None:
        """The environment's gymnasium id, the game, or the class or function that makes it; None means unknown."""
        default = "@make_environment" if "make_environment.env_id" in self.bindings else ""
        made = reference(self.bindings.get("Trainer.environment", default))
        makers = made, tail(made.rpartition("/")[2], 1)

        def bound(parameter: str) -> str | None:
            names = [f"{maker}.{parameter}" for maker in makers]
            return next((self.bindings[name] for name in names if name in self.bindings), None)

        env_id, game = bound("env_id"), bound("game")
        found = name_of((env_id or game or made).strip("'\"")).rpartition(":")[2]
        return (tail(found, 1) if game else found) or None  # a game is in a module: 'mpe2.simple_tag_v3'

    @property
    def evaluation(self) -> str:
        """Name of the evaluations of `@Evaluate()`."""
        return self.bindings.get("Evaluate.name", EVALUATION).strip("'\"")

    @property
    def metrics(self) -> list[str]:
        """Names of the columns of metrics.csv that have values, without clocks."""
        table = self._metrics
        return [name for name in table.header if name not in COUNTERS and table.is_filled(name).any()]

    def series(self, metric: str) -> Series:
        table = self._metrics
        if metric in table.header:
            if not (kept := table.is_filled(metric)).any():
                raise UsageError(self._missing(metric, []))
            return Series(table.clocks(kept), table.numbers(metric)[kept])
        name, _, column = metric.rpartition("/")
        if evaluations := read_evaluations(self.directory, name, column):
            return self._of_evaluations(name, evaluations)
        raise UsageError(self._missing(metric, table.header))

    @cached_property
    def _metrics(self) -> "MetricsTable":
        """Table of metrics.csv and of the results of `alfish watch`, sorted by steps."""
        path, watched = self.directory / METRICS_FILE, scalars_of(self.directory)
        content = contents.content(self.directory, METRICS_FILE, contents.MAX_TABLE)
        if content is None and not watched:
            raise UsageError(
                f"{self.name} has no {METRICS_FILE} yet: it was not trained, or was trained without the listener "
                "Summaries"
            )
        header, rows = (list(COUNTERS), []) if content is None else self._written_metrics(path, content)
        if watched:
            new = dict.fromkeys(name for row in watched for name in row if name not in header)
            header, rows = [*header, *new], [[*row, *("" for _ in new)] for row in rows]
            rows += [[str(row.get(name, "")) for name in header] for row in watched]
            steps = contents.clocks([row[header.index("steps")] for row in rows], path)
            rows = [rows[k] for k in np.argsort(steps, kind="stable")]
        return MetricsTable(path, header, rows)

    def _written_metrics(self, path: Path, content: bytes) -> tuple[list[str], list[list[str]]]:
        """Returns header and rows of metrics.csv, without an incomplete last row."""
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            self.notes.append(f"{path} ends within a row, which is left out")
        header, rows = contents.rows_of(path, whole)
        missing = [name for name in COUNTERS if name not in header]
        if missing:
            raise UsageError(f"{path} is not a table of metrics: it has no column {missing[0]}")
        return header, rows

    @property
    def clock_words(self) -> str:
        """Unit of the clocks in the names of evaluation files, in words for an axis."""
        table = self._metrics
        steps, env_steps = (float(table.numbers(name)[-1]) if len(table) else 0.0 for name in ("steps", "env_steps"))
        if not env_steps:
            return AXIS_WORDS["updates"]
        # In idle clock steps, the clock advances without environment steps.
        return AXIS_WORDS["env_steps"] if env_steps >= steps else "clock steps"

    def _of_evaluations(self, name: str, evaluations: Mapping[int, tuple[float, ...]]) -> Series:
        """Returns the mean over the episodes of each evaluation, with the clocks of its row in metrics.csv."""
        table = self._metrics
        own = next((column for column in table.header if column.startswith(f"{name}/")), None)
        steps = [int(one) for one in table.numbers("steps")]
        kept = np.isin(steps, list(evaluations)) & (False if own is None else table.is_filled(own))
        if not kept.any():
            raise UsageError(f"{self.name} has evaluations without rows in {METRICS_FILE}, which stores their steps")
        means = [mean(evaluations[one]) for one, is_kept in zip(steps, kept) if is_kept]
        return Series(table.clocks(kept), np.array(means))

    def _missing(self, metric: str, header: list[str]) -> str:
        """Returns the reason why the run does not have the metric, as a sentence."""
        prefix = metric.rpartition("/")[0]
        if prefix == EVALUATION and not any(name.startswith(f"{prefix}/") for name in header):
            if others := [name for name in header if name.endswith("/mean_return")]:
                one = argument("metric", others[0])
                return f"{self.name} has no evaluation with this name; it has for example {one}"
            return f"{self.name} has no evaluation yet; the first is due after Evaluate.period clock steps"
        close = difflib.get_close_matches(metric, header, 3, 0.4)
        hint = f"; close ones are {', '.join(close)}" if close else ""
        return f"{self.name} has no metric {metric!r}, neither in {METRICS_FILE} nor in its evaluations{hint}"


class MetricsTable:
    """Table of metrics. The cells of a column are converted to numbers when it is first read.

    Args:
      path: file of the table, for messages.
      header: names of the columns, including `COUNTERS`.
      rows: cells of each row.
    """

    def __init__(self, path: Path, header: Sequence[str], rows: Sequence[Sequence[str]]):
        self.header = list(header)
        self._path = path
        self._length = len(rows)
        columns = zip(*rows) if rows else ((),) * len(header)
        self._cells = dict(zip(header, columns))
        self._numbers: dict[str, np.ndarray] = {}

    def __len__(self) -> int:
        return self._length

    def is_filled(self, name: str) -> np.ndarray:
        """Returns a mask `[N]` of the rows in which a column has a value."""
        return np.fromiter(map(bool, self._cells[name]), bool, self._length)

    def numbers(self, name: str) -> np.ndarray:
        """Returns a column `[N]`, with nan for missing values.

        Raises:
          UsageError: a cell is not a number, or a counter is negative or not finite.
        """
        if name not in self._numbers:
            read = contents.clocks if name in COUNTERS else contents.numbers
            self._numbers[name] = read([cell or "nan" for cell in self._cells[name]], self._path)
        return self._numbers[name]

    def clocks(self, kept: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the clocks of the rows `kept`, by axis, without clocks that are always 0."""
        columns = {name: self.numbers(name)[kept] for name in COUNTERS if name != "iterations"}
        # The `steps` of an evaluation are the clock at which it was due; they are equal for all seeds.
        columns["env_steps"] = np.minimum(columns.pop("steps"), columns["env_steps"])
        return {name: column for name, column in columns.items() if column.any()}


def is_run(directory: Path) -> bool:
    return any((directory / name).is_file() for name in (CONFIG_FILE, METRICS_FILE))


def read_evaluations(directory: Path, name: str = EVALUATION, column: str = "return") -> dict[int, tuple[float, ...]]:
    """Returns a column of the episodes of each evaluation, by the clock of the evaluation, ascending.

    Evaluations without the column are left out, because a resumed run may have more columns than it had before.
    Episodes with an empty cell are left out, and so are evaluations in which all cells are empty.

    Args:
      directory: directory of the run.
      name: name of the evaluations, as in `Evaluate.name`.
      column: name of the column in the files of `eval/`.

    Raises:
      UsageError: a file is not a complete table or has no rows, or a cell of the column is not a number.
    """
    found = {}
    for path in sorted((directory / "eval").glob(f"{name}-*.csv")) if name and "/" not in name else ():
        if clock := re.fullmatch(rf"{re.escape(name)}-(\d{{12,18}})\.csv", path.name):
            header, rows = contents.table(directory, f"eval/{path.name}") or ([], [])
            if not rows:
                raise UsageError(f"{path} has no episodes; restore it, or move it away")
            if column in header:
                index = header.index(column)
                if cells := [row[index] for row in rows if row[index]]:
                    found[int(clock[1])] = tuple(contents.numbers(cells, path).tolist())
    return found
