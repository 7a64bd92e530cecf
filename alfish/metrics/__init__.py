"""Metrics: named scalars of raw rewards, episodes and infos, computed from unrolls of raw rows.

A row's reward and info belong to the action before the row, so MID and LAST rows count as environment steps. FIRST and
PAD rows do not count, and their rewards are ignored. An episode whose FIRST row is missing does not count, but its
steps do.
"""

from alfish.metrics.env_info import EnvInfo, SimulatorLog
from alfish.metrics.episodes import (
    AverageDiscountedReturn,
    AverageEpisodeLength,
    AverageReturn,
    EpisodeMetric,
    NumberOfEpisodes,
    StartDiscountedReturn,
)
from alfish.metrics.metric import Metric, Metrics, MovingWindow
from alfish.metrics.step_batch import StepBatch
from alfish.metrics.steps import AverageReward, EnvironmentSteps

DEFAULT_METRICS: tuple[type[Metric], ...] = (
    NumberOfEpisodes,
    EnvironmentSteps,
    AverageReturn,
    AverageEpisodeLength,
    AverageReward,
    AverageDiscountedReturn,
    StartDiscountedReturn,
)

__all__ = [
    "DEFAULT_METRICS",
    "AverageDiscountedReturn",
    "AverageEpisodeLength",
    "AverageReturn",
    "AverageReward",
    "EnvInfo",
    "EnvironmentSteps",
    "EpisodeMetric",
    "Metric",
    "Metrics",
    "NumberOfEpisodes",
    "SimulatorLog",
    "StepBatch",
    "StartDiscountedReturn",
    "MovingWindow",
]
