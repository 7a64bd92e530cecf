"""One metric of one run over its clocks, and where it comes from."""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import numpy as np

AXIS_WORDS = {"env_steps": "env steps", "updates": "updates", "wall_seconds": "seconds of training"}
AXES = tuple(AXIS_WORDS)
DEFAULT_METRIC = "evaluation/mean_return"


class Series(NamedTuple):
    """Values of a metric during a run.

    Attributes:
      clocks: `[N]` for each of `AXES` that is known, not descending.
      values: `[N]`.
    """

    clocks: Mapping[str, np.ndarray]
    values: np.ndarray


class Source(Protocol):
    """A run, or what stands for one.

    Attributes:
      name: path and place in it, for messages.
      label: that the user has given it, or None.
      environment: its name; None: unknown.
      seed: as text; None: unknown.
      bindings: of its configuration, by name; empty: unknown.
      notes: sentences about the files, which grow as they are read.
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
        """Returns a metric, with at least one value.

        Raises:
          UsageError: there is none.
        """
