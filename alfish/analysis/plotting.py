"""`alfish.plot`: curves of groups of runs, one panel for each environment."""

import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from absl import logging

from alfish.analysis import figures
from alfish.analysis.curves import Curve, axis_of, curve
from alfish.analysis.grouping import by_environment, group, named, note_repeated_seeds
from alfish.analysis.series import AXIS_WORDS, DEFAULT_METRIC, SeriesSource
from alfish.analysis.sources import Note, find, read_all
from alfish.errors import UsageError, counted
from alfish.parameters import checked

NUM_COLUMNS = 3  # number of panels side by side
PANEL = (4.6, 3.4)  # width and height of a panel, in inches
LEGEND_LINE, LEGEND_LETTER, LEGEND_HANDLE = 0.22, 0.075, 0.8  # sizes in inches

Statistic = Literal["iqm", "mean", "median"]
Axis = Literal["env_steps", "updates", "wall_seconds"]


@checked
def plot(
    runs: str | Path | Sequence[str | Path],
    *,
    metric: str = DEFAULT_METRIC,
    x: Axis | None = None,
    statistic: Statistic = "iqm",
    threshold: float | str | Sequence[float | str] = (),
    axes: Any = None,
) -> Any:
    """Returns a matplotlib figure with curves of runs, grouped by their configuration.

        figure = alfish.plot(["runs/ppo-*", "runs/sac-*"], threshold=475)
        figure.savefig("curves.png")

    Each group has a line for the aggregate over its runs, and a pointwise 95 % bootstrap band. Each environment has a
    panel. Notes about the runs are logged; `alfish plot` prints them to standard error.

    Args:
      runs: run directories, globs or CSVs, each with or without a label (`"PPO=runs/ppo-*"`), as for `alfish plot`.
      metric: name of a column of metrics.csv, or `NAME/COLUMN` for a column of the files `eval/NAME-*.csv`.
      x: name of the horizontal axis; None means env_steps, or updates if a run has no env steps.
      statistic: aggregate over the runs of a group; 'iqm' is the interquartile mean.
      threshold: values of horizontal lines; `"CartPole-v1:475"` is drawn only in the panel of CartPole-v1.
      axes: matplotlib axes to draw in, if all runs have the same environment; None means a new figure.

    Raises:
      UsageError: a run or the metric does not exist, or matplotlib is not installed.
    """
    words = [runs] if isinstance(runs, (str, Path)) else runs
    thresholds = [threshold] if isinstance(threshold, (str, float, int)) else threshold
    curves, axis = curves_of(find(words), metric, x, statistic, logging.warning)
    return draw(curves, axis, metric, thresholds, axes)


@np.errstate(over="ignore", invalid="ignore")  # no warnings of numpy, because notes report values that are not finite
def curves_of(
    sources: Sequence[SeriesSource], metric: str, axis: str | None, statistic: str, note: Note
) -> tuple[list[Curve], str]:
    """Returns the curve of each group of runs, and the axis on which they are drawn.

    Runs without the metric are left out with a note.

    Raises:
      UsageError: no run has the metric, or a run does not have the axis.
    """
    series = read_all(sources, metric, note)
    axis = axis_of(list(series.values()), [source.name for source in series], axis)
    groups, found = group(list(series)), []
    note_repeated_seeds(groups, note)
    for source, of in series.items():
        if num_undefined := int((~np.isfinite(of.values)).sum()):
            note(
                f"{source.name}: {num_undefined} of {counted(len(of.values), 'value')} are not finite and therefore "
                "not drawn"
            )
    for one in groups:
        found.append(curve(one, [series[source] for source in one.sources], axis, statistic))
        if len(found[-1].clock) == 0:
            raise UsageError(f"{named(one)}: its runs have no {axis} in common")
    single = [named(one.group) for one in found if one.band is None]
    if single:
        each = f"{single[0]} has one run" if len(single) == 1 else f"{len(single)} groups have one run each"
        note(f"{each}: a line without a band, because a band needs several seeds")
    return found, axis


def draw(
    curves: Sequence[Curve], axis: str, metric: str, thresholds: Iterable[float | str] = (), axes: Any = None
) -> Any:
    """Returns a figure of curves.

    Raises:
      UsageError: as for `plot`.
    """
    environments = list(dict.fromkeys(one.group.environment for one in curves))
    lines = by_environment(thresholds, environments, float, "threshold", "475")
    labels = list(dict.fromkeys(one.group.label for one in curves))
    if axes is None:
        figure, panels = _panels(environments, labels)
    elif len(environments) == 1:
        figure, panels = axes.figure, [axes]
    else:
        raise UsageError(f"runs of different environments, {', '.join(environments)}, are not drawn in one plot")
    for panel, environment in zip(panels, environments):
        for one in curves:
            if one.group.environment == environment:
                _draw_curve(panel, one, axis, labels.index(one.group.label))
        for value in lines[environment]:
            panel.axhline(value, color="#555555", linewidth=0.9, linestyle=(0, (4, 3)), zorder=1)
        panel.set_title(environment, fontsize=11)
        panel.set_xlabel(AXIS_WORDS[axis])
        panel.xaxis.set_major_formatter(figures.engineering())
        panel.locator_params("x", nbins=6)
        figures.tidy(panel)
    panels[0].set_ylabel(metric)
    _add_legend(figure if axes is None else axes, panels, labels)
    return figure


def _panels(environments: Sequence[str], labels: Sequence[str]) -> tuple[Any, list[Any]]:
    """Returns a figure with room for the legend, and axes for each environment."""
    num_columns = min(NUM_COLUMNS, len(environments))
    num_rows = -(-len(environments) // num_columns)
    width = max(num_columns * PANEL[0], 6.0)
    legend = 0.0
    if len(labels) > 1:
        shown = _wrapped(labels, width)
        num_lines = max(label.count("\n") + 1 for label in shown)
        legend = -(-len(labels) // _legend_columns(shown, width)) * num_lines * LEGEND_LINE
    figure = figures.new_figure(width, num_rows * PANEL[1] + legend)
    grid = list(figure.subplots(num_rows, num_columns, squeeze=False).flat)
    for empty in grid[len(environments) :]:
        empty.set_visible(False)
    return figure, grid[: len(environments)]


def _legend_columns(labels: Sequence[str], width: float) -> int:
    """Returns the number of columns that fit in a legend of a given width."""
    longest = max(len(line) for label in labels for line in label.split("\n"))
    return max(1, int(width / (LEGEND_HANDLE + LEGEND_LETTER * longest)))


def _wrapped(labels: Sequence[str], width: float) -> list[str]:
    """Returns labels with line breaks, so that each line fits in a legend of a given width."""
    return [textwrap.fill(label, int((width - LEGEND_HANDLE) / LEGEND_LETTER)) for label in labels]


def _draw_curve(panel: Any, one: Curve, axis: str, number: int) -> None:
    color = figures.COLORS[number % len(figures.COLORS)]
    style = figures.STYLES[number // len(figures.COLORS) % len(figures.STYLES)]
    marker = "o" if len(one.clock) == 1 else None
    values = figures.drawable(one.values)
    panel.plot(one.clock, values, color=color, linestyle=style, linewidth=1.8, marker=marker, label=one.group.label)
    if one.band is not None:
        panel.fill_between(one.clock, *figures.drawable(one.band), color=color, alpha=0.2, linewidth=0)


def _add_legend(owner: Any, panels: Sequence[Any], labels: Sequence[str]) -> None:
    """Adds a legend below the panels, in the order of `labels`, unless there is only one label."""
    handles = {line.get_label(): line for panel in panels for line in panel.get_lines() if line.get_label() in labels}
    if len(labels) > 1:
        place: dict[str, Any] = {}
        shown = list(labels)
        if owner not in panels:
            shown = _wrapped(labels, owner.get_figwidth())
            place = {"loc": "outside lower left", "ncols": _legend_columns(shown, owner.get_figwidth())}
        owner.legend([handles[label] for label in labels], shown, fontsize="small", frameon=False, **place)
