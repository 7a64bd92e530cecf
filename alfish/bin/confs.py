"""Lists the shipped configurations: what each trains, with which algorithm, and what it reaches.

alfish confs
alfish train --gin_file=ppo_cartpole.gin --root_dir=runs/ppo
"""

import re
from pathlib import Path

from absl import flags

from alfish.bin import show
from alfish.bin.configuration import confs_directory

FLAGS = flags.FlagValues()
FIELDS = ("Task", "Algorithm", "Result")


def main(flag_values: flags.FlagValues) -> int:
    rows = [row for row in (describe(path) for path in sorted(confs_directory().glob("*.gin"))) if row]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    lines = ["  ".join([*(cell.ljust(width) for cell, width in zip(row, widths)), row[3]]).rstrip() for row in rows]
    show("\n".join(lines))
    return 0


def describe(path: Path) -> tuple[str, str, str, str] | None:
    """File, task, algorithm, result, from the comment that opens a conf; None for one that only others include."""
    fields = dict(re.findall(r"^# (\w+): (.*)$", path.read_text(), re.MULTILINE))
    if "Task" not in fields:
        return None
    task, algorithm, result = (fields.get(name, "") for name in FIELDS)
    return path.name, task, algorithm, result
