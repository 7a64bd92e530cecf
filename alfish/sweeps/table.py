"""Results of a sweep: `trials.csv`, a table of the best trials, and a picture of all trials."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from alfish.analysis import figures
from alfish.analysis.tables import as_text
from alfish.errors import counted, printable, significant
from alfish.parameters.varied import Parameter
from alfish.runs.files import write_atomically
from alfish.sweeps.group import write_rows
from alfish.sweeps.trials import Trial
from alfish.training.evaluations.evaluation import bootstrap_interval, mean, ranked

CSV = "trials.csv"
NUM_SHOWN = 10  # maximum number of trials of each state in the printed table
# 97.5 % quantiles of Student's t distribution for 1 to 10 degrees of freedom.
QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


def write_csv(directory: Path, names: Sequence[str], trials: Sequence[Trial]) -> None:
    """Writes `trials.csv`: one row for each trial.

    The columns are trial, one column for each searched parameter, seeds, state, steps (clock of the last evaluation),
    mean, ci_low and ci_high (see `interval`), and the reason of a failure.

    Args:
      directory: directory of the sweep.
      names: names of the searched parameters.
      trials: trials of the sweep.
    """
    rows: list[list[Any]] = [["trial", *names, "seeds", "state", "steps", "mean", "ci_low", "ci_high", "reason"]]
    for trial in trials:
        settings, seeds = [trial.bindings[name] for name in names], " ".join(str(run.seed) for run in trial.runs)
        results = [trial.state, trial.steps, trial.value, *interval(trial), trial.failure]
        rows.append([trial.number, *settings, seeds, *results])
    write_rows(directory / CSV, rows)


def interval(trial: Trial) -> tuple[float, float] | tuple[None, None]:
    """Returns a 95 % interval of a trial's value, by Student's t over the trial's seeds.

    If only one run counts, the interval is a bootstrap over its episodes, without the variation between seeds.
    """
    if trial.value is None:
        return None, None
    if len(trial.values) > 1:
        error = float(np.std(trial.values, ddof=1)) / math.sqrt(len(trial.values))
        half = _quantile(len(trial.values) - 1) * error
        return trial.value - half, trial.value + half
    return bootstrap_interval([value for returns in trial.counting[0].counting.values() for value in returns])


def table(names: Sequence[str], trials: Sequence[Trial]) -> str:
    """Returns a table of complete, pruned, running and failed trials, the best of each state first.

    At most `NUM_SHOWN` trials of each state are listed; the last line counts all other trials.
    """
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

    Beyond the degrees of freedom in `QUANTILES`, computes the first terms of the expansion around the normal quantile
    (Abramowitz & Stegun, 26.7.5), with an error below 0.01.
    """
    if freedom <= len(QUANTILES):
        return QUANTILES[freedom - 1]
    z = 1.959964
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


PICTURE = "trials.png"
COLORS = {"complete": "tab:blue", "pruned": "tab:orange", "running": "tab:gray"}
BEST = "tab:red"


def write_picture(
    directory: Path,
    parameters: Sequence[Parameter],
    trials: Sequence[Trial],
    label: str = "return of the last evaluation",
) -> None:
    """Writes `trials.png`; `label` names the values of the trials.

    Raises:
      UsageError: matplotlib is not installed.
    """
    complete = (one for one in trials if one.state == "complete")
    best = max(complete, key=lambda one: -math.inf if one.value is None else ranked(one.value), default=None)
    figure = figures.new_figure(4 * (len(parameters) + 1) + 1, 3.6)
    axes = figure.subplots(1, len(parameters) + 1, squeeze=False)[0]
    for axis, parameter in zip(axes, parameters):
        _draw_parameter(axis, parameter, trials, best)
    _draw_curves(axes[-1], trials, best)
    axes[0].set_ylabel(label)
    write_atomically(directory / PICTURE, figures.encoded(figure, ".png"))


def _draw_parameter(axis: Any, parameter: Parameter, trials: Sequence[Trial], best: Trial | None) -> None:
    """Draws the mean return of each trial against its setting of one parameter."""
    numbers = _numbers(parameter)
    for state, color in COLORS.items():
        own = [trial for trial in trials if trial.state == state and trial.value is not None]
        if own:
            xs = [numbers(trial.bindings[parameter.name]) for trial in own]
            values = figures.drawable([trial.value for trial in own])
            axis.scatter(xs, values, s=18, color=color, label=state, alpha=0.8)
    if best is not None:
        place = [numbers(best.bindings[parameter.name])], figures.drawable([best.value])
        axis.scatter(*place, s=70, facecolors="none", edgecolors=BEST)
    if parameter.kind == "log":
        low, high = parameter.ends
        axis.set_xscale("log")
        axis.set_xlim(low / 1.2, high * 1.2)
        axis.tick_params("x", which="minor", labelbottom=high < 10 * low)  # labels of a wider range would overlap
    if numbers is not float:
        axis.set_xticks(range(len(parameter.items)), parameter.items, rotation=20)
        axis.set_xlim(-0.5, len(parameter.items) - 0.5)
    axis.set_xlabel(parameter.name)
    axis.grid(alpha=0.3)


def _numbers(parameter: Parameter) -> Any:
    """Returns a function from gin texts to positions on the axis: numbers, or list indices of other values."""
    try:
        [float(item) for item in parameter.items]
    except ValueError:
        return parameter.items.index
    return float


def _draw_curves(axis: Any, trials: Sequence[Trial], best: Trial | None) -> None:
    """Draws the mean return of each trial over the steps; the curve of a pruned trial ends early."""
    for trial in trials:
        curve = _curve(trial)
        color = BEST if trial is best else COLORS.get(trial.state, "tab:gray")
        front = trial is best
        place = figures.drawable(curve).reshape(-1, 2).T
        axis.plot(*place, color=color, alpha=1.0 if front else 0.4, linewidth=2 if front else 1, zorder=2 + front)
    for label, color in [*COLORS.items(), ("best", BEST)]:
        if label == "best" or any(trial.state == label for trial in trials):
            axis.plot([], [], color=color, label=label)
    axis.set_xlabel("steps")
    axis.locator_params("x", nbins=5)  # more labels would overlap
    axis.legend(fontsize="small")
    axis.grid(alpha=0.3)


def _curve(trial: Trial) -> list[tuple[int, float]]:
    """Returns the steps at which all runs of a trial were evaluated, with the mean return over the runs."""
    runs = [run for run in trial.runs if run.state.means]
    clocks = set.intersection(*(set(run.state.means) for run in runs)) if runs else set()
    stop = min((run.pruned_at for run in runs if run.pruned_at is not None), default=math.inf)
    means = [run.state.means for run in runs]
    return [(clock, mean([one[clock] for one in means])) for clock in sorted(clocks) if clock <= stop]
