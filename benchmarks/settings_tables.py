"""Writes the tables of settings in docs/ from the defaults and docstrings of the code.

  python -m benchmarks.settings_tables

A page asks for a table by a comment that names parameters, or patterns of them, and the end of the table follows:

  <!-- settings: PPO.* EpochBatches.num_epochs -->
  <!-- end of settings -->
"""

import argparse
import fnmatch
import re
from pathlib import Path

from alfish.configuration import catalogue
from alfish.configuration.catalogue import Setting
from benchmarks import PROJECT

DOCS = PROJECT / "docs"
TABLE = re.compile(r"(<!-- settings: ([^>]*?) -->\n)(.*?)(<!-- end of settings -->)", re.DOTALL)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    entries = catalogue.entries()
    for page in pages():
        text = page.read_text()
        written = filled(text, entries)
        if written != text:
            page.write_text(written)
            print(f"{page.relative_to(PROJECT)} was out of date")


def pages() -> list[Path]:
    return [page for page in sorted(DOCS.rglob("*.md")) if TABLE.search(page.read_text())]


def filled(text: str, entries: list[Setting]) -> str:
    """Returns the text of a page with each table written anew.

    Raises:
      ValueError: a pattern names no parameter.
    """
    return TABLE.sub(lambda found: found[1] + table(found[2].split(), entries) + found[4], text)


def table(patterns: list[str], entries: list[Setting]) -> str:
    """Returns a Markdown table of the parameters that match, in the order of the patterns and of the code."""
    rows = []
    for pattern in patterns:
        matching = [entry for entry in entries if fnmatch.fnmatchcase(entry.name, pattern)]
        if not matching:
            raise ValueError(f"no parameter is called {pattern}; `alfish params` lists all parameters")
        rows += [_row(entry) for entry in matching]
    return "\n".join(["| setting | default | meaning |", "|---|---|---|", *dict.fromkeys(rows), ""])


def _row(entry: Setting) -> str:
    default = "must be bound" if entry.default is None else f"`{entry.default}`"
    cells = (f"`{entry.name}`", default, f"{entry.help} ({entry.kind})")
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


if __name__ == "__main__":
    main()
