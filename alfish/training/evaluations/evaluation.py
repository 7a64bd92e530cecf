"""Result of an evaluation."""

import csv
import functools
import io
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from alfish.errors import significant

NUM_RESAMPLES = 10_000
LARGEST = 1e300  # largest absolute return for which sums of returns are finite
ENV_INFO = "env_info/"  # first part of the names of scalars from infos
BLOCK = 1 << 20  # maximum number of returns that are drawn at a time


@dataclass(frozen=True)
class Evaluation:
    """Results of an evaluation; episode k was reset with `seed + k`."""

    env_steps: int  # environment steps of the policy's training
    seed: int
    returns: tuple[float, ...]
    lengths: tuple[int, ...]  # number of actions of each episode
    num_cut: int = 0  # number of episodes that the evaluator truncated at `max_length`
    # With vector rewards: the returns of each reward entry by name; `returns` holds the weighted sums. In games: the
    # mean return of each policy's agents by the policy's name, nan in games without such agents; `returns` holds the
    # means over the policies of a game.
    by_objective: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    # Numbers in the infos at the ends of the episodes, by name; nan for episodes that did not report the number. In
    # games: means over each policy's agents, by `POLICY/NAME`.
    infos: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    @property
    def mean(self) -> float:
        """Mean of the returns."""
        return mean(self.returns)

    @functools.cached_property
    def interval(self) -> tuple[float, float]:
        """Bootstrap interval of the mean, with 95 % confidence."""
        return bootstrap_interval(self.returns)

    def summary(self) -> dict[str, Any]:
        """Returns the mean with a 95 % bootstrap interval, the spread, and all episodes."""
        returns = np.array(self.returns)
        low, high = self.interval
        return {
            "env_steps": self.env_steps,
            "num_episodes": len(returns),
            "mean": self.mean,
            "std": deviation(returns) if len(returns) > 1 else 0.0,
            "ci_low": low,
            "ci_high": high,
            "min": float(returns.min()),
            "max": float(returns.max()),
            "returns": list(self.returns),
            "lengths": list(self.lengths),
            "num_cut": self.num_cut,
            **({"by_objective": _lists(self.by_objective)} if self.by_objective else {}),
            **({"infos": _lists(self.infos)} if self.infos else {}),
        }

    def scalars(self, name: str) -> dict[str, float]:
        """Returns the scalars that a run shows for the evaluation called `name`."""
        summary = self.summary()
        shown = {f"{name}/{which}_return": summary[which] for which in ("mean", "std", "min", "max")}
        shown |= {f"{name}/mean_return/{objective}": value for objective, value in self.means().items()}
        shown |= {f"{name}/{ENV_INFO}{key}": value for key, value in self.info_means().items()}
        return {**shown, f"{name}/mean_length": sum(self.lengths) / len(self.lengths)}

    def means(self) -> dict[str, float]:
        """Returns the means of `by_objective`, without entries that have no returns."""
        return _means(self.by_objective)

    def info_means(self) -> dict[str, float]:
        """Returns the means of `infos` over the episodes that reported them."""
        return _means(self.infos)

    def info_words(self) -> dict[str, str]:
        """Returns the means of `infos` as texts, with the number of episodes if not all reported the number."""
        words = {name: significant(value) for name, value in self.info_means().items()}
        for name, own in self.infos.items():
            if name in words and (missing := sum(map(math.isnan, own))):
                words[name] += f" (in {len(own) - missing} of {len(own)} episodes)"
        return words

    def words(self) -> str:
        """Returns the mean, its interval, and the means of `by_objective` and `infos` as a line for the log."""
        low, high = map(significant, self.interval)
        each = ", ".join(f"{name} {significant(value)}" for name, value in self.means().items())
        beside = f" ({each})" if each else ""
        infos = "".join(f", {name} {value}" for name, value in self.info_words().items())
        return f"return {significant(self.mean)} [{low}, {high}]{beside}{infos} over {len(self.returns)} episodes"

    __str__ = words

    def to_csv(self) -> str:
        columns = {"return": self.returns, "length": self.lengths}
        columns |= {f"return/{name}": own for name, own in self.by_objective.items()}
        columns |= {f"{ENV_INFO}{name}": own for name, own in self.infos.items()}
        table = io.StringIO()
        writer = csv.writer(table, lineterminator="\n")  # it quotes names with commas
        writer.writerow(["episode", "seed", *columns])
        writer.writerows([k, self.seed + k, *map(_cell, row)] for k, row in enumerate(zip(*columns.values())))
        return table.getvalue()


def _means(values: Mapping[str, tuple[float, ...]]) -> dict[str, float]:
    present = {name: [one for one in own if not math.isnan(one)] for name, own in values.items()}
    return {name: mean(own) for name, own in present.items() if own}


def _lists(values: Mapping[str, tuple[float, ...]]) -> dict[str, list[float | None]]:
    """Returns the values for JSON, which has no nan."""
    return {name: [None if math.isnan(one) else one for one in own] for name, own in values.items()}


def _cell(value: float) -> str:
    return "" if math.isnan(value) else repr(value)


def scalar_names(objectives: Sequence[str] = ()) -> list[str]:
    """Returns the names of `Evaluation.scalars` without the prefix `name/`."""
    by_objective = [f"mean_return/{objective}" for objective in objectives]
    return ["mean_return", "std_return", "min_return", "max_return", *by_objective, "mean_length"]


def mean(values: Collection[float]) -> float:
    """Returns the correctly rounded mean of one or more numbers; nan if the sum is not a number."""
    try:
        return math.fsum(values) / len(values)
    except (OverflowError, ValueError):  # numbers near the largest float, or infinities of both signs
        return math.nan


@np.errstate(over="ignore", invalid="ignore")  # numbers near the largest float may overflow
def deviation(values: np.ndarray) -> float:
    """Returns the standard deviation of two or more numbers; inf or nan if it is not finite."""
    return float(values.std(ddof=1))


def ranked(value: float) -> float:
    """Returns a key for sorting results, in which nan counts as the worst value."""
    return -math.inf if math.isnan(value) else value


def bootstrap_interval(returns: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """Returns a 95 % bootstrap interval of the mean return; nan if returns are too large or not finite."""
    if not (np.abs(returns) < LARGEST).all():
        return math.nan, math.nan
    rng, count = np.random.default_rng(0), len(returns)
    rows = max(1, BLOCK // count)  # number of resamples drawn at a time
    means = [rng.choice(returns, (min(rows, NUM_RESAMPLES - k), count)).mean(1) for k in range(0, NUM_RESAMPLES, rows)]
    low, high = np.percentile(np.concatenate(means), [2.5, 97.5])
    return float(low), float(high)
