"""Results of a sweep as `trials.csv`, and as a table of the best trials for people."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from alfish.analysis.tables import as_text
from alfish.errors import printable
from alfish.formatting import counted, significant
from alfish.sweeps.group import write_rows
from alfish.sweeps.trials import Trial
from alfish.training.evaluations.evaluation import bootstrap_interval, ranked

CSV = "trials.csv"
NUM_SHOWN = 10  # trials of each state in the table for people
# 97.5 % quantiles of Student's t distribution for 1 to 10 degrees of freedom.
QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


def write_csv(directory: Path, names: Sequence[str], trials: Sequence[Trial]) -> None:
    """Writes `trials.csv`: one row for each trial.

    Columns: trial, one for each searched parameter, seeds, state, steps (clock of the last evaluation), mean, ci_low
    and ci_high (see `interval`), and the reason of a failure.

    Args:
      directory: of the sweep.
      names: of the searched parameters.
      trials: of the sweep.
    """
    rows: list[list[Any]] = [["trial", *names, "seeds", "state", "steps", "mean", "ci_low", "ci_high", "reason"]]
    for trial in trials:
        settings, seeds = [trial.bindings[name] for name in names], " ".join(str(run.seed) for run in trial.runs)
        results = [trial.state, trial.steps, trial.value, *interval(trial), trial.failure]
        rows.append([trial.number, *settings, seeds, *results])
    write_rows(directory / CSV, rows)


def interval(trial: Trial) -> tuple[float, float] | tuple[None, None]:
    """Returns a 95 % interval of a trial's value: Student's t over its seeds.

    With one seed, a bootstrap over its episodes, which says nothing about other seeds.
    """
    if trial.value is None:
        return None, None
    if len(trial.values) > 1:
        error = float(np.std(trial.values, ddof=1)) / math.sqrt(len(trial.values))
        half = _quantile(len(trial.values) - 1) * error
        return trial.value - half, trial.value + half
    return bootstrap_interval([value for returns in trial.counting[0].counting.values() for value in returns])


def table(names: Sequence[str], trials: Sequence[Trial]) -> str:
    """Returns the best trials, the best first, those that were pruned or failed, and how many there are of each."""
    rows = [["trial", *names, "state", "steps", "mean", "95 % interval"]]
    left_out, reasons = [], []
    for state in ("complete", "pruned", "running", "failed"):
        own = [trial for trial in trials if trial.state == state]
        own.sort(key=lambda trial: -(-math.inf if trial.value is None else ranked(trial.value)))
        rows += [_cells(trial, names) for trial in own[:NUM_SHOWN]]
        reasons += [
            f"trial {trial.number} failed: {printable(trial.failure)}" for trial in own[:NUM_SHOWN] if trial.failure
        ]
        if len(own) > NUM_SHOWN:
            left_out.append(f"{counted(len(own) - NUM_SHOWN, f'{state} trial')} more")
    return "\n".join([as_text(rows), *reasons, *([f"and {', '.join(left_out)}: see {CSV}"] if left_out else [])])


def _cells(trial: Trial, names: Sequence[str]) -> list[str]:
    low, high = interval(trial)
    mean = "" if trial.value is None else significant(trial.value)
    between = "" if low is None or high is None else f"[{significant(low)}, {significant(high)}]"
    steps = "" if trial.steps is None else f"{trial.steps:,}"
    return [str(trial.number), *(trial.bindings[name] for name in names), trial.state, steps, mean, between]


def _quantile(freedom: int) -> float:
    """Returns the 97.5 % quantile of Student's t distribution.

    Beyond the table by the first terms of its expansion around the normal quantile (Abramowitz & Stegun, 26.7.5), which
    are right to 0.01.
    """
    if freedom <= len(QUANTILES):
        return QUANTILES[freedom - 1]
    z = 1.959964
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
