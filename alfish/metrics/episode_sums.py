"""Metrics for unrollers with compiled environments: sums over episodes, computed with tensors.

Rows stay on the device. After an unroll, the host reads a few numbers for each metric, all in one copy. How many
numbers it reads does not depend on the number of rows.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch


class OpenEpisodes(NamedTuple):
    """The open episode of each environment."""

    length: torch.Tensor  # [B] int64, number of actions so far; -1 if the FIRST row is missing
    totals: tuple[torch.Tensor, ...]  # [B] float64 for each metric, sum over the steps so far


class Finished(NamedTuple):
    """The episodes that ended in a vector step `[B]`, or in the steps of an unroll `[T, B]`."""

    ended: torch.Tensor  # bool, whether an episode with a known FIRST row ended
    values: tuple[torch.Tensor, ...]  # float64 for each metric, its value where an episode ended


class ArrivedRows(NamedTuple):
    """Rows `[B]` after a vector step, with the fields of `StepBatch` that sums read."""

    reward: torch.Tensor  # float64
    index: torch.Tensor  # type: ignore[assignment]  # float64, index in the episode, from 0; -1 if FIRST is missing
    arrived: torch.Tensor  # bool, True for all

    def power(self, base: float, offset: int = 0) -> torch.Tensor:
        """Returns `base` to the power of `index + offset`, see `StepBatch.power`."""
        if base == 0:
            return (self.index + offset == 0).double()
        # This is faster than a power, and the first factor is the same for all offsets of a base.
        return torch.exp(self.index * math.log(base)) * base**offset


class StepSums(NamedTuple):
    """Sums over the steps of an unroll, which metrics receive instead of the rows; `open` stays on the device."""

    num_steps: int
    num_episodes: int
    rewards: np.ndarray  # float64, the newest rewards, oldest first
    values: tuple[np.ndarray, ...]  # float64 for each metric, values of the newest episodes, oldest first
    num_nonfinite: tuple[int, ...]  # for each metric, number of values that `values` lacks because they are not finite
    open: OpenEpisodes  # open episodes after the unroll


class SummedMetric(Protocol):
    """A metric whose value for an episode is a function of a sum over steps, see `EpisodeMetric`."""

    def per_step(self, rows: Any) -> Any: ...

    def finish(self, total: Any, length: Any) -> Any: ...


class EpisodeSums:
    """Adds up the steps of episodes.

    Args:
      metrics: metrics whose `per_step` and `finish` take tensors.
      num_values: number of newest values of each metric to return.
      num_rewards: number of newest rewards to return.
    """

    def __init__(self, metrics: Sequence[SummedMetric], num_values: int, num_rewards: int):
        self._metrics, self._num_values, self._num_rewards = metrics, num_values, num_rewards

    def step(self, episodes: OpenEpisodes, reward: torch.Tensor, ended: torch.Tensor) -> tuple[OpenEpisodes, Finished]:
        """Adds the rows of a vector step; can be traced into a graph.

        Args:
          episodes: open episodes before the step.
          reward: rewards of the step, `[B]` float32.
          ended: whether the episode ends in the step, and the next episode begins, `[B]` bool.

        Returns:
          The open episodes after the step, and the episodes that ended.
        """
        is_known = episodes.length >= 0
        rows = ArrivedRows(reward.double(), episodes.length.double(), torch.ones_like(is_known))
        added = [torch.where(is_known, metric.per_step(rows).double(), 0) for metric in self._metrics]
        totals = [total + new for total, new in zip(episodes.totals, added)]
        length = torch.where(is_known, episodes.length + 1, -1)
        values = [metric.finish(total, length.double()) for metric, total in zip(self._metrics, totals)]
        after = OpenEpisodes(torch.where(ended, 0, length), tuple(torch.where(ended, 0, total) for total in totals))
        return after, Finished(ended & is_known, tuple(values))

    def numbers(self, finished: Finished, reward: torch.Tensor) -> dict[str, Any]:
        """Returns tensors for the host to read after an unroll; does not wait for the device.

        Args:
          finished: episodes that ended, `[T, B]`.
          reward: rewards of the steps, `[T, B]`.
        """
        ended, values = finished.ended.flatten(), [value.flatten() for value in finished.values]
        rewards = reward.flatten()[-self._num_rewards :].double() if self._num_rewards else reward.new_empty(0)
        numbers = {"num_episodes": ended.sum(), "rewards": rewards}
        if ended.device.type == "cpu":
            place = ended.nonzero()[:, 0]
            return {**numbers, "values": [value[place] for value in values]}
        # Reading the number of episodes would wait for the device, so a fixed number of newest values is selected.
        order = torch.arange(1, len(ended) + 1, device=ended.device)
        found, nonfinite = [], []
        for value in values:
            is_finite = value.isfinite()
            newest = torch.where(ended & is_finite, order, 0).topk(min(self._num_values, len(order))).values.flip(0)
            found.append(torch.where(newest > 0, value[(newest - 1).clamp(min=0)], torch.nan))
            nonfinite.append((ended & ~is_finite).sum())
        return {**numbers, "values": found, "num_nonfinite": nonfinite}

    def sums(self, read: dict[str, Any], num_steps: int, episodes: OpenEpisodes) -> StepSums:
        """Returns the `StepSums` of an unroll.

        Args:
          read: result of `numbers`, as numpy arrays.
          num_steps: number of environment steps of the unroll.
          episodes: open episodes after the unroll.
        """
        values, counts = read["values"], [0] * len(read["values"])
        if "num_nonfinite" in read:
            values, counts = [each[~np.isnan(each)] for each in values], [int(count) for count in read["num_nonfinite"]]
        return StepSums(num_steps, int(read["num_episodes"]), read["rewards"], tuple(values), tuple(counts), episodes)
