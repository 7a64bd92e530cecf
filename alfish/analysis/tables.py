"""Tables of texts: for people, as CSV, and as Markdown."""

import csv
import io
from collections.abc import Iterable, Sequence
from typing import Any

Table = Sequence[Sequence[str]]  # rows of cells; row 0 is the header


def as_text(table: Table) -> str:
    """Returns columns of equal width."""
    widths = [max(map(len, column)) for column in zip(*table)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in table)
    return "\n".join(lines)


def as_csv(table: Iterable[Sequence[Any]]) -> str:
    """Returns lines with commas; None becomes an empty cell."""
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
