"""Environments whose rows are encoded when they arrive."""

from collections.abc import Callable
from typing import Any

from alfish import nest
from alfish.data import TimeStep
from alfish.environments.environment import Environment
from alfish.nest import Array, Nest


class EncodedEnvironment:
    """An `Environment` with encoded observations in its rows; whatever else it has is that of the environment inside.

    Args:
      environment: is stepped.
      encode: returns the encoded observations `[B, ...]` of observations `[B, ...]`.
      observation_spec: of the encoded observations.
    """

    def __init__(self, environment: Environment, encode: Callable[[Nest], Nest], observation_spec: Nest):
        self._set(_environment=environment, _encode=encode, observation_spec=observation_spec, _raw=None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._environment, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._environment, name, value)

    def reset(self, *arguments: Any, **keywords: Any) -> TimeStep:
        return self._encoded(self._environment.reset(*arguments, **keywords))

    def step(self, action: Nest) -> TimeStep:
        return self._encoded(self._environment.step(action))

    def replace(self, time_step: TimeStep, rows: Array) -> TimeStep:
        first = self._encoded(self._environment.replace(self._raw, rows))
        return nest.where(rows, first, time_step)

    def take_resets(self) -> tuple[Array, TimeStep] | None:
        resets = self._environment.take_resets()
        return None if resets is None else (resets[0], self._with_features(resets[1]))

    def _encoded(self, raw: TimeStep) -> TimeStep:
        self._set(_raw=raw)
        return self._with_features(raw)

    def _with_features(self, raw: TimeStep) -> TimeStep:
        return raw._replace(observation=self._environment.convert(self._encode(raw.observation)))

    def _set(self, **attributes: Any) -> None:
        """Sets attributes of this object; other assignments set those of the environment."""
        self.__dict__.update(attributes)
