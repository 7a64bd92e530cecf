"""Hindsight: windows of replay as if another goal had been wanted, one that was reached.

Andrychowicz et al., 2017, https://arxiv.org/abs/1707.01495. What the environment did does not depend on the goal, so
rows under another goal are as true as those stored, once their rewards are computed anew. That is done whenever windows
are drawn, and stored rows stay what they are: a row is seen under many goals.
"""

from collections.abc import Callable
from typing import Any, Literal

import gin
import numpy as np
import torch
from absl import logging
from gymnasium import spaces

from alfish import nest, specs
from alfish.data import Batch, StepType, TimeStep, trainable
from alfish.errors import UsageError
from alfish.nest import Nest
from alfish.parameters import PositiveInt, UnitInterval, checked
from alfish.replay.ring_buffer import RingBuffer

TOLERANCE = 1e-5  # between a stored reward and reward_fn's, absolute and relative

# Takes achieved goals and goals, `[M, ...]` each, in their space's dtype; gives `[M]`.
GoalFunction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@gin.configurable(module="alfish.replay")
@checked
class HindsightReplay:
    """Gives some windows a goal that was achieved later in the same episode.

    The goal is the achieved goal of one row, drawn for each window. With t its row 0 and T the last row of row 0's
    episode, or the newest one that is stored where the episode goes on:

        'future'   uniformly from rows t+1 .. T
        'final'    row T
        'episode'  uniformly from all stored rows of the episode, before and after t, t itself included

    All rows of the window that are of row 0's episode get it, the true final observation at LAST too; rows of the
    episode after that are left as they are. The reward of an arrival row is that of its own achieved goal, which is the
    one AFTER the action.

    Where the environment terminates on reaching its goal, so must the rows (`terminated_fn`): the first row that
    reaches the new goal becomes LAST with discount 0, and nothing behind it in the episode trains. A row that
    terminated because it reached the old goal, and does not reach the new one, keeps its LAST with discount 1: there
    one would have gone on. Other terminations stay. That row 0 itself is at the goal ends nothing.

    Differs from the paper: goals are drawn anew for each window in place of k at storage, so `fraction` is its
    k / (k + 1), 0.8 for k = 4; with windows of more than 2 rows, all of them share a goal.

    Args:
      reward_fn: takes (achieved goals, goals) `[M, *goal]`, returns the environment's rewards `[M]`. Or the name of a
        method of the environment that takes (achieved_goal, desired_goal, info) as goal environments' do
        (gymnasium-robotics): arrays `[M, *goal]` in its own units, and M empty dicts, because replay keeps no infos.
      goal_key: of the observation's dict, what is wanted.
      achieved_key: of the observation's dict, what there is; of the same shape and dtype.
      fraction: chance of another goal, for each window, in [0, 1].
      strategy: 'future', 'final' or 'episode'.
      terminated_fn: takes the same, returns `[M]` bool, whether the environment terminates there; or the name of such a
        method; None: on no goal.
      check_period: how often reward_fn is compared with the stored rewards: at the first call of `relabel`, and at each
        so many calls. The first that differ are warned of, once.
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
        """Takes the ring that windows come from.

        Args:
          buffer: it keeps episodes.
          observation_spec: of raw rows.

        Raises:
          UsageError: the ring keeps no episodes, or the observation has no such goals.
        """
        if not buffer.keeps_episodes:
            raise UsageError(
                "HindsightReplay wants a replay that knows its episodes; make it with keeps_episodes = True"
            )
        if not isinstance(observation_spec, dict):
            raise UsageError(
                f"HindsightReplay takes goals from an observation that is a dict, and this one is "
                f"{specs.describe(observation_spec)}"
            )
        for name, key in (("goal_key", self._goal_key), ("achieved_key", self._achieved_key)):
            if not isinstance(observation_spec.get(key), spaces.Space):
                raise UsageError(
                    f"HindsightReplay.{name} is {key!r}, which is no leaf of the observation "
                    f"({specs.describe(observation_spec)})"
                )
        wanted, achieved = observation_spec[self._goal_key], observation_spec[self._achieved_key]
        if wanted.shape != achieved.shape or wanted.dtype != achieved.dtype:
            raise UsageError(
                f"HindsightReplay puts achieved goals in the place of goals, and {self._achieved_key} is {achieved}, "
                f"{self._goal_key} {wanted}; they must have one shape and dtype"
            )
        self._buffer = buffer

    def start(self, method: Callable[[str], Callable[..., Any] | None], space: spaces.Space) -> None:
        """Takes the functions that were given by name.

        Args:
          method: the environment's method of a name, None where it has none; see `Environment.method`.
          space: its observation space.

        Raises:
          UsageError: it has no such method.
        """
        for setting in ("reward_fn", "terminated_fn"):
            function = getattr(self, f"_{setting}")
            if isinstance(function, str):
                setattr(self, f"_{setting}", self._named(setting, function, method(function), space))

    def _named(self, setting: str, name: str, method: Callable[..., Any] | None, space: Any) -> GoalFunction:
        """A method of the environment as a function of tensors in the stream's units."""
        if not callable(method):
            raise UsageError(
                f"HindsightReplay.{setting} is {name!r}, and the environment has no such method; give it "
                f"{name}(achieved_goal, desired_goal, info), or bind a function of (achieved goals, goals)"
            )
        own = [space[key] for key in (self._achieved_key, self._goal_key)]
        units = [specs.ObservationUnits(leaf) for leaf in own]

        def of_rows(*goals: torch.Tensor) -> torch.Tensor:
            rows = [one.to_environment(goal.cpu().numpy()) for one, goal in zip(units, goals)]
            rows = [np.asarray(row, leaf.dtype) for row, leaf in zip(rows, own)]
            result = np.array(method(*rows, [{} for _ in rows[0]]))
            if result.shape[:1] != (len(rows[0]),):
                raise UsageError(
                    f"HindsightReplay.{setting}: {name} of the environment was given {len(rows[0])} rows of goals, and "
                    f"returned shape {list(result.shape)}; it returns one value a row: mend it, or bind a function of "
                    "(achieved goals, goals)"
                )
            return torch.from_numpy(result).to(goals[0].device)

        return of_rows

    def relabel(self, batch: Batch, column: torch.Tensor, position: torch.Tensor) -> Batch:
        """The same windows, some of them with another goal. Draws from torch's global generator.

        Args:
          batch: raw rows `[L, N]`, before transforms, as the ring gave them.
          column: `[N]` int64, of the ring.
          position: `[N]` int64, of row 0.

        Returns:
          The batch with other goals, rewards, and with `terminated_fn` step types, discounts and mask too.
          `return_to_go` is nan in relabelled rows, since it is not known under another goal.
        """
        step, num_windows = batch.experience.time_step, len(position)
        if self._num_calls % self._check_period == 0 and not self._has_warned:
            self._check_rewards(batch)
        self._num_calls += 1
        end = self._buffer.episode_end(column, position)
        # Tossed on the CPU, so that a seed means the same goals on every device.
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
        """`[N]` the rows whose achieved goals become goals; where there is none after row 0, any."""
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
        """Ends the relabelled episodes where their new goal is reached, and no more where only their old one was.

        Args:
          step: `[L, N]`, with the new goals.
          arrived: `[L-1, N]` bool, which arrival rows are relabelled.
          achieved: `[L-1, N, *goal]`, at arrival.
          before: `[L-1, N, *goal]`, the old goals.
        """
        reaches = arrived & self._terminates(achieved, step.observation[self._goal_key][1:])
        reached = arrived & self._terminates(achieved, before)
        discount = torch.where(reached & (step.discount[1:] == 0), 1.0, step.discount[1:])
        discount = torch.where(reaches, 0.0, discount)
        # LAST repeats up to the end of the episode, so that no row of it trains and no return runs past the first.
        over = arrived & (reaches.cumsum(0) > 0)
        step_type = torch.where(over, StepType.LAST, step.step_type[1:])
        return step._replace(
            step_type=torch.cat([step.step_type[:1], step_type]), discount=torch.cat([step.discount[:1], discount])
        )

    def _check_rewards(self, batch: Batch) -> None:
        """Warns where reward_fn does not say what the environment did of rows that are not relabelled."""
        step = batch.experience.time_step
        stored, observation = step.reward[1:], step.observation
        computed = self._rewards(observation[self._achieved_key][1:], observation[self._goal_key][1:], stored)
        differs = nest.widened(batch.mask, stored) & ~torch.isclose(computed, stored, TOLERANCE, TOLERANCE)
        if not differs.any():
            return
        self._has_warned = True
        logging.warning(
            "HindsightReplay.reward_fn gives %g where the environment gave %g, and differs in %d of %d rows; bind "
            "the function that the environment rewards with, or rows with another goal mean another task",
            computed[differs][0].item(),
            stored[differs][0].item(),
            differs.sum().item(),
            batch.mask.sum().item(),
        )

    def _rewards(self, achieved: torch.Tensor, goal: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
        """`[L-1, N]`, or `[L-1, N, R]`: as stored ones are."""
        return _called("reward_fn", self._reward_fn, achieved, goal, stored.shape).to(stored.dtype)

    def _terminates(self, achieved: torch.Tensor, goal: torch.Tensor) -> torch.Tensor:
        assert self._terminated_fn is not None
        return _called("terminated_fn", self._terminated_fn, achieved, goal, achieved.shape[:2]).bool()


def _called(
    name: str, function: GoalFunction, achieved: torch.Tensor, goal: torch.Tensor, shape: torch.Size
) -> torch.Tensor:
    """What a function says of all rows `[T, N]` at once, in `shape` `[T, N, ...]`."""
    result = function(achieved.flatten(0, 1), goal.flatten(0, 1))
    expected = (shape[0] * shape[1], *shape[2:])
    got = tuple(result.shape) if isinstance(result, torch.Tensor) else type(result).__name__
    if got != expected:
        raise UsageError(
            f"HindsightReplay.{name} was given two tensors of {expected[0]} goals, and returned {got}; it returns a "
            f"tensor of shape {expected}"
        )
    return result.reshape(shape)
