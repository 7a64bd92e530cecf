"""Hindsight: relabels windows of replay with goals that were achieved in the same episode.

Andrychowicz et al., 2017, https://arxiv.org/abs/1707.01495. The dynamics of the environment do not depend on the goal.
A row is therefore valid under any goal if its reward is computed for that goal. Windows are relabelled when they are
drawn, and stored rows do not change, so each row can train under many goals.
"""

from collections.abc import Callable
from typing import Any, Literal, Protocol

import gin
import numpy as np
import torch
from absl import logging
from gymnasium import spaces

from alfish import nest, specs
from alfish.data import Batch, StepType, TimeStep, trainable
from alfish.errors import UsageError
from alfish.errors.user_code import calling, in_words
from alfish.nest import Nest
from alfish.parameters import PositiveInt, UnitInterval, checked
from alfish.replay.ring_buffer import RingBuffer

TOLERANCE = 1e-5  # absolute and relative tolerance between stored rewards and reward_fn

# Takes achieved goals and desired goals, `[M, ...]` each, in their space's dtype; returns `[M]`.
GoalFunction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class GoalEnvironment(Protocol):
    """Interface that hindsight requires of an environment."""

    observation_space: Any

    def method(self, name: str) -> Callable[..., Any] | None:
        """Returns the environment's method with the given name; None if the environment has no such method."""


@gin.configurable(module="alfish.replay")
@checked
class HindsightReplay:
    """Relabels some windows with a goal that was achieved in the same episode.

    The new goal of a window is the achieved goal of a row in the same episode. t is the position of the window's row 0.
    T is the position of the last row of the episode, or of the newest stored row if the episode is open. `strategy`
    selects the position of the row with the new goal:

        'future'   drawn uniformly from t+1 .. T
        'final'    T
        'episode'  drawn uniformly from all stored rows of the episode, t included

    All rows of the window in row 0's episode get the new goal, including the final observation at LAST. Rows of the
    next episode do not change. The reward of each relabelled row after row 0 is computed from the achieved goal of that
    row, AFTER the action that led to the row.

    `terminated_fn` is for environments that terminate when the goal is reached. The first row that reaches the new goal
    becomes LAST with discount 0, and later rows of the episode do not train. A row that terminated at the old goal, but
    does not reach the new goal, stays LAST and gets discount 1, because the episode would have continued. Terminations
    for other reasons do not change. The episode does not end at row 0, even if row 0 is at the new goal.

    Differences from the paper: a goal is drawn each time a window is drawn, instead of k goals when rows are stored;
    `fraction` corresponds to the paper's k / (k + 1), 0.8 for k = 4. All rows of a window have the same goal.

    Args:
      reward_fn: function of (achieved goals, desired goals), `[M, *goal]` each, that returns the environment's rewards
        `[M]`. Or the name of a method of the environment with the arguments (achieved_goal, desired_goal, info), as in
        gymnasium-robotics. The method receives arrays `[M, *goal]` in the environment's units, and M empty dicts,
        because replay stores no infos.
      goal_key: key of the desired goal in the observation's dict.
      achieved_key: key of the achieved goal in the observation's dict; both goals have the same shape and dtype.
      fraction: probability that a window is relabelled, in [0, 1].
      strategy: rule by which the new goal is chosen: 'future', 'final' or 'episode'.
      terminated_fn: function with the arguments of `reward_fn`, or the name of such a method; returns `[M]` bool, True
        where the environment terminates. None means that a reached goal does not end an episode.
      check_period: number of calls of `relabel` between two comparisons of `reward_fn` with stored rewards; the first
        call compares too. A difference is logged once.
    """

    def __init__(
        self,
        reward_fn: GoalFunction | str = "compute_reward",
        goal_key: str = "desired_goal",
        achieved_key: str = "achieved_goal",
        fraction: UnitInterval = 0.8,
        strategy: Literal["future", "final", "episode"] = "future",
        terminated_fn: GoalFunction | str | None = None,
        check_period: PositiveInt = 100,
    ):
        self._reward_fn: Any = reward_fn
        self._terminated_fn: Any = terminated_fn
        self._goal_key, self._achieved_key = goal_key, achieved_key
        self._fraction, self._strategy, self._check_period = fraction, strategy, check_period
        self._num_calls, self._has_warned = 0, False

    def bind(self, buffer: RingBuffer, observation_spec: Nest) -> None:
        """Sets the ring from which windows are drawn.

        Args:
          buffer: ring that indexes episodes.
          observation_spec: spec of the observations in raw rows.

        Raises:
          UsageError: the ring does not index episodes, or the observation lacks the goals.
        """
        if not buffer.keeps_episodes:
            raise UsageError(
                "HindsightReplay needs a replay that indexes episodes; construct it with keeps_episodes = True"
            )
        if not isinstance(observation_spec, dict):
            raise UsageError(
                "HindsightReplay reads goals from a dict observation, but the observation is "
                f"{specs.describe(observation_spec)}"
            )
        for name, key in (("goal_key", self._goal_key), ("achieved_key", self._achieved_key)):
            if not isinstance(observation_spec.get(key), spaces.Space):
                raise UsageError(
                    f"HindsightReplay.{name} is {key!r}, which is not a leaf of the observation "
                    f"({specs.describe(observation_spec)})"
                )
        wanted, achieved = observation_spec[self._goal_key], observation_spec[self._achieved_key]
        if wanted.shape != achieved.shape or wanted.dtype != achieved.dtype:
            raise UsageError(
                f"HindsightReplay replaces goals with achieved goals, but {self._achieved_key} is {achieved} and "
                f"{self._goal_key} is {wanted}; they must have the same shape and dtype"
            )
        self._buffer = buffer

    def start(self, environment: GoalEnvironment) -> None:
        """Looks up `reward_fn` and `terminated_fn` in the environment, if they are names of its methods.

        Raises:
          UsageError: the environment has no such method.
        """
        for setting in ("reward_fn", "terminated_fn"):
            function = getattr(self, f"_{setting}")
            if isinstance(function, str):
                method, space = environment.method(function), environment.observation_space
                setattr(self, f"_{setting}", self._named(setting, function, method, space))

    def _named(self, setting: str, name: str, method: Callable[..., Any] | None, space: Any) -> GoalFunction:
        """Returns a method of the environment as a function of tensors in alfish's units."""
        if not callable(method):
            raise UsageError(
                f"HindsightReplay.{setting} is {name!r}, but the environment has no such method; add "
                f"{name}(achieved_goal, desired_goal, info), or bind a function of (achieved goals, goals)"
            )
        own = [space[key] for key in (self._achieved_key, self._goal_key)]
        units = [specs.ObservationUnits(leaf) for leaf in own]

        def of_rows(*goals: torch.Tensor) -> torch.Tensor:
            rows = [one.to_environment(goal.cpu().numpy()) for one, goal in zip(units, goals)]
            rows = [np.asarray(row, leaf.dtype) for row, leaf in zip(rows, own)]
            try:
                result = np.array(method(*rows, [{} for _ in rows[0]]))
            except Exception as error:
                shapes = " and ".join(str(list(row.shape)) for row in rows)
                call = f"HindsightReplay.{setting}: {name}, called with goals {shapes} and {len(rows[0])} infos {{}},"
                raise UsageError(
                    f"{in_words(error, call)}; it must accept one pair or a batch of pairs and return one value per "
                    "row; or bind a function of (achieved goals, goals)"
                ) from error
            if result.shape[:1] != (len(rows[0]),):
                raise UsageError(
                    f"HindsightReplay.{setting}: {name} of the environment received {len(rows[0])} rows of goals and "
                    f"returned shape {list(result.shape)}; return one value per row, or bind a function of (achieved "
                    "goals, goals)"
                )
            return torch.from_numpy(result).to(goals[0].device)

        return of_rows

    def relabel(self, batch: Batch, column: torch.Tensor, position: torch.Tensor) -> Batch:
        """Relabels some of the windows. Draws from torch's global generator.

        Args:
          batch: raw rows `[L, N]` of the ring, before transforms.
          column: columns of the windows, `[N]` int64.
          position: positions of row 0 of the windows, `[N]` int64.

        Returns:
          The batch with new goals and rewards; with `terminated_fn` also new step types, discounts and mask.
          `return_to_go` is nan in relabelled rows, because it is unknown for the new goal.
        """
        step, num_windows = batch.experience.time_step, len(position)
        if self._num_calls % self._check_period == 0 and not self._has_warned:
            self._check_rewards(batch)
        self._num_calls += 1
        end = self._buffer.episode_end(column, position)
        # Windows to relabel are drawn on the CPU, so that a seed selects the same windows on every device.
        chosen = (torch.rand(num_windows) < self._fraction).to(end.device) & (end > position)
        source = self._goal_position(column, position, end)
        row = torch.arange(len(step.reward), device=end.device).unsqueeze(1)
        relabelled = chosen & (position + row <= end)  # [L, N]
        reached = self._buffer.observation(column, source.unsqueeze(0), self._achieved_key)  # [1, N, *goal]
        before = step.observation[self._goal_key]
        goal = torch.where(nest.widened(relabelled, before), reached, before)
        arrived = relabelled[1:]
        achieved = step.observation[self._achieved_key][1:]
        reward = torch.where(
            nest.widened(arrived, step.reward), self._rewards(achieved, goal[1:], step.reward[1:]), step.reward[1:]
        )
        step = step._replace(
            reward=torch.cat([step.reward[:1], reward]), observation={**step.observation, self._goal_key: goal}
        )
        mask = batch.mask
        if self._terminated_fn is not None:
            step = self._with_terminations(step, arrived, achieved, before[1:])
            mask = mask & trainable(step.step_type)
        experience = batch.experience._replace(time_step=step)
        if experience.return_to_go is not None:
            unknown = torch.where(relabelled, torch.nan, experience.return_to_go)
            experience = experience._replace(return_to_go=unknown)
        return batch._replace(experience=experience, mask=mask)

    def _goal_position(self, column: torch.Tensor, position: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
        """Returns the position of the row with the new goal, `[N]`; arbitrary if no row follows row 0."""
        if self._strategy == "final":
            return end
        first = position + 1 if self._strategy == "future" else self._buffer.episode_start(column, position)
        point = torch.rand(len(position), dtype=torch.float64).to(
            end.device
        )  # float64: exact in episodes of any length
        return torch.minimum(first + (point * (end - first + 1)).long(), end)

    def _with_terminations(
        self, step: TimeStep, arrived: torch.Tensor, achieved: torch.Tensor, before: torch.Tensor
    ) -> TimeStep:
        """Ends relabelled episodes where the new goal is reached, and undoes terminations at the old goal.

        Args:
          step: rows `[L, N]` with the new goals.
          arrived: mask of rows 1 to L-1 that are relabelled, `[L-1, N]` bool.
          achieved: achieved goals at rows 1 to L-1, `[L-1, N, *goal]`.
          before: old desired goals at rows 1 to L-1, `[L-1, N, *goal]`.
        """
        reaches = arrived & self._terminates(achieved, step.observation[self._goal_key][1:])
        reached = arrived & self._terminates(achieved, before)
        discount = torch.where(reached & (step.discount[1:] == 0), 1.0, step.discount[1:])
        discount = torch.where(reaches, 0.0, discount)
        # All later rows of the episode become LAST: they do not train, and returns end at the first LAST row.
        over = arrived & (reaches.cumsum(0) > 0)
        step_type = torch.where(over, StepType.LAST, step.step_type[1:])
        return step._replace(
            step_type=torch.cat([step.step_type[:1], step_type]), discount=torch.cat([step.discount[:1], discount])
        )

    def _check_rewards(self, batch: Batch) -> None:
        """Logs a warning if `reward_fn` does not return the stored rewards of a batch, before relabelling."""
        step = batch.experience.time_step
        stored, observation = step.reward[1:], step.observation
        computed = self._rewards(observation[self._achieved_key][1:], observation[self._goal_key][1:], stored)
        differs = nest.widened(batch.mask, stored) & ~torch.isclose(computed, stored, TOLERANCE, TOLERANCE)
        if not differs.any():
            return
        self._has_warned = True
        logging.warning(
            "HindsightReplay.reward_fn returns %g where the environment returned %g, and differs in %d of %d rows; "
            "bind the environment's reward function, otherwise relabelled rows train a different task",
            computed[differs][0].item(),
            stored[differs][0].item(),
            differs.sum().item(),
            batch.mask.sum().item(),
        )

    def _rewards(self, achieved: torch.Tensor, goal: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
        """Returns rewards with the shape and dtype of stored rewards, `[L-1, N]` or `[L-1, N, R]`."""
        return _called("reward_fn", self._reward_fn, achieved, goal, stored.shape).to(stored.dtype)

    def _terminates(self, achieved: torch.Tensor, goal: torch.Tensor) -> torch.Tensor:
        assert self._terminated_fn is not None
        return _called("terminated_fn", self._terminated_fn, achieved, goal, achieved.shape[:2]).bool()


def _called(
    name: str, function: GoalFunction, achieved: torch.Tensor, goal: torch.Tensor, shape: torch.Size
) -> torch.Tensor:
    """Calls a function with all rows `[T, N]` at once, and returns its result in `shape` `[T, N, ...]`."""
    with calling(f"HindsightReplay.{name}"):
        result = function(achieved.flatten(0, 1), goal.flatten(0, 1))
    expected = (shape[0] * shape[1], *shape[2:])
    got = tuple(result.shape) if isinstance(result, torch.Tensor) else type(result).__name__
    if got != expected:
        raise UsageError(
            f"HindsightReplay.{name} received two tensors of {expected[0]} goals and returned {got}; return a tensor "
            f"of shape {expected}"
        )
    return result.reshape(shape)
