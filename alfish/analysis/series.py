"""A metric of a run, over the run's clocks."""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import numpy as np

AXIS_WORDS = {"env_steps": "env steps", "updates": "updates", "wall_seconds": "seconds of training"}
AXES = tuple(AXIS_WORDS)
DEFAULT_METRIC = "evaluation/mean_return"


class Series(NamedTuple):
    """Values of a metric during a run.

    Attributes:
      clocks: clock `[N]` of the values on each known axis of `AXES`, non-decreasing.
      values: values of the metric, `[N]`.
    """

    clocks: Mapping[str, np.ndarray]
    values: np.ndarray


class SeriesSource(Protocol):
    """A run, or a file with curves of a run.

    Attributes:
      name: path of the source and place in the file, for messages.
      label: label that the user has given to the source; None means no label.
      environment: name of the environment; None means unknown.
      seed: seed as text; None means unknown.
      bindings: bindings of the source's configuration, by name; empty if unknown.
      notes: sentences for the user about the files; reading a metric may add some.
    """

    name: str
    notes: list[str]

    @property
    def label(self) -> str | None: ...
    @property
    def environment(self) -> str | None: ...
    @property
    def seed(self) -> str | None: ...
    @property
    def bindings(self) -> Mapping[str, str]: ...

    def series(self, metric: str) -> Series:
        """Returns a metric as a series with at least one value.

        Raises:
          UsageError: the metric has no value.
        """
