"""Aggregates of scores over runs and environments with bootstrap intervals, as in rliable.

Scores are `[..., R, M]`: R runs (seeds) in each of M environments. Aggregates reduce the last two axes, so one call
aggregates all draws of a bootstrap.

Source: Agarwal et al., 2021, "Deep reinforcement learning at the edge of the statistical precipice".
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

NUM_DRAWS = 10_000  # number of draws of a bootstrap
PERCENTILES = (2.5, 97.5)  # percentiles of the draws that bound a 95 % interval
CHUNK = 2**22  # largest number of values resampled at once, 32 MiB

Aggregate = Callable[[np.ndarray], np.ndarray]


class Estimate(NamedTuple):
    """An aggregate and its 95 % interval; the interval is None if there is only one run."""

    value: float
    interval: tuple[float, float] | None


def mean(scores: np.ndarray) -> np.ndarray:
    """Returns the mean over environments of the mean over runs."""
    return scores.mean(-2).mean(-1)


def median(scores: np.ndarray) -> np.ndarray:
    """Returns the median over environments of the mean over runs; with one environment, the mean."""
    return np.median(scores.mean(-2), -1)


def interquartile_mean(scores: np.ndarray) -> np.ndarray:
    """Returns the mean of N = R M scores without the floor(N / 4) lowest and highest scores; nan if a score is nan."""
    together = scores.reshape(*scores.shape[:-2], -1)
    count = together.shape[-1]
    cut = count // 4
    middle = np.sort(together, -1)[..., cut : count - cut].mean(-1)
    return np.where(np.isnan(together).any(-1), np.nan, middle)  # sorting places nan last


def optimality_gap(scores: np.ndarray, target: float = 1.0) -> np.ndarray:
    """Returns the mean of max(target - score, 0)."""
    return target - np.minimum(scores, target).mean((-2, -1))


def probability_of_improvement(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Returns the probability that a run of `x` is better than a run of `y`, as the mean over environments.

    The probability is P(X > Y) + P(X = Y) / 2 over all pairs of runs: the Mann-Whitney U statistic divided by the
    number of pairs.

    Args:
      x, y: scores `[..., R, M]` and `[..., S, M]`.
    """
    difference = x[..., :, None, :] - y[..., None, :, :]
    return ((np.sign(difference) + 1) / 2).mean((-3, -2)).mean(-1)


def estimate(scores: np.ndarray, aggregate: Aggregate, num_draws: int = NUM_DRAWS, seed: int = 0) -> Estimate:
    """Returns an aggregate of scores `[R, M]` with its stratified bootstrap percentile interval.

    Runs are drawn with replacement within each environment, as rliable draws them after `np.random.seed(seed)`.
    """
    value = float(aggregate(scores))
    return Estimate(value, _interval(_draws(scores, aggregate, num_draws, seed)) if len(scores) > 1 else None)


def estimate_improvement(x: np.ndarray, y: np.ndarray, num_draws: int = NUM_DRAWS, seed: int = 0) -> Estimate:
    """Returns `probability_of_improvement` of scores `[R, M]` over `[S, M]`; runs are drawn as in `estimate`."""
    value = float(probability_of_improvement(x, y))
    if min(len(x), len(y)) < 2:
        return Estimate(value, None)
    random = np.random.RandomState(seed)
    rows = [[random.choice(len(one), one.shape) for one in (x, y)] for _ in range(num_draws)]  # as in rliable
    size = max(1, CHUNK // (len(x) * y.size))
    parts = [zip(*rows[start : start + size]) for start in range(0, num_draws, size)]
    drawn = ([np.take_along_axis(one[None], np.array(side), 1) for one, side in zip((x, y), part)] for part in parts)
    return Estimate(value, _interval(np.concatenate([probability_of_improvement(*both) for both in drawn])))


def band(curves: np.ndarray, aggregate: Aggregate, num_draws: int = 2000, seed: int = 0) -> np.ndarray:
    """Returns the pointwise 95 % interval of an aggregate of curves.

    Each draw resamples whole runs, so all points of a drawn curve come from the same runs.

    Args:
      curves: values `[R, N]` of R > 1 runs at N points.
      aggregate: function that aggregates scores.

    Returns:
      `[2, N]`: lower and upper end.
    """
    rows = np.random.RandomState(seed).choice(len(curves), (num_draws, len(curves)))
    width = max(1, CHUNK // rows.size)
    parts = [curves[:, start : start + width] for start in range(0, curves.shape[1], width)]
    drawn = (aggregate(np.moveaxis(part[rows], -1, 0)[..., None]) for part in parts)  # `[width, num_draws]`
    return np.concatenate([np.percentile(one, PERCENTILES, axis=1) for one in drawn], axis=1)


def _draws(scores: np.ndarray, aggregate: Aggregate, num_draws: int, seed: int) -> np.ndarray:
    """Returns the aggregate of each of `num_draws` resampled score matrices, `[num_draws]`."""
    random = np.random.RandomState(seed)  # drawing in parts does not change the numbers
    size = max(1, CHUNK // scores.size)
    counts = [min(size, num_draws - start) for start in range(0, num_draws, size)]
    rows = (random.choice(len(scores), (count, *scores.shape)) for count in counts)
    return np.concatenate([aggregate(np.take_along_axis(scores[None], one, 1)) for one in rows])


def _interval(draws: np.ndarray) -> tuple[float, float]:
    low, high = np.percentile(draws, PERCENTILES)
    return float(low), float(high)
