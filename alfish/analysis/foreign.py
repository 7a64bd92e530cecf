"""Curves of other programs: monitor files of stable-baselines3, and tables with columns of steps and values."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from alfish.analysis.series import Series
from alfish.errors import UsageError, argument
from alfish.runs import contents

MONITOR = "monitor.csv"  # ending of the names of stable-baselines3's monitor files
WINDOW = 100  # number of episodes in the moving mean of returns, as in metrics/average_return
# Accepted names of columns, regardless of case and spaces; the first matching name is used.
CLOCKS = {
    "env_steps": (
        *("env_steps", "step", "steps", "global_step", "timesteps", "timestep", "total_timesteps", "num_timesteps"),
        *("time/total_timesteps", "total_steps", "environment_steps"),
    ),
    "updates": ("updates", "num_updates", "gradient_steps", "train/n_updates"),
    "wall_seconds": ("wall_seconds", "wall_time", "seconds", "time", "relative_time", "time/time_elapsed"),
}
VALUES = (
    *("mean", "value", "return", "mean_return", "average_return", "episodic_return", "episode_return"),
    *("reward", "mean_reward", "average_reward", "score", "eval/mean_reward", "rollout/ep_rew_mean", "r"),
)
SEEDS = ("seed", "run", "run_id")
ENVIRONMENTS = ("environment", "env", "env_id", "task")


class TableSource:
    """One curve of a table; a `SeriesSource`.

    Args:
      path: path of the table.
      columns: cells of each column, by the column's name in lower case.
      label: label that the user has given to the table; None means no label.
      seed, environment: seed and environment of this curve, as texts; None means unknown.
    """

    bindings: Mapping[str, str] = {}

    def __init__(
        self,
        path: Path,
        columns: Mapping[str, Sequence[str]],
        label: str | None = None,
        seed: str | None = None,
        environment: str | None = None,
    ):
        self.name = f"{path}, seed {seed}" if seed is not None else str(path)
        self.label = label or path.stem.removesuffix("-curve")
        self.seed, self.environment = seed, environment
        self.notes: list[str] = []
        self._path, self._columns = path, columns

    def series(self, metric: str) -> Series:
        """Returns the column named like the metric or like its end after the last `/`; else the first of `VALUES`."""
        value = _first((metric.lower(), metric.rpartition("/")[2].lower(), *VALUES), self._columns)
        clocks = {axis: name for axis, names in CLOCKS.items() if (name := _first(names, self._columns))}
        if value is None or not clocks:
            lacks = "value, such as 'mean'," if clocks else "clock, such as 'env_steps',"
            raise UsageError(
                f"{self._path} has no column for a {lacks} among {', '.join(self._columns)}; rename one of these "
                "columns" + f" or name it with {argument('metric')}" * bool(clocks)
            )
        filled = [k for k, cell in enumerate(self._columns[value]) if cell]
        if not filled:
            raise UsageError(f"{self.name} has no value in column {value!r}")
        kinds = dict.fromkeys(clocks.values(), contents.clocks) | {value: contents.numbers}
        values = {name: read([self._columns[name][k] for k in filled], self._path) for name, read in kinds.items()}
        order = np.argsort(values[next(iter(clocks.values()))], kind="stable")
        return Series({axis: values[name][order] for axis, name in clocks.items()}, values[value][order])


class MonitorSource:
    """A run of stable-baselines3, with one monitor file for each environment; a `SeriesSource`.

    A value is the mean return of the last 100 episodes, over all environments.
    """

    bindings: Mapping[str, str] = {}
    seed = None

    def __init__(self, paths: Iterable[Path], label: str | None = None):
        self._paths = sorted(paths)
        self.name = str(self._paths[0] if len(self._paths) == 1 else self._paths[0].parent)
        self.label = label or "stable-baselines3"
        self.notes: list[str] = []
        self._headers, self._tables = zip(*map(_read_monitor, self._paths))
        environments = {header.get("env_id") for header in self._headers} - {None, "None"}
        self.environment = environments.pop() if len(environments) == 1 else None

    def series(self, metric: str) -> Series:
        name = metric.rpartition("/")[2].lower()
        column = "l" if "length" in name else "r" if "return" in name or "reward" in name or name == "r" else name
        parts = []
        begin = min(float(header.get("t_start", 0)) for header in self._headers)
        for path, header, columns in zip(self._paths, self._headers, self._tables):
            if any(one not in columns for one in (column, "l", "t")):
                raise UsageError(
                    f"{path} is a monitor file without {column!r} for the metric {metric!r}; it has {list(columns)}"
                )
            seconds = contents.clocks(columns["t"], path) + float(header.get("t_start", 0)) - begin
            lengths, values = contents.clocks(columns["l"], path), contents.numbers(columns[column], path)
            parts.append(np.stack([seconds, lengths, values]))
        together = np.concatenate(parts, axis=1)
        if not together.shape[1]:
            raise UsageError(f"{self.name} has no episode yet")
        seconds, lengths, values = together[:, np.argsort(together[0], kind="stable")]
        return Series({"env_steps": lengths.cumsum(), "wall_seconds": seconds}, _moving_mean(values, WINDOW))


def read_table(path: Path, label: str | None = None) -> list[TableSource]:
    """Returns the curves of a table: one curve for each pair of seed and environment in the table.

    Raises:
      UsageError: the file is not a table of curves.
    """
    columns = _columns(path, _content(path))
    by = [_first(names, columns) for names in (SEEDS, ENVIRONMENTS)]
    keys = zip(*(columns[name] if name else [None] * len(next(iter(columns.values()))) for name in by))
    rows: dict[tuple[str | None, ...], list[int]] = {}
    for k, key in enumerate(keys):
        rows.setdefault(key, []).append(k)
    return [
        TableSource(path, {name: [cells[k] for k in own] for name, cells in columns.items()}, label, *key)
        for key, own in (rows or {(None, None): []}).items()
    ]


def is_monitor(path: Path) -> bool:
    return path.name.endswith(MONITOR)


def _read_monitor(path: Path) -> tuple[dict, dict[str, list[str]]]:
    """Returns the JSON in the first line of a monitor file, and the file's columns."""
    first, _, rest = _content(path).partition(b"\n")
    try:
        header = contents.parsed(path, first.removeprefix(b"#"))
        contents.checked_entries(path, header, {"t_start": float}, ["t_start"])
    except UsageError:
        header = None
    if header is None or not isinstance(header.get("env_id"), str | None):
        raise UsageError(
            f"{path} is not a monitor file of stable-baselines3: its first line is not '#{{...}}' in which t_start is "
            "a number and env_id is text"
        )
    return header, _columns(path, rest)


def _content(path: Path) -> bytes:
    try:
        return contents.content_of(path)
    except FileNotFoundError as error:
        raise UsageError(f"{path} is a link to a file that does not exist") from error


def _columns(path: Path, content: bytes) -> dict[str, list[str]]:
    header, rows = contents.rows_of(path, content)
    names = [name.strip().lower().replace(" ", "_") for name in header]
    return {name: [row[k] for row in rows] for k, name in enumerate(names)}


def _first(names: Iterable[str], columns: Mapping[str, Sequence[str]]) -> str | None:
    return next((name for name in names if name in columns), None)


def _moving_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Returns, for each value, the mean of that value and up to `window` - 1 values before it."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - window, 0)
    return (sums[ends] - sums[starts]) / (ends - starts)
