"""Lists the shipped configurations with task, algorithm, result and number of seeds.

  alfish confs
  alfish confs halfcheetah sac    # configurations that contain all of these words
  alfish confs ppo_cartpole       # path and text of one configuration, with its complete result
  alfish confs ppo.gin            # path and text of a file that other files include
  alfish train --gin_file=ppo_cartpole.gin --root_dir=runs/ppo

Words are looked up in file name, task and algorithm. If only one configuration contains all of them, its text is shown.
"""

import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from absl import flags

from alfish.bin import show
from alfish.configuration.locating import confs_directory
from alfish.errors import UsageError

FLAGS = flags.FlagValues()
TAKES_WORDS = True
WIDTH = 100  # largest number of characters of a line
COLUMNS = (30, 23, 14)  # widths of the columns file, task and algorithm; the result has the rest of the line


class Conf(NamedTuple):
    path: Path
    task: str  # '' for a file that other files include, or that extends another --gin_file
    algorithm: str
    result: str


def main(flag_values: flags.FlagValues, *words: str) -> int:
    confs = [read(path) for path in sorted(confs_directory().glob("*.gin"))]
    found = [conf for conf in confs if conf.task and has(conf, words)]
    named = [conf for conf in confs if len(words) == 1 and words[0] in names(conf)]
    named = named or [conf for conf in confs if not found and words == (conf.path.stem,)]  # such as `offline`
    if not found and not named:
        raise UsageError(f"no shipped configuration has {' and '.join(words)}; `alfish confs` lists all of them")
    if named or len(found) == 1:
        show(in_full((named or found)[0]))
    else:
        show("\n".join([HEADER, *map(line, found)]))
        if not words:
            others = ", ".join(conf.path.name for conf in confs if not conf.task)
            show("\n" + textwrap.fill(f"Files that these include, or that a second --gin_file names: {others}", WIDTH))
    return 0


def read(path: Path) -> Conf:
    """Reads a configuration's description from the opening comment of its file."""
    opening = re.match(r"(#.*\n)*", path.read_text())
    fields = dict(re.findall(r"^# (\w+): (.*)$", opening[0] if opening else "", re.MULTILINE))
    return Conf(path, *(fields.get(name, "") for name in ("Task", "Algorithm", "Result")))


def names(conf: Conf) -> tuple[str, ...]:
    """Returns the names of a configuration; files without a task, such as ppo.gin, are named only with the suffix."""
    return (conf.path.name, conf.path.stem) if conf.task else (conf.path.name,)


def has(conf: Conf, words: Sequence[str]) -> bool:
    """Returns whether each word occurs in the file's name, the task or the algorithm."""
    text = f"{conf.path.name} {conf.task} {conf.algorithm}".lower()
    return all(word.lower() in text for word in words)


def line(conf: Conf) -> str:
    """Returns one line of at most `WIDTH` characters; cells that are too long end in '..'.

    If an algorithm's description ends with a name in parentheses, only this name is shown.
    """
    name = re.search(r"\((\S+)\)$", conf.algorithm)
    result = re.split(r", |; | \(", conf.result)[0]
    seeds = re.search(r"\b(\d+) seeds", conf.result)
    if seeds or "seed 0" in conf.result:
        result += f" ({seeds[1] if seeds else 1})"
    return _cells(conf.path.name, conf.task, name[1] if name else conf.algorithm, result)


def in_full(conf: Conf) -> str:
    """Returns path and text of a configuration, and the command that trains it, if it has a task."""
    command = f"\nalfish train --gin_file={conf.path.name} --root_dir=runs/{conf.path.stem}"
    return f"{conf.path}\n\n{conf.path.read_text()}{command if conf.task else ''}".rstrip()


def _cells(*texts: str) -> str:
    widths = (*COLUMNS, WIDTH - sum(COLUMNS) - 2 * len(COLUMNS))
    return "  ".join(_fitted(text, width).ljust(width) for text, width in zip(texts, widths)).rstrip()


def _fitted(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 2].rstrip() + ".."


HEADER = _cells("file", "task", "algorithm", "result (seeds)")
