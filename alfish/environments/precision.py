"""Detects float64 observations whose changes are too small for float32, the dtype of stored rows."""

from collections.abc import Callable
from typing import Any

import numpy as np
from absl import logging

from alfish import nest, specs
from alfish.environments.environment import Environment
from alfish.nest import Nest

NUM_STEPS = 200  # number of vector steps that are checked
FEWEST_VALUES = 16  # an entry is reported if the range of its observed values has fewer float32 values


def watched(read: Callable[[Any], Nest], environment: Environment) -> Callable[[Any], Nest]:
    """Returns a function like `read` that checks the first steps' observations; `read` itself if no leaf is float64.

    Args:
      read: function that converts a batch of the environment's observations to the nest of time steps.
      environment: environment whose observation space and name are used.
    """
    is_float64 = specs.map_space(lambda leaf: leaf.dtype == np.float64, environment.observation_space)
    return _Watch(read, environment) if any(nest.leaves(is_float64)) else read


class _Watch:
    def __init__(self, read: Callable[[Any], Nest], environment: Environment):
        self._read, self._environment = read, environment
        self._lows: list[np.ndarray] = []
        self._highs: list[np.ndarray] = []
        self._num_steps = 0

    def __call__(self, observation: Any) -> Nest:
        if self._num_steps < NUM_STEPS:
            self._num_steps += 1
            space = self._environment.observation_space
            leaves = nest.leaves(specs.map_space(lambda _, value: np.asarray(value), space, observation))
            lows, highs = [leaf.min(0) for leaf in leaves], [leaf.max(0) for leaf in leaves]
            self._lows = [np.minimum(*pair) for pair in zip(self._lows or lows, lows)]
            self._highs = [np.maximum(*pair) for pair in zip(self._highs or highs, highs)]
            if self._num_steps == NUM_STEPS and self._environment.env_id[0] == 0 and (fault := self._fault()):
                logging.warning("%s: %s", self._environment.name, fault)
        return self._read(observation)

    def _fault(self) -> str:
        named = nest.named_leaves(
            specs.map_space(lambda leaf: leaf, self._environment.observation_space), "observation"
        )
        for (name, leaf), low, high in zip(named, self._lows, self._highs):
            if leaf.dtype != np.float64:
                continue
            largest = np.maximum(np.abs(low), np.abs(high)).astype(np.float32)
            step = np.spacing(np.minimum(largest, np.float32(3e38))).astype(np.float64)
            is_coarse = (low < high) & (high - low < FEWEST_VALUES * step)
            if is_coarse.any():
                at = tuple(int(index[0]) for index in np.nonzero(np.atleast_1d(is_coarse)))
                first, last, coarse = (float(np.atleast_1d(one)[at]) for one in (low, high, step))
                entry = list(at) if np.ndim(low) else ""
                return (
                    f"{name}{entry} ranges from {first:.10g} to {last:.10g}, but rows are stored in float32, whose "
                    f"values are {coarse:.3g} apart in this range, so changes are lost before ObservationNormalizer "
                    "sees them; subtract a constant in the environment"
                )
        return ""
