"""Result files: CSVs of raw rows, of which a call replaces only its own, and Markdown tables of these rows.

A row is a dict. Values that are read from a file stay text, so that the rows of other calls are written unchanged.
"""

import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from alfish.analysis.tables import markdown_header as header  # noqa: F401, for the benchmarks
from alfish.analysis.tables import markdown_line as line  # noqa: F401
from alfish.runs.files import write_atomically

NUM_DRAWS = 10_000  # of the bootstrap


def read_rows(path: Path) -> list[dict[str, str]]:
    """Returns all rows of a CSV; no rows if the file does not exist."""
    if not path.is_file():
        return []
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]], fields: Iterable[str]) -> None:
    """Writes a CSV; see `write_text`.

    Raises:
      ValueError: a row has a column beside `fields`; one that it lacks stays empty.
    """
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(fields))
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, text.getvalue())


def write_text(path: Path, text: str) -> None:
    """Writes a file and its parent directories; if the process is killed, the old file remains."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text)


def replace_rows(
    path: Path,
    rows: Sequence[Mapping[str, Any]],
    fields: Iterable[str],
    key: Sequence[str],
    order: Callable[[Mapping[str, Any]], Any] | None = None,
) -> list[dict[str, str]]:
    """Writes rows into a CSV and removes old rows that agree with one of them in every column of `key`.

    Args:
      path: of the CSV; made if needed.
      rows: what was measured; if there are none, the file stays as it is.
      fields: the file's columns.
      key: the columns that say whose a row is.
      order: what the file is sorted by, of a row whose values may be text; None: what stays comes first.

    Returns:
      All rows of the file, as text.
    """
    replaced = {tuple(str(row[name]) for name in key) for row in rows}
    kept = [row for row in read_rows(path) if tuple(row[name] for name in key) not in replaced]
    if rows:
        together: list[Mapping[str, Any]] = [*kept, *rows]
        write_rows(path, together if order is None else sorted(together, key=order), fields)
    return read_rows(path)


def times(ratio: float, above: np.ndarray, below: np.ndarray) -> str:
    """Returns a ratio such as `2.00x [1.50, 2.50]`, with the 95 % bootstrap interval of the ratio of two medians.

    Args:
      ratio: the figure before the interval.
      above, below: `[N]` and `[M]` positive samples, which may hold inf: of runs that never got there.
    """
    generator = np.random.default_rng(0)
    medians = [np.median(generator.choice(side, (NUM_DRAWS, len(side))), axis=1) for side in (above, below)]
    with np.errstate(invalid="ignore"):
        ratios = medians[0] / medians[1]
    # Endless by endless may be anything. No interpolation: between a number and infinity there is nothing.
    low = np.percentile(np.nan_to_num(ratios, nan=0.0, posinf=np.inf), 2.5, method="inverted_cdf")
    high = np.percentile(np.nan_to_num(ratios, nan=np.inf, posinf=np.inf), 97.5, method="inverted_cdf")
    return f"{ratio:.2f}x [{low:.2f}, {high:.2f}]"
