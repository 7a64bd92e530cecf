"""Comparison of groups of runs by final scores: aggregates, intervals, and time to a threshold."""

import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from alfish.analysis import statistics
from alfish.analysis.curves import axis_of
from alfish.analysis.grouping import SeriesGroup, by_environment, group, named, note_repeated_seeds
from alfish.analysis.series import AXIS_WORDS, Series, SeriesSource
from alfish.analysis.sources import Note, read_all
from alfish.analysis.statistics import Estimate
from alfish.errors import UsageError

ALL = "all"  # name of the comparison over all environments


class Way(NamedTuple):
    """Time until the runs of a group reach a threshold, and number of runs that reach it.

    Attributes:
      clock: median over runs of the environment steps (or updates) until the threshold is reached; inf if the median
        run never reaches it.
      seconds: median over runs of the training seconds until the threshold is reached; None means unknown.
      num_reached: number of runs that reach the threshold.
    """

    clock: float
    seconds: float | None
    num_reached: int


@dataclass(frozen=True)
class ComparisonRow:
    """The results of one group in one environment, or in all environments together.

    Attributes:
      environment: environment of the group, or `ALL`.
      label: label of the group.
      num_runs: number of runs in each environment.
      scores: final scores `[R, M]` of R runs in each of M environments.
      iqm, mean, median: aggregates of the scores.
      optimality_gap: mean amount by which scores are below the target: 1 with a score range, else the threshold. None
        means that there is neither.
      way: time to the threshold and number of runs that reach it; None means no threshold.
      axis: unit of `way.clock` and `rate`: environment steps, or updates if a run has no environment steps. Empty for
        all environments together.
      rate: median over runs of clock steps per training second; None means unknown.
      improvement: probability that a run of this group is better than a run of the other group, if there are two
        groups; else None.
    """

    environment: str
    label: str
    num_runs: int
    scores: np.ndarray
    iqm: Estimate
    mean: Estimate
    median: Estimate
    optimality_gap: Estimate | None
    way: Way | None
    axis: str
    rate: float | None
    improvement: Estimate | None


@dataclass(frozen=True)
class Comparison:
    """The table of `alfish compare`.

    Attributes:
      rows: rows of single environments, then rows of all environments together.
      metric: name of the compared metric.
      last: number of last values whose mean is the score of a run.
      thresholds: thresholds by environment.
      ranges: pairs of scores that normalization maps to 0 and 1, by environment.
    """

    rows: Sequence[ComparisonRow]
    metric: str
    last: int
    thresholds: Mapping[str, float]
    ranges: Mapping[str, tuple[float, float]]


@np.errstate(over="ignore", invalid="ignore")  # no warnings of numpy, because notes report scores that are not finite
def compare(
    sources: Sequence[SeriesSource],
    metric: str,
    note: Note,
    last: int = 1,
    thresholds: Iterable[float | str] = (),
    ranges: Iterable[str] = (),
) -> Comparison:
    """Compares groups of runs in each environment, and over all environments if each has a score range.

    Args:
      sources: runs to compare.
      metric: name of the metric, in the form that `alfish.plot` takes.
      note: function that is called with each sentence that the user should read about the runs.
      last: number of last values whose mean is the score of a run.
      thresholds: texts of thresholds, at most one for each environment, such as '475' or 'CartPole-v1:475'.
      ranges: texts of the scores that normalization maps to 0 and 1, such as '0,500' or 'CartPole-v1:0,500'.

    Raises:
      UsageError: no run has the metric, or a threshold or range cannot be read.
    """
    series = read_all(sources, metric, note)
    groups = group(list(series))
    note_repeated_seeds(groups, note)
    environments = list(dict.fromkeys(one.environment for one in groups))
    goals = _single(by_environment(thresholds, environments, float, "threshold", "475"), "threshold")
    scales = _single(by_environment(ranges, environments, _range, "score range", "0,500"), "score range")
    rows = []
    axes = {environment: _axis(environment, groups, series) for environment in environments}
    _note_ends(groups, series, axes, note)
    for one in groups:
        own = [series[source] for source in one.sources]
        _note_short(one, own, last, note)
        goal, scale = goals.get(one.environment), scales.get(one.environment)
        scores = np.array([[of.values[-last:].mean()] for of in own])
        _note_undefined(one, scores[:, 0], note)
        target = goal
        if scale is not None:
            scores, target = (scores - scale[0]) / (scale[1] - scale[0]), 1.0
        axis = axes[one.environment]
        way = None if goal is None else _way(own, axis, goal)
        rows.append(_row(one.environment, one.label, scores, target, way, axis, _rate(own, axis)))
    if len(environments) > 1:
        rows += _over_all(rows, environments, normalized=len(scales) == len(environments), note=note)
    return Comparison(_with_improvement(rows), metric, last, goals, scales)


def _axis(environment: str, groups: Sequence[SeriesGroup], series: Mapping[SeriesSource, Series]) -> str:
    """Returns the first axis that all series of an environment have."""
    sources = [source for one in groups if one.environment == environment for source in one.sources]
    return axis_of([series[source] for source in sources], [source.name for source in sources])


def _row(
    environment: str,
    label: str,
    scores: np.ndarray,
    target: float | None,
    way: Way | None,
    axis: str,
    rate: float | None,
) -> ComparisonRow:
    """Returns the row of a group with scores `[R, M]`; `target` is the target of the optimality gap."""
    aggregates = statistics.interquartile_mean, statistics.mean, statistics.median
    iqm, mean, median = (statistics.estimate(scores, one) for one in aggregates)
    gap = None
    if target is not None:
        gap = statistics.estimate(scores, functools.partial(statistics.optimality_gap, target=target))
    return ComparisonRow(environment, label, len(scores), scores, iqm, mean, median, gap, way, axis, rate, None)


def _over_all(
    rows: Sequence[ComparisonRow], environments: Sequence[str], normalized: bool, note: Note
) -> list[ComparisonRow]:
    """Returns a row over all environments for each label, with scores `[R, M]` as rliable takes them."""
    if not normalized:
        note("scores of different environments can be combined only with a --score_range for each environment")
        return []
    found = []
    for label in dict.fromkeys(row.label for row in rows):
        own = {row.environment: row for row in rows if row.label == label}
        counts = {row.num_runs for row in own.values()}
        if len(own) < len(environments) or len(counts) > 1:
            note(f"{label} has no row over all environments, because its number of runs differs between environments")
            continue
        scores = np.concatenate([own[environment].scores for environment in environments], axis=1)
        found.append(_row(ALL, label, scores, 1.0, None, "", None))
    return found


def _with_improvement(rows: Sequence[ComparisonRow]) -> list[ComparisonRow]:
    """Adds the probability of improvement to the rows of environments with two groups."""
    found = []
    for _, members in itertools.groupby(rows, lambda row: row.environment):
        pair = list(members)
        if len(pair) == 2:
            both = [statistics.estimate_improvement(x.scores, y.scores) for x, y in (pair, pair[::-1])]
            pair = [replace(row, improvement=one) for row, one in zip(pair, both)]
        found += pair
    return found


def _way(series: Sequence[Series], axis: str, goal: float) -> Way:
    firsts = [int(np.argmax(one.values >= goal)) if (one.values >= goal).any() else None for one in series]

    def median(axis: str) -> float:
        at = [np.inf if first is None else one.clocks[axis][first] for one, first in zip(series, firsts)]
        low, high = np.sort(at)[[(len(at) - 1) // 2, len(at) // 2]]
        return float(low + high) / 2

    seconds = median("wall_seconds") if all("wall_seconds" in one.clocks for one in series) else None
    return Way(median(axis), seconds, sum(first is not None for first in firsts))


def _rate(series: Sequence[Series], axis: str) -> float | None:
    ends = [(one.clocks[axis][-1], one.clocks["wall_seconds"][-1]) for one in series if "wall_seconds" in one.clocks]
    rates = [clock / seconds for clock, seconds in ends if seconds > 0]
    return float(np.median(rates)) if rates else None


def _note_ends(
    groups: Sequence[SeriesGroup], series: Mapping[SeriesSource, Series], axes: Mapping[str, str], note: Note
) -> None:
    """Adds a note for each run that ends clearly earlier than another run in the same environment."""
    for environment, axis in axes.items():
        sources = [source for one in groups if one.environment == environment for source in one.sources]
        ends = [series[source].clocks[axis][-1] for source in sources]
        for source, end in zip(sources, ends):
            if 1.01 * end < max(ends):  # a tolerance of 1 %, because final clocks of runs differ slightly
                reached = f"{end:,.0f} of {max(ends):,.0f} {AXIS_WORDS[axis]}"
                note(f"{source.name} has its last value at {reached}; this value is used")


def _note_undefined(one: SeriesGroup, scores: np.ndarray, note: Note) -> None:
    for source, score in zip(one.sources, scores):
        if not np.isfinite(score):
            note(
                f"{source.name} ends with the score {score}, so all results that depend on this run are {score} too "
                f"({named(one)})"
            )


def _note_short(one: SeriesGroup, series: Sequence[Series], last: int, note: Note) -> None:
    counts = [len(each.values) for each in series]
    if min(counts) < last:
        note(f"{named(one)}: a run has only {min(counts)} of the last {last} values; its score is their mean")


def _single(found: Mapping[str, list], noun: str) -> dict:
    """Returns the single value of each environment; raises UsageError if an environment has several."""
    for environment, values in found.items():
        if len(values) > 1:
            raise UsageError(f"{environment} has {len(values)} values for its {noun}; give only one")
    return {environment: values[0] for environment, values in found.items() if values}


def _range(text: str) -> tuple[float, float]:
    low, high = map(float, text.split(","))
    if not (low < high and math.isfinite(high - low)):
        raise ValueError(text)
    return low, high
