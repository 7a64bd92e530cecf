"""What happened, as named scalars: raw rewards, episodes and infos, an unroll of raw rows at a time.

A row's reward and info belong to the action taken before it, so MID and LAST rows are environment steps; FIRST and PAD
rows are not, whatever reward they carry. An episode whose FIRST row was never seen adds steps but is no episode.
"""

from alfish.metrics.env_info import EnvInfo
from alfish.metrics.episodes import (
    AverageDiscountedReturn,
    AverageEpisodeLength,
    AverageReturn,
    EpisodeMetric,
    NumberOfEpisodes,
    StartDiscountedReturn,
)
from alfish.metrics.metric import Metric, Metrics, MovingWindow
from alfish.metrics.rows import StepBatch
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
    "StepBatch",
    "StartDiscountedReturn",
    "MovingWindow",
]
