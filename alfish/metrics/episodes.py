"""Metrics of whole episodes: a weighted sum over the steps of an episode, averaged over the latest episodes."""

import abc
from typing import Any

import gin
import numpy as np
import torch

from alfish.metrics.episode_sums import StepSums
from alfish.metrics.metric import Metric, MovingWindow
from alfish.metrics.step_batch import StepBatch
from alfish.parameters import PositiveInt, UnitInterval, checked


class EpisodeMetric(Metric, abc.ABC):
    """Sums a value over the steps of each episode, and returns the mean of the last `window` finished episodes.

    A subclass defines `name` and `per_step`. Values that are not finite are counted but not averaged. With vector
    rewards, the result is for the weighted sum of the entries; a further result `name/entry` is for each entry.

    If `takes_tensors` is True, `per_step` and `finish` are also called with tensors `[B]` of a vector step
    (`ArrivedRows`), so that `CompiledUnroller` does not need to copy rows to the host.
    """

    takes_tensors = False
    reads_rewards = True  # whether the value depends on rewards, so that each entry of a vector reward has a result

    def __init__(self, window: int = 100):
        self._size = window
        self._sums = _EpisodeSums(window)
        self._by_objective: dict[str, _EpisodeSums] = {}

    @abc.abstractmethod
    def per_step(self, rows: StepBatch) -> np.ndarray:
        """Returns what each step adds to its episode's total, `[T, B]` float64; only `counted` rows are read."""

    def finish(self, total: np.ndarray, length: np.ndarray) -> np.ndarray:
        """Returns the values `[E]` of episodes from their totals (`[E]` float64) and lengths (`[E]` int)."""
        return total

    def update(self, rows: StepBatch) -> None:
        self._sums.update(self, rows)
        if self.reads_rewards:
            for name, own in rows.by_objective.items():
                self._by_objective.setdefault(name, _EpisodeSums(self._size)).update(self, own)

    @property
    def window(self) -> MovingWindow:
        """The values of the last finished episodes."""
        return self._sums.window

    @property
    def open_sum(self) -> np.ndarray | None:
        """Sums of the open episodes, `[B]` float64; None at the start."""
        return self._sums.open_sum

    @open_sum.setter
    def open_sum(self, open_sum: np.ndarray) -> None:
        self._sums.open_sum = open_sum

    def windows(self) -> dict[str, MovingWindow]:
        by_objective = {f"{self.name}/{name}": sums.window for name, sums in self._by_objective.items()}
        return {self.name: self._sums.window, **by_objective}

    def result(self) -> dict[str, float]:
        result: dict[str, float] = {}
        for name, window in self.windows().items():
            result |= window.result(name)
        return result

    def state_dict(self) -> dict[str, Any]:
        state = self._sums.state_dict()
        if self._by_objective:
            state["by_objective"] = {name: sums.state_dict() for name, sums in self._by_objective.items()}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._sums.load_state_dict(state)
        self._by_objective = {}
        for name, own in state.get("by_objective", {}).items():
            self._by_objective[name] = _EpisodeSums(self._size)
            self._by_objective[name].load_state_dict(own)


class _EpisodeSums:
    """The values of the last `size` finished episodes, and the sums of the open episodes."""

    def __init__(self, size: int):
        self.window = MovingWindow(size)
        self.open_sum: np.ndarray | None = None  # [B] float64

    def update(self, metric: EpisodeMetric, rows: StepBatch) -> None:
        with np.errstate(all="ignore"):  # the window counts rewards that are not finite
            total, self.open_sum = rows.episode_sums(metric.per_step(rows), self.open_sum)
            self.window.extend(metric.finish(total, rows.lengths))

    def state_dict(self) -> dict[str, Any]:
        open_sum = None if self.open_sum is None else torch.from_numpy(self.open_sum.copy())
        return {"window": self.window.state_dict(), "open_sum": open_sum}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.window.load_state_dict(state["window"])
        self.open_sum = None if state["open_sum"] is None else state["open_sum"].numpy().copy()


@gin.configurable(module="alfish.metrics")
@checked
class AverageReturn(EpisodeMetric):
    """Undiscounted sum of an episode's rewards; for vector rewards, also that of each entry: `average_return/ENTRY`."""

    takes_tensors = True

    def __init__(self, window: PositiveInt = 100, name: str = "average_return"):
        super().__init__(window)
        self.name = name

    def per_step(self, rows: StepBatch) -> np.ndarray:
        return rows.reward


@gin.configurable(module="alfish.metrics")
@checked
class AverageEpisodeLength(EpisodeMetric):
    """Number of actions in an episode."""

    takes_tensors = True
    reads_rewards = False

    def __init__(self, window: PositiveInt = 100, name: str = "average_episode_length"):
        super().__init__(window)
        self.name = name

    def per_step(self, rows: StepBatch) -> np.ndarray:
        return rows.arrived * 1.0


@gin.configurable(module="alfish.metrics")
@checked
class AverageDiscountedReturn(EpisodeMetric):
    """Discounted return from a step to the end of its episode, averaged over the episode's steps.

        sum_t G_t / L,   G_t = sum_{k >= t} gamma^(k-t) r_k

    Reward r_k is in G_0 ... G_k with weights gamma^k ... 1, so it adds r_k (1 - gamma^(k+1)) / (1 - gamma).
    Truncated episodes are not bootstrapped.

    Args:
      gamma: discount in [0, 1]. Metrics with different discounts need different names.
    """

    takes_tensors = True

    def __init__(self, gamma: UnitInterval = 0.99, window: PositiveInt = 100, name: str = "average_discounted_return"):
        super().__init__(window)
        self.name = name
        self._gamma = gamma

    def per_step(self, rows: StepBatch) -> np.ndarray:
        if self._gamma == 1.0:
            return rows.reward * (rows.index + 1)
        return rows.reward * (1 - rows.power(self._gamma, 1)) / (1 - self._gamma)

    def finish(self, total: np.ndarray, length: np.ndarray) -> np.ndarray:
        return total / length


@gin.configurable(module="alfish.metrics")
@checked
class StartDiscountedReturn(EpisodeMetric):
    """Discounted return from the start of the episode, sum_k gamma^k r_k: what a critic predicts at FIRST rows.

    Args:
      gamma: discount in [0, 1]. Metrics with different discounts need different names.
    """

    takes_tensors = True

    def __init__(self, gamma: UnitInterval = 0.99, window: PositiveInt = 100, name: str = "start_discounted_return"):
        super().__init__(window)
        self.name = name
        self._gamma = gamma

    def per_step(self, rows: StepBatch) -> np.ndarray:
        return rows.reward * rows.power(self._gamma)


@gin.configurable(module="alfish.metrics")
@checked
class NumberOfEpisodes(Metric):
    """Number of episodes that have ended since the start of training, except episodes whose FIRST row is missing."""

    num_rewards = 0

    def __init__(self, name: str = "episodes"):
        self.name = name
        self._count = 0

    def update(self, rows: StepBatch) -> None:
        self._count += len(rows.lengths)

    def add(self, sums: StepSums) -> None:
        self._count += sums.num_episodes

    def result(self) -> dict[str, float]:
        return {self.name: float(self._count)}

    def state_dict(self) -> dict[str, Any]:
        return {"count": self._count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._count = state["count"]
