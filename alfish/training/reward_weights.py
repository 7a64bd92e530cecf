"""Listeners that change the weights of a vector reward during a run (`RLAlgorithm.reward_weights`).

Replay stores all entries of the reward, and values are learned for each entry. New weights therefore apply from the
next update on, to rows of any age. The policy and its values need time to follow, so do not change weights too fast.
"""

import abc
import math
from collections.abc import Mapping, Sequence

import gin
import torch

from alfish import specs
from alfish.errors import UsageError
from alfish.functional.values import Vector
from alfish.parameters import FiniteFloat, PositiveFloat, checked
from alfish.parameters.measured import schedule_of_progress
from alfish.parameters.schedules import Schedule
from alfish.processes import replicas
from alfish.training.listener import Listener, Report, Run

MEAN = "average_reward"  # name of the metric that `LagrangianWeights` reads


class WeightListener(Listener, abc.ABC):
    """Changes the weights of a vector reward, and reports the weights in summaries as `reward_weights/NAME`.

    Every learner calls the listener, before other listeners, so that checkpoints contain the new weights.
    """

    changes_algorithm = True

    def start(self, run: Run) -> None:
        if run.algorithm.reward_weights is None:
            raise UsageError(
                f"{type(self).__name__} changes the weights of a vector reward, but {type(run.algorithm).__name__} has "
                "no weights here; leave the listener out, or name the entries of a vector reward with "
                "make_environment.rewards"
            )
        if any(isinstance(values, Vector) and values.scales_bonus for values in run.algorithm.modules()):
            raise UsageError(
                f"{type(self).__name__} would have no effect: the reward has one entry, which includes the bonus of "
                f"{type(run.algorithm).__name__}; leave the listener out, and scale the reward with RewardScale"
            )
        self.check(specs.reward_names(run.environment.reward_spec), run.algorithm.reward_weights)

    def after_iteration(self, run: Run, report: Report) -> None:
        weights, names = run.algorithm.reward_weights, specs.reward_names(run.environment.reward_spec)
        assert weights is not None
        self.change(weights, names, report)
        if report.scalars:  # at a summary, or at the first update after it
            report.scalars |= {f"reward_weights/{name}": float(weight) for name, weight in zip(names, weights)}

    @abc.abstractmethod
    def check(self, names: Sequence[str], weights: torch.Tensor) -> None:
        """Raises UsageError if the settings do not fit the reward's entries `names` and their weights `[R]`."""

    @abc.abstractmethod
    def change(self, weights: torch.Tensor, names: Sequence[str], report: Report) -> None:
        """Changes `weights` `[R]` in place after an iteration."""


@gin.configurable(module="alfish")
@checked
class ScheduledWeights(WeightListener):
    """Weights that follow schedules of progress.

    Args:
      weights: weight of each entry of the reward, a number or a schedule of progress.
    """

    def __init__(self, weights: Sequence[FiniteFloat | Schedule] = gin.REQUIRED):
        self._weights = [schedule_of_progress(weight, "ScheduledWeights.weights") for weight in weights]

    def start(self, run: Run) -> None:
        super().start(run)
        self._write(run.algorithm.reward_weights, run.clock.progress)

    def check(self, names: Sequence[str], weights: torch.Tensor) -> None:
        if len(self._weights) != len(names):
            raise UsageError(
                f"ScheduledWeights.weights has {len(self._weights)} entries, but the reward has {len(names)} "
                f"({', '.join(names)}); it must have one weight for each entry"
            )

    def change(self, weights: torch.Tensor, names: Sequence[str], report: Report) -> None:
        self._write(weights, report.progress)

    def _write(self, weights: torch.Tensor | None, progress: float) -> None:
        assert weights is not None
        weights.copy_(torch.tensor([weight(progress) for weight in self._weights]))


@gin.configurable(module="alfish")
@checked
class LagrangianWeights(WeightListener):
    """Increases a reward entry's weight while the entry's mean is below a threshold, and decreases it otherwise.

        w <- w exp(rate (threshold - mean)), between min_weight and max_weight,   at each summary

    This is gradient ascent on the dual problem: the logarithm of a weight is the multiplier of the constraint mean >=
    threshold, so weights are positive. A cost is a negative entry. Entries without a threshold keep their weights.

    Args:
      thresholds: thresholds of the mean raw reward per step, by the entry's name.
      rate: step size of a weight's logarithm, in 1 / units of reward.
      max_weight: upper limit of a weight, for constraints that no policy satisfies.
      min_weight: lower limit of a weight, from which it can rise soon when a constraint is violated again.
    """

    def __init__(
        self,
        thresholds: Mapping[str, FiniteFloat] = gin.REQUIRED,
        rate: PositiveFloat = 0.1,
        max_weight: PositiveFloat = 1000.0,
        min_weight: PositiveFloat = 1e-6,
    ):
        if min_weight > max_weight:
            raise UsageError(
                f"LagrangianWeights.min_weight is {min_weight}; it must be at most max_weight, which is {max_weight}"
            )
        self._thresholds, self._rate = dict(thresholds), rate
        self._min_weight, self._max_weight = min_weight, max_weight

    def start(self, run: Run) -> None:
        super().start(run)
        if MEAN not in run.metrics.names:
            raise UsageError(
                f"LagrangianWeights would have no effect: it reads the metric {MEAN}, but the metrics are "
                f"{', '.join(run.metrics.names) or 'none'}; add @AverageReward() to Trainer.extra_metrics"
            )

    def check(self, names: Sequence[str], weights: torch.Tensor) -> None:
        for name in self._thresholds:
            if name not in names:
                raise UsageError(
                    f"LagrangianWeights.thresholds has {name!r}, but the entries of the reward are {', '.join(names)}"
                )
            if weights[names.index(name)] <= 0:
                raise UsageError(
                    f"LagrangianWeights multiplies the weight of {name!r}, which is {weights[names.index(name)]:g}; "
                    "set a positive initial weight in reward_weights"
                )

    def change(self, weights: torch.Tensor, names: Sequence[str], report: Report) -> None:
        if not report.scalars:  # true in all learners or in none, so none of them waits in `replicas.total`
            return
        found = [f"metrics/{MEAN}/{name}" for name in self._thresholds]
        count = [report.due(f"{name}/n") or 0.0 for name in found]
        total = [(report.due(name) or 0.0) * n for name, n in zip(found, count)]
        sums = replicas.total(torch.tensor([total, count], dtype=torch.float64))  # sums over all learners
        for (name, threshold), (reward, number) in zip(self._thresholds.items(), sums.T.tolist()):
            if number:
                entry = names.index(name)
                factor = math.exp(min(self._rate * (threshold - reward / number), 700.0))
                weight = min(float(weights[entry]) * factor, self._max_weight)
                weights[entry] = max(weight, self._min_weight)
