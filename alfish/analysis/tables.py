"""Tables of texts in columns, as CSV and as Markdown, and the tables of a comparison."""

import csv
import io
import math
from collections.abc import Iterable, Sequence
from typing import Any

from alfish.analysis.comparison import ALL, Comparison, ComparisonRow, Way
from alfish.analysis.series import AXIS_WORDS
from alfish.analysis.statistics import Estimate
from alfish.errors import significant

Table = Sequence[Sequence[str]]  # rows of cells; row 0 is the header


def as_text(table: Table) -> str:
    """Returns a table as text, with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*table)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in table)
    return "\n".join(lines)


def as_csv(table: Iterable[Sequence[Any]]) -> str:
    """Returns a table as CSV; None becomes an empty cell."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(table)
    return text.getvalue()


def as_markdown(table: Table) -> str:
    header, *rows = table
    return "\n".join([markdown_header(header), *map(markdown_line, rows)])


def markdown_header(headings: Sequence[object]) -> str:
    """Returns the first two lines of a Markdown table."""
    return f"{markdown_line(headings)}\n|{'---|' * len(headings)}"


def markdown_line(cells: Iterable[object]) -> str:
    """Returns one line of a Markdown table."""
    return f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in cells)} |"


ESTIMATES = ("iqm", "mean", "median", "optimality_gap")


def for_people(comparison: Comparison) -> Table:
    """Returns the table of a comparison for people, without empty columns."""
    axis = _common_axis(comparison)
    clock = AXIS_WORDS[axis] if axis else ""  # without a common axis, each cell names its unit
    header = ["environment", "group", "seeds", "IQM", "mean", "median", "optimality gap"]
    header += [f"{clock or 'steps'} to threshold", "seconds to threshold", f"{clock or 'steps'}/s"]
    rows = [
        [
            row.environment,
            row.label,
            str(row.num_runs),
            *(_with_interval(getattr(row, name)) for name in ESTIMATES),
            _reached(row.way, row.num_runs, "" if clock or not row.axis else f" {AXIS_WORDS[row.axis]}"),
            "" if row.way is None else _number(row.way.seconds),
            _number(row.rate) + ("" if clock or row.rate is None else f" {AXIS_WORDS[row.axis]}"),
        ]
        for row in comparison.rows
    ]
    filled = [k for k in range(len(header)) if any(row[k] for row in rows)]
    return [[row[k] for k in filled] for row in [header, *rows]]


def sentences(comparison: Comparison) -> list[str]:
    """Returns sentences that explain the table of `for_people` and compare two groups."""
    end = "last value" if comparison.last == 1 else f"mean of the last {comparison.last} values"
    words = [f"{comparison.metric}: {end} of each run"]
    if any(row.num_runs > 1 for row in comparison.rows):
        words[0] += ", with 95 % intervals of a bootstrap over the runs"
    normalized = (_in(one, f"{low:g} as 0 and {high:g} as 1") for one, (low, high) in comparison.ranges.items())
    words += [f"scores: {', '.join(normalized)}"] if comparison.ranges else []
    goals = [_in(environment, f"{goal:g}") for environment, goal in comparison.thresholds.items()]
    words += [f"threshold: {', '.join(goals)}; median over the runs"] if goals else []
    for row, other in _pairs(comparison.rows):
        if single := [one.label for one in (row, other) if one.num_runs == 1]:
            words.append(f"{' and '.join(single)}: only one run, so another seed may give a very different result")
            continue
        sentence = f"{row.label} is better than {other.label} with probability {_with_interval(row.improvement)}"
        words.append(sentence + (" over all environments" if row.environment == ALL else _in(row.environment, "")))
    return words


def for_programs(comparison: Comparison) -> Table:
    """Returns the table of a comparison for a CSV file, with all digits and with empty cells for unknown numbers."""
    header = ["environment", "group", "seeds"]
    header += [f"{name}{end}" for name in (*ESTIMATES, "improvement") for end in ("", "_low", "_high")]
    clock = _common_axis(comparison) or "steps"  # the last column has the unit of each row
    header += [f"{clock}_to_threshold", "seconds_to_threshold", "num_reached", "steps_per_second", "unit"]
    rows = [
        [
            *(row.environment, row.label, str(row.num_runs)),
            *(cell for name in (*ESTIMATES, "improvement") for cell in _cells(getattr(row, name))),
            *(("", "", "") if row.way is None else map(_full, row.way)),
            _full(row.rate),
            row.axis,
        ]
        for row in comparison.rows
    ]
    return [header, *rows]


def _common_axis(comparison: Comparison) -> str:
    """Returns the axis of all rows; '' if rows have different axes."""
    axes = {row.axis for row in comparison.rows if row.axis}
    return axes.pop() if len(axes) == 1 else ""


def _pairs(rows: Sequence[ComparisonRow]) -> list[tuple[ComparisonRow, ComparisonRow]]:
    """Returns the rows of the first and of the second group, for each environment with two groups."""
    compared = [row for row in rows if row.improvement is not None]
    return list(zip(compared[::2], compared[1::2]))


def _in(environment: str, words: str) -> str:
    return f"{words} in {environment}" if environment else words


def _with_interval(estimate: Estimate | None) -> str:
    if estimate is None:
        return ""
    between = "" if estimate.interval is None else " [{}, {}]".format(*map(significant, estimate.interval))
    return f"{significant(estimate.value)}{between}"


def _reached(way: Way | None, num_runs: int, unit: str) -> str:
    if way is None:
        return ""
    return f"{_number(way.clock)}{'' if math.isinf(way.clock) else unit} ({way.num_reached} of {num_runs})"


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return "not reached" if math.isinf(value) else f"{value:,.0f}" if value >= 1000 else significant(value, 3)


def _cells(estimate: Estimate | None) -> list[str]:
    if estimate is None:
        return ["", "", ""]
    return [_full(estimate.value), *map(_full, estimate.interval or (None, None))]


def _full(value: float | None) -> str:
    return "" if value is None else repr(value)
