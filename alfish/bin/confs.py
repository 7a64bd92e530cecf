"""Lists the shipped configurations: the task, the algorithm, and the result of each.

  alfish confs
  alfish confs halfcheetah sac          # those with all of these words in their file, task or algorithm
  alfish confs ppo_cartpole             # one in full: the origin of its settings, and its complete result
  alfish train --gin_file=ppo_cartpole.gin --root_dir=runs/ppo

A conf is shown in full if it is named, or if it is the only one with the words.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from absl import flags

from alfish.bin import show
from alfish.configuration.locating import confs_directory
from alfish.errors import UsageError

FLAGS = flags.FlagValues()
TAKES_WORDS = True
WIDTH = 100  # of a line
COLUMNS = (30, 24, 14)  # widths of file, task and algorithm; the result gets the rest


class Conf(NamedTuple):
    file: str
    task: str
    algorithm: str
    result: str
    comment: str  # the opening comment of the file, without its #


def main(flag_values: flags.FlagValues, *words: str) -> int:
    confs = [conf for conf in map(describe, sorted(confs_directory().glob("*.gin"))) if conf]
    found = [conf for conf in confs if has(conf, words)]
    named = [conf for conf in found if words and conf.file in (words[0], f"{words[0]}.gin")]
    if not found:
        raise UsageError(f"no shipped configuration has {' and '.join(words)}; `alfish confs` lists all of them")
    if named or len(found) == 1:
        show(in_full((named or found)[0]))
    else:
        show("\n".join(map(line, found)))
    return 0


def describe(path: Path) -> Conf | None:
    """Returns a conf as its opening comment describes it; None for a base conf without a task."""
    text = path.read_text()
    opening = re.match(r"(#.*\n)*", text)
    comment = re.sub(r"^# ?", "", opening[0] if opening else "", flags=re.MULTILINE).strip()
    fields = dict(re.findall(r"^(\w+): (.*)$", comment, re.MULTILINE))
    if "Task" not in fields:
        return None
    return Conf(path.name, fields["Task"], fields.get("Algorithm", ""), fields.get("Result", ""), comment)


def has(conf: Conf, words: Sequence[str]) -> bool:
    """Returns True if each word is in the file's name, the task or the algorithm."""
    text = f"{conf.file} {conf.task} {conf.algorithm}".lower()
    return all(word.lower() in text for word in words)


def line(conf: Conf) -> str:
    """Returns one line of `WIDTH`; cells that are too long end in '..'."""
    cells = [_fitted(cell, width).ljust(width) for cell, width in zip(conf, COLUMNS)]
    first = re.split(r", |; | \(", conf.result)[0]
    result = first if " " in first else conf.result  # a number alone says too little
    return "  ".join([*cells, _fitted(result, WIDTH - sum(COLUMNS) - 2 * len(COLUMNS))]).rstrip()


def in_full(conf: Conf) -> str:
    name = conf.file.removesuffix(".gin")
    return f"{conf.file}\n\n{conf.comment}\n\nalfish train --gin_file={conf.file} --root_dir=runs/{name}"


def _fitted(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 2].rstrip() + ".."
