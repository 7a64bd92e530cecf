"""The rows of one update of the metrics, with the index of each row in its episode, computed once for all metrics."""

import copy
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch

from alfish.data import StepType
from alfish.errors import UsageError
from alfish.nest import Nest

InfoRow = tuple[int, dict]  # index t of a row, and the row's info, a dict of arrays [B, ...]


def own_info(info: Mapping[str, Any]) -> dict:
    """Returns a copy of a vector info without observations, because environments may modify the info later.

    Args:
      info: nested dicts of arrays or tensors `[B, ...]`, or numbers. Tensors keep their device.
    """

    def own(value: Any) -> Any:
        if isinstance(value, dict):
            return own_info(value)
        if isinstance(value, np.ndarray):
            return value.copy()
        return value.detach().clone() if isinstance(value, torch.Tensor) else value

    return {key: own(value) for key, value in info.items() if key not in ("final_obs", "_final_obs")}


class StepBatch:
    """Consecutive raw rows of B environments. Each column continues the same column of the previous rows.

    Args:
      step_type: values of `StepType`, `[T, B]` int, T >= 1.
      reward: reward received on arriving at the row, `[T, B]` or `[T, B, R]`; arbitrary at FIRST and PAD.
      infos: pairs (t, info) of the rows with an info, arrays `[B, ...]` in gymnasium's format for vector environments.
      open_length: number of actions in each column's open episode before these rows, `[B]` int, from `next_open_length`
        of the previous rows; -1 if no episode is open or its FIRST row is missing. None means -1 for all.
      observation: observations `[T, B, ...]` of the environments, before transforms; float64 is cast to float32, and
        Discrete values start from 0.
      action: executed actions `[T, B, ...]` that led to the rows, in the algorithm's units (Box in [-1, 1], see
        `specs`); 0 at FIRST.
      objectives: names of the R entries of vector rewards.
      reward_weights: weights `[T, R]` of these entries when the rows were collected. None means 1 for all.

    Observations and actions are arbitrary at PAD. Observations are present only if a metric's class has
    `reads_observations = True`, and actions only if a metric's class has `reads_actions = True`.
    """

    def __init__(
        self,
        step_type: np.ndarray,
        reward: np.ndarray,
        infos: Sequence[InfoRow] = (),
        open_length: np.ndarray | None = None,
        observation: Nest = None,
        action: Nest = None,
        objectives: Sequence[str] = (),
        reward_weights: np.ndarray | None = None,
    ):
        self.step_type = step_type
        self.infos = infos
        self.num_envs = step_type.shape[1]
        self.open_length = np.full(self.num_envs, -1) if open_length is None else open_length
        self._reward, self._observation, self._action = reward, observation, action
        self._objectives, self._reward_weights = objectives, reward_weights

    @property
    def observation(self) -> Nest:
        """Raw observations, leaves `[T, B, ...]`.

        Raises:
          UsageError: no metric declares that it reads observations.
        """
        if self._observation is None:
            raise _unread("observation")
        return self._observation

    @property
    def action(self) -> Nest:
        """Executed actions that led to the rows, leaves `[T, B, ...]`.

        Raises:
          UsageError: no metric declares that it reads actions.
        """
        if self._action is None:
            raise _unread("action")
        return self._action

    @cached_property
    def first(self) -> np.ndarray:
        """`[T, B]` bool mask of FIRST rows."""
        return self.step_type == StepType.FIRST

    @cached_property
    def last(self) -> np.ndarray:
        """`[T, B]` bool mask of LAST rows."""
        return self.step_type == StepType.LAST

    @cached_property
    def arrived(self) -> np.ndarray:
        """`[T, B]` bool mask of MID and LAST rows. Each is one environment step."""
        return (self.step_type == StepType.MID) | self.last

    @cached_property
    def reward(self) -> np.ndarray:
        """`[T, B]` float64 rewards, 0 at FIRST and PAD; for vector rewards, the weighted sum of their entries."""
        reward = self._reward.astype(np.float64)
        if reward.ndim == 3:
            with np.errstate(all="ignore"):  # metrics count values that are not finite
                weights = 1.0 if self._reward_weights is None else self._reward_weights[:, None]
                reward = (reward * weights).sum(-1)
        return np.where(self.arrived, reward, 0.0)

    @cached_property
    def by_objective(self) -> dict[str, "StepBatch"]:
        """The rows for each entry of a vector reward, with that entry as the reward; empty for scalar rewards."""
        found = {}
        for entry, name in enumerate(self._objectives):
            found[name] = rows = copy.copy(self)  # the copy shares results that are already computed
            rows.__dict__.pop("reward", None)
            rows._reward, rows._objectives = self._reward[..., entry], ()
        return found

    @cached_property
    def index(self) -> np.ndarray:
        """`[T, B]` int index of each environment step in its episode, from 0; -1 at rows that `counted` excludes."""
        return np.where(self.arrived & self._started, self._arrivals - self._arrivals_before_episode - 1, -1)

    def power(self, base: float, offset: int = 0) -> np.ndarray:
        """Returns `base` to the power of `index + offset`, `[T, B]` float64; only `counted` rows have a meaning."""
        return base ** np.maximum(self.index + offset, 0)

    @cached_property
    def counted(self) -> np.ndarray:
        """`[T, B]` bool mask of MID and LAST rows in episodes whose FIRST row is known."""
        return self.index >= 0

    @cached_property
    def ended(self) -> np.ndarray:
        """`[T, B]` bool mask of LAST rows of episodes whose FIRST row is known."""
        return self.last & self.counted

    @cached_property
    def lengths(self) -> np.ndarray:
        """`[E]` int numbers of actions of the episodes that ended, in the order of their ends."""
        return self.index[self.ended] + 1

    @cached_property
    def next_open_length(self) -> np.ndarray:
        """`[B]` int, the argument `open_length` for the next rows."""
        row, columns = self._boundary[-1], np.arange(self.num_envs)
        since = self._arrivals[-1] - self._arrivals[row, columns]
        inside = np.where(self.first[row, columns], since, -1)
        carried = np.where(self.open_length >= 0, self.open_length + self._arrivals[-1], -1)
        return np.where(row < 0, carried, inside)

    def episode_sums(self, per_step: np.ndarray, open_sum: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """Returns sums over episodes, added in order of time, so that rounding is the same for any split into updates.

        Args:
          per_step: numbers to add, `[T, B]` float64; only `counted` rows are added.
          open_sum: sums of the open episodes over earlier rows, `[B]` float64; None at the start.

        Returns:
          Sums `[E]` of the ended episodes, in the order of their ends, and sums `[B]` of the open episodes, 0 in
          columns without an open episode.
        """
        if open_sum is None:
            open_sum = np.zeros(self.num_envs)
        ids, num_ids = self._episode_ids
        columns = np.arange(self.num_envs)
        addends = np.concatenate([open_sum, per_step[self.counted]])
        sums = np.bincount(np.concatenate([columns, ids[self.counted]]), addends, num_ids)
        return sums[ids[self.ended]], np.where(self.next_open_length >= 0, sums[ids[-1]], 0.0)

    @cached_property
    def _episode_ids(self) -> tuple[np.ndarray, int]:
        """Ids of episodes `[T, B]`, below B for episodes that are open at the start, and a number above all ids."""
        serial = np.cumsum(self.first, axis=0)
        return serial * self.num_envs + np.arange(self.num_envs), (serial[-1].max() + 1) * self.num_envs

    @cached_property
    def _boundary(self) -> np.ndarray:
        """`[T, B]` int, index of the latest FIRST or LAST row up to and including each row; -1 if there is none."""
        row = np.arange(len(self.step_type))[:, None]
        return np.maximum.accumulate(np.where(self.first | self.last, row, -1), axis=0)

    @cached_property
    def _boundary_before(self) -> np.ndarray:
        """`[T, B]` int, index of the latest FIRST or LAST row before each row; -1 if there is none."""
        return np.concatenate([np.full((1, self.num_envs), -1), self._boundary[:-1]])

    @cached_property
    def _arrivals(self) -> np.ndarray:
        """`[T, B]` int number of MID and LAST rows up to and including each row."""
        return np.cumsum(self.arrived, axis=0)

    @cached_property
    def _started(self) -> np.ndarray:
        """`[T, B]` bool, True if an episode with a known FIRST row is open just before a row."""
        row = self._boundary_before
        return np.where(row < 0, self.open_length >= 0, np.take_along_axis(self.first, np.maximum(row, 0), 0))

    @cached_property
    def _arrivals_before_episode(self) -> np.ndarray:
        """`[T, B]` int, `_arrivals` at the start of each row's episode; negative if the start is in earlier rows."""
        row = self._boundary_before
        return np.where(row < 0, -self.open_length, np.take_along_axis(self._arrivals, np.maximum(row, 0), 0))


def _unread(name: str) -> UsageError:
    return UsageError(
        f"a metric reads rows.{name}, which is stored only for metrics that declare it; set reads_{name}s = True in "
        "the metric's class"
    )
