"""Curves of groups of runs, aggregated over aligned runs, with confidence bands."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from alfish.analysis import statistics
from alfish.analysis.grouping import SeriesGroup
from alfish.analysis.series import AXES, Series
from alfish.errors import UsageError, argument, significant

NUM_POINTS = 200  # number of interpolated points of a curve whose runs share too few points, see `aligned`


def _median_of_runs(scores: np.ndarray) -> np.ndarray:
    """Returns the mean over environments of the median over runs.

    In contrast, `alfish.analysis.statistics.median` is the median over environments of the mean over runs.
    """
    return np.median(scores, -2).mean(-1)


# Functions that aggregate R runs at each point of a curve, from `[..., R, 1]` to `[...]`.
AGGREGATES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "iqm": statistics.interquartile_mean,
    "mean": statistics.mean,
    "median": _median_of_runs,
}


class Curve(NamedTuple):
    """A metric of a group, aggregated over the group's runs.

    Attributes:
      group: group of the runs.
      clock: clocks `[N]` of the points, at each of which all runs have a value.
      values: aggregate of the runs, `[N]`.
      band: 95 % interval of the aggregate, `[2, N]`; None for a single run.
      series: the metric of each run.
    """

    group: SeriesGroup
    clock: np.ndarray
    values: np.ndarray
    band: np.ndarray | None
    series: tuple[Series, ...]


def curve(group: SeriesGroup, series: Sequence[Series], axis: str, statistic: str) -> Curve:
    """Returns the curve of a group.

    Args:
      group: group of runs.
      series: the metric of each run.
      axis: name of the axis, one of `AXES`; all series have it.
      statistic: name of the aggregate, one of `AGGREGATES`.
    """
    clock, values = aligned([one.clocks[axis] for one in series], [one.values for one in series])
    aggregate = AGGREGATES[statistic]
    band = statistics.band(values, aggregate) if len(series) > 1 else None
    return Curve(group, clock, aggregate(values.T[:, :, None]), band, tuple(series))


def aligned(clocks: Sequence[np.ndarray], values: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Returns points that all runs have reached, and the values of each run at these points.

    If all runs share at least half of the shortest run's points, as evaluations do, the shared points are used.
    Otherwise runs are interpolated linearly between the latest beginning and the earliest end.

    Args:
      clocks: clocks `[N_r]` of each run r.
      values: values `[N_r]` of each run r; of several values at the same clock, the last is used.

    Returns:
      Points `[N]`, and values `[R, N]`.

    Raises:
      UsageError: a run ends before another one begins.
    """
    orders = [np.argsort(clock, kind="stable") for clock in clocks]
    clocks, values = ([one[order] for one, order in zip(side, orders)] for side in (clocks, values))
    lasts = [np.append(np.diff(clock) > 0, True) for clock in clocks]
    clocks, values = ([one[last] for one, last in zip(side, lasts)] for side in (clocks, values))
    shared = clocks[0]
    for clock in clocks[1:]:
        shared = np.intersect1d(shared, clock, assume_unique=True)
    if 2 * len(shared) >= min(map(len, clocks)):
        return shared, np.stack([one[np.isin(clock, shared)] for clock, one in zip(clocks, values)])
    begin, end = max(clock[0] for clock in clocks), min(clock[-1] for clock in clocks)
    if begin > end:
        raise UsageError(
            f"a run ends at {significant(end)} and another begins at {significant(begin)}, so they have no point in "
            "common; draw them separately"
        )
    points = np.linspace(begin, end, NUM_POINTS)
    return points, np.stack([np.interp(points, clock, one) for clock, one in zip(clocks, values)])


def axis_of(series: Sequence[Series], names: Sequence[str], axis: str | None = None) -> str:
    """Returns the horizontal axis: the given axis, or the first axis that all series have.

    Raises:
      UsageError: a series does not have the axis.
    """
    for one in (axis,) if axis is not None else AXES:
        lacking = [name for name, of in zip(names, series) if one not in of.clocks]
        if not lacking:
            return one
    known = [name for name in AXES if all(name in of.clocks for of in series)]
    remedy = f"; {argument('x', known[0])} draws all of them" if known else "; draw them separately"
    raise UsageError(f"{lacking[0]} has no {one}{remedy}")
