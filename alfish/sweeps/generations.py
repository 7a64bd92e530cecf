"""Directories of the generations of a population; `alfish.training.generations` selects the members.

    g000/m0, g000/m1, ...    run directories of `alfish train`, which stop at `steps`
    g001/m0, ...             each continues from the last checkpoint of a member of g000, and stops at 2 x `steps`

A run directory is written by one run, and does not change afterwards. The directory belongs to the population if it has
`member.json`, the last file written when the directory is created. The members of a generation depend only on the
directories of the previous generation and the specification, so computing them again gives the same members.
"""

import json
import math
import os
import re
import shutil
from pathlib import Path

import numpy as np

from alfish.errors import UsageError
from alfish.parameters.varied import NUMBER
from alfish.runs import contents
from alfish.runs.checkpoints import Checkpoints
from alfish.runs.files import make_directory, open_atomically, open_regular, write_atomically, writing
from alfish.sweeps.run_state import RunState, mean_of_means
from alfish.training.generations import Member, MemberResult

MEMBER = "member.json"
PLAIN = re.compile(rf"{NUMBER}|g\d+/m\d+")  # format of texts in a member's file: a number, or the name of a parent


def write(member: Member, root: Path) -> Member:
    """Creates the run directory of a member if it does not exist; returns the member stored there.

    Args:
      member: member to store.
      root: directory of the population, in which the run directory has the member's name.

    Raises:
      UsageError: the directory is not a member of this population.
    """
    path = root / member.name / MEMBER
    if os.path.lexists(path):
        return _read(member, path)
    make_directory(path.parent)
    if member.parent is not None:
        for kind in ("replay", "checkpoints"):  # only the newest of each, which belong together
            saved = Checkpoints(root / member.parent / kind)
            for newest in saved.steps()[-1:]:
                make_directory(path.parent / kind)
                _link(saved.path(newest), Checkpoints(path.parent / kind).path(newest))
    content = {"parent": member.parent, "bindings": dict(member.bindings)}
    write_atomically(path, json.dumps(content, indent=2) + "\n")
    return member


def result_of(member: Member, state: RunState, last: int) -> MemberResult:
    """Returns the result of a member.

    Args:
      member: member that has been trained to the end of its generation.
      state: state of the member's run.
      last: number of final evaluations of the generation that count.
    """
    counting = list(state.evaluations.values())[-last:]
    value = mean_of_means(counting)
    if state.failure is not None or value is None or not math.isfinite(value):
        return MemberResult(member, -math.inf, 0.0)
    variances = [float(np.var(one, ddof=1)) / len(one) if len(one) > 1 else math.inf for one in counting]
    return MemberResult(member, value, sum(variances) / len(counting) ** 2)


def _read(member: Member, path: Path) -> Member:
    """Returns the member in a file, after checking its texts, which become arguments of a command."""
    content = contents.record(path.parent, path.name, {"bindings": dict})
    if content is None or content.keys() != {"parent", "bindings"}:
        raise UsageError(f"{path} does not describe a member; choose another --root_dir")
    found = member._replace(**content)
    is_right = found.bindings.keys() == member.bindings.keys() and (found.parent is None) == (member.parent is None)
    texts = [*found.bindings.values(), *([] if found.parent is None else [found.parent])]
    if not is_right or not all(isinstance(text, str) and PLAIN.fullmatch(text) for text in texts):
        raise UsageError(f"{path} describes a member of another population; choose another --root_dir")
    return found


def _link(source: Path, target: Path) -> None:
    """Makes `target` a hard link to a file that does not change, or a copy if hard links are impossible."""
    with writing(target):
        if target.exists():  # left by a killed command
            return
        try:
            os.link(source, target)
        except OSError:
            with open_regular(source) as read, open_atomically(target) as file:
                shutil.copyfileobj(read, file)
