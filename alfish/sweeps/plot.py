"""The picture of a sweep: the value against each parameter, and the curves of all trials."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from alfish.analysis import figures
from alfish.runs.files import write_atomically
from alfish.sweeps.search import Parameter
from alfish.sweeps.trials import Trial
from alfish.training.evaluations.evaluation import mean, ranked

PICTURE = "trials.png"
COLORS = {"complete": "tab:blue", "pruned": "tab:orange", "running": "tab:gray"}
BEST = "tab:red"


def write_picture(directory: Path, parameters: Sequence[Parameter], trials: Sequence[Trial]) -> None:
    """Writes `trials.png`.

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
    axes[0].set_ylabel("return of the last evaluation")
    write_atomically(directory / PICTURE, figures.encoded(figure, ".png"))


def _draw_parameter(axis: Any, parameter: Parameter, trials: Sequence[Trial], best: Trial | None) -> None:
    """Draws the value of each trial against one parameter."""
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
        axis.tick_params("x", which="minor", labelbottom=high < 10 * low)  # over more, these labels would overlap
    if numbers is not float:
        axis.set_xticks(range(len(parameter.items)), parameter.items, rotation=20)
        axis.set_xlim(-0.5, len(parameter.items) - 0.5)
    axis.set_xlabel(parameter.name)
    axis.grid(alpha=0.3)


def _numbers(parameter: Parameter) -> Any:
    """Returns the function from gin texts to places on the axis: numbers, or the places of other values in the list."""
    try:
        [float(item) for item in parameter.items]
    except ValueError:
        return parameter.items.index
    return float


def _draw_curves(axis: Any, trials: Sequence[Trial], best: Trial | None) -> None:
    """Draws the mean return of each trial over the steps; up to where it was pruned."""
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
    axis.locator_params("x", nbins=5)  # labels of more would overlap
    axis.legend(fontsize="small")
    axis.grid(alpha=0.3)


def _curve(trial: Trial) -> list[tuple[int, float]]:
    """Returns the steps at which all of a trial's runs were evaluated, and the mean of their returns."""
    runs = [run for run in trial.runs if run.state.evaluations]
    clocks = set.intersection(*(set(run.state.evaluations) for run in runs)) if runs else set()
    stop = min((run.pruned_at for run in runs if run.pruned_at is not None), default=math.inf)
    means = [run.state.means for run in runs]
    return [(clock, mean([one[clock] for one in means])) for clock in sorted(clocks) if clock <= stop]
