"""Self-contained HTML pages, which include their styles and pictures."""

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from alfish.analysis import figures
from alfish.analysis.curves import Curve
from alfish.errors import significant

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
svg, video, img { max-width: 100%; height: auto; }
table { border-collapse: collapse; } td, th { padding: .25rem .8rem; border-bottom: 1px solid #ddd; text-align: left; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
pre { font: 13px/1.5 ui-monospace, monospace; background: #f5f5f5; padding: .8rem; white-space: pre-wrap; }
summary { cursor: pointer; }
"""


def page(title: str, parts: Iterable[str]) -> str:
    """Returns a page with a title in plain text and parts in HTML."""
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        f'<link rel="icon" href="data:,">\n<style>{STYLE}</style>\n</head>\n<body>\n<h1>{escape(title)}</h1>\n'
        + "\n".join(parts)
        + "\n</body>\n</html>\n"
    )


def picture(figure: Any, description: str) -> str:
    """Returns a matplotlib figure as SVG code for a page."""
    svg = figures.encoded(figure, ".svg").decode()
    return svg[svg.index("<svg") :].replace("<svg", f'<svg role="img" aria-label="{escape(description)}"', 1)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns an HTML table of texts; numbers are right-aligned."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "\n".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f"<table>\n<tr>{head}</tr>\n{body}\n</table>"


def facts(rows: Iterable[tuple[str, str]]) -> str:
    """Returns an HTML table with a name and a text in each row."""
    lines = (f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in rows)
    return "\n".join(["<table>", *lines, "</table>"])


def of_curves(curves: Sequence[Curve], figure: Any, metric: str, statistic: str, notes: Iterable[str]) -> str:
    """Returns the page of `alfish plot`: the picture, the runs and settings behind each line, and the notes."""
    words = {"iqm": "Interquartile mean", "mean": "Mean", "median": "Median"}[statistic]
    rows = [
        [
            one.group.environment,
            one.group.label,
            str(len(one.series)),
            significant(float(one.values[-1])),
            "" if one.band is None else "[{}, {}]".format(*(significant(float(end)) for end in one.band[:, -1])),
            ", ".join(source.name for source in one.group.sources),
        ]
        for one in curves
    ]
    parts = [
        picture(figure, f"Curves of {metric}"),
        f"<p>{words} over the runs of each group, with a pointwise 95 % bootstrap interval.</p>",
        table(["environment", "group", "runs", "at the end", "95 % interval", "from"], rows),
        *(f"<p>Note: {escape(note)}.</p>" for note in notes),
    ]
    return page(metric, parts)


def _cell(text: str) -> str:
    is_number = text.replace(",", "").replace(".", "", 1).lstrip("-").isdigit()
    return f"<td{' class=number' * is_number}>{escape(text)}</td>"
