"""Episodes become rows of the stream, and rows become episodes again.

An episode of T transitions has T+1 rows. Row 0 is FIRST; row T is LAST with the final observation, discount 0 where it
terminated and 1 where it was truncated, and its action is padding. Rewards stand on the row of arrival.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from gymnasium import spaces

from alfish import nest, specs
from alfish.data import Experience, StepType, TimeStep
from alfish.errors import UsageError
from alfish.nest import Nest
from alfish.offline.episode import Episode, ends
from alfish.offline.spaces import Spaces


class EpisodeEncoder:
    """Makes the stream's rows of episodes.

    Args:
      spaces: of the environment, both known.
      action_limit: the greatest magnitude of a trained Box action in [-1, 1], since a tanh policy has infinite
        log-probability at the bounds; `prev_action` is what was executed. 1: as it is.
    """

    def __init__(self, spaces: Spaces, action_limit: float):
        assert spaces.observation is not None and spaces.action is not None
        self._read = specs.ObservationUnits(spaces.observation).from_environment
        self._units = specs.ActionUnits(spaces.action)
        self._action_spec = specs.action_spec(spaces.action)
        self._limit = action_limit

    def rows(self, episode: Episode) -> Experience:
        """An episode's rows: numpy arrays `[T+1, ...]`, without a dimension of environments; `env_id` is 0."""
        length = episode.length
        step_type = np.full(length + 1, StepType.MID, np.int32)
        step_type[0], step_type[-1] = StepType.FIRST, StepType.LAST
        discount = np.ones(length + 1, np.float32)
        discount[-1] = not episode.terminated[-1]
        taken = self._units.executed(self._units.from_environment(episode.actions))
        taken = nest.map(lambda leaf, spec: np.asarray(leaf, spec.dtype), taken, self._action_spec)
        fields: tuple[Any, ...] = (  # arrays, of which the type checker thinks as tensors
            step_type,
            _shifted(np.asarray(episode.rewards, np.float32)),
            discount,
            self._read(episode.observations),
            nest.map(_shifted, taken),
            np.zeros(length + 1, np.int32),
        )
        time_step = TimeStep(*fields)
        return Experience(time_step, nest.map(self._trained, taken, self._action_spec), None, None)

    def _trained(self, taken: np.ndarray, spec: Any) -> np.ndarray:
        if isinstance(spec, spaces.Box) and spec.is_bounded("both"):
            taken = np.clip(taken, -np.float32(self._limit), np.float32(self._limit))
        return np.concatenate([taken, np.zeros_like(taken[:1])])


def _shifted(values: np.ndarray) -> np.ndarray:
    """Values `[T, ...]` on the rows of arrival, `[T+1, ...]`; zero on row 0."""
    return np.concatenate([np.zeros_like(values[:1]), values])


def episodes(
    name: str, step_type: np.ndarray, reward: np.ndarray, discount: np.ndarray, observation: Nest, actions: Nest
) -> Iterator[Episode]:
    """The episodes in consecutive rows of one environment.

    The first may have lost its beginning: its oldest row takes the place of the first one. Rows that break off before a
    LAST row, at the newest row or where an environment was built anew, are truncated at the last one.

    Args:
      name: of the environment, which ids of episodes begin with.
      step_type, reward, discount: `[N]` of each row (reward also `[N, R]`).
      observation: `[N, ...]`.
      actions: `[N, ...]` taken at each row.

    Raises:
      UsageError: a step type or a discount is none.
    """
    for what, wrong in (
        ("step type", step_type[~np.isin(step_type, (StepType.FIRST, StepType.MID, StepType.LAST))]),
        ("discount", discount[~np.isfinite(discount)]),
    ):
        if len(wrong):
            raise UsageError(
                f"environment {name}: a {what} is {wrong[0]:g}, which no environment gives; write the file again"
            )
    begins = np.flatnonzero((step_type == StepType.FIRST) | _after_last(step_type))
    for number, (start, stop) in enumerate(zip(begins, [*begins[1:], len(step_type)])):
        terminated, truncated = ends(
            stop - start - 1,
            step_type[stop - 1] == StepType.LAST and discount[stop - 1] == 0,
            step_type[stop - 1] != StepType.LAST or discount[stop - 1] != 0,
        )
        seen, taken = slice(start, stop), slice(start, stop - 1)
        arrived = reward[start + 1 : stop]
        yield Episode(
            f"{name}.{number}", nest.at(observation, seen), nest.at(actions, taken), arrived, terminated, truncated
        )


def _after_last(step_type: np.ndarray) -> np.ndarray:
    """`[N]` bool: the row before is LAST, or there is none."""
    return np.concatenate([[True], step_type[:-1] == StepType.LAST])
