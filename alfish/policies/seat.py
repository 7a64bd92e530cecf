"""Acts for one policy in its columns of games, and collects the rows on which it trains."""

from typing import Any

import numpy as np
import torch

from alfish import nest
from alfish.algorithms.acting import reset_state
from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.data import Experience, StepType, TimeStep
from alfish.environments.environment import Environment
from alfish.environments.games import Games, Group
from alfish.nest import Nest
from alfish.runs.random_state import RandomStream
from alfish.transforms import Transforms
from alfish.unrollers import rollouts
from alfish.unrollers.sync import SyncUnroller, UnrollStart


class Columns(Environment):
    """Columns of a group of agents, in the form of environments that are stepped elsewhere.

    Args:
      games: games of the group.
      group: group of agents.
      columns: indices of the columns, in ascending order.

    Attributes:
      arrived: rows `[C]` that `step` returns next.
      continues: whether the games continue from a saved state.
    """

    arrived: TimeStep
    continues = False

    def __init__(self, games: Games, group: Group, columns: np.ndarray):
        super().__init__(len(columns), group.observation_space, group.action_space, group.reward_spec)
        self.name, self.stepping = games.name, games.stepping
        self.follows_progress = False  # False here, because `GameUnroller` passes the progress to the games

    def reset(self, seeds: Any = None, rows: np.ndarray | None = None) -> TimeStep:
        return self.arrived

    def step(self, action: Nest) -> TimeStep:
        return self.arrived

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        return self.continues


class Seat(SyncUnroller):
    """Acts for one policy in the columns that it may play.

    The unroller calls `begin`, then `choose` and `arrive` for each step, then `finish`. It activates `stream` during
    each of these calls, except `arrive`. Where another policy plays a column, or an agent has no row, the row is PAD.
    At the end of an unroll, PAD rows are moved to the ends of columns.

    A row whose action was executed trains in exactly one unroll, also on-policy. If the next row comes in a later
    unroll, because other agents have their turns, the later unroll begins with the waiting row.

    Args:
      games: games to play.
      group: group of the policy's agents.
      columns: indices of the policy's columns in the group.
      algorithm, transforms: networks of the policy.
      stream: random numbers of the policy.
      has_gaps: whether the policy may have no row in some columns and steps.
      first_env_id: `env_id` of the first column.
      acting: other settings of `SyncUnroller`.

    Attributes:
      columns: columns of the group; a slice if the policy may play all of them.
      stream, has_gaps: the constructor's arguments.
    """

    def __init__(
        self,
        games: Games,
        group: Group,
        columns: np.ndarray,
        algorithm: RLAlgorithm,
        transforms: Transforms,
        stream: RandomStream,
        has_gaps: bool,
        first_env_id: int = 0,
        **acting: Any,
    ):
        self._handed = Columns(games, group, columns)
        self._handed.env_id += first_env_id
        super().__init__(self._handed, algorithm, transforms, **acting)
        self.columns: Any = slice(None) if len(columns) == group.num_envs else columns
        self.stream, self.has_gaps = stream, has_gaps
        self._start = UnrollStart(False, None, None)
        self._rows: list[tuple[TimeStep, Nest, Nest]] = []
        self._infos: list[tuple[int, dict[str, Any]]] = []
        # Used on-policy with gaps: a mask `[C]` of columns that wait for the row after their last action; the leaves
        # `[C, ...]` of the waiting rows (time step, action, info); and the leaves of the states at these rows. None if
        # no column waits.
        self._waiting: tuple[np.ndarray, list[Any], list[torch.Tensor]] | None = None
        # Leaves of the states of the policy and the transforms at the last row of each column.
        self._states_at_row: list[torch.Tensor] | None = None

    def seat(self, rows: TimeStep, is_played: np.ndarray | None) -> None:
        """Receives the first rows of all games; the arguments are those of `arrive`."""
        self._receive(rows, is_played)
        self._unseen = True

    def _receive(self, rows: TimeStep, is_played: np.ndarray | None) -> None:
        """Sets `time_step` to this policy's rows out of its group's rows, with PAD where another policy plays."""
        if type(self.columns) is not slice:
            rows = nest.at(rows, self.columns)
        step_type, reward, discount, observation, prev_action, _ = rows
        if is_played is not None:
            step_type = np.where(is_played[self.columns], step_type, np.int32(StepType.PAD))
        self._handed.arrived = TimeStep(
            step_type, reward, discount, observation, prev_action, self._handed.env_id
        )  # `_replace` takes longer
        # If transforms encode observations, `environment` is a wrapper whose `step` encodes `_handed.arrived`.
        self.time_step = self._handed.arrived if self.environment is self._handed else self.environment.step(None)

    def begin(self, at_random: bool, policy_version: int) -> None:
        """Begins an unroll."""
        self.policy_version = policy_version
        self._start = self._begin(at_random)
        self._rows = []
        self._infos = []

    def choose(self) -> Nest:
        """Returns actions for all columns, arrays `[C, ...]`."""
        seen, before = self.time_step, (self._state, self._transform_state)
        step, transform_state = self.act()
        self._rows.append((seen, step.output, step.info))
        self._state, self._transform_state = step.state, transform_state
        if self.has_gaps and nest.leaves(before):
            is_absent = torch.from_numpy(seen.step_type == StepType.PAD).to(self._device)
            before = nest.tensors(before, self._device)
            kept = self._states_at_row or nest.leaves(before)
            self._states_at_row = [_where(is_absent, *pair) for pair in zip(kept, nest.leaves(before))]
            # The memory of an agent without a row does not change.
            after = nest.tensors((step.state, transform_state), self._device)
            self._state, self._transform_state = nest.where(is_absent, before, after)
        return self.environment.convert(step.output)

    def arrive(
        self,
        rows: TimeStep,
        is_played: np.ndarray | None,
        info: dict[str, Any],
        broken: np.ndarray | None = None,
    ) -> None:
        """Receives the rows that follow the actions.

        Args:
          rows: rows of the policy's group.
          is_played: mask of the group's columns that the policy plays; None means that each column has one policy.
          info: gymnasium's info of the step, for the policy's columns.
          broken: mask of the group's columns whose game has failed and was built again. The episodes of these columns
            end with the rows before this step. None means no columns.
        """
        if broken is not None:
            seen, *others = self._rows[-1]
            self._rows[-1] = (rollouts.ended(seen, broken[self.columns]), *others)
        self._receive(rows, is_played)
        if info:
            self._infos.append((len(self._rows) - 1, info))

    def finish(self) -> Experience:
        """Returns the rows of the unroll, and sets `records`."""
        newest: TimeStep | None = self.time_step
        if self._algorithm.on_policy:
            step, _ = self.act()  # the next unroll acts again from this row
            self._rows.append((self.time_step, step.output, step.info))
            newest = None
        time_step, *others = rollouts.stacked(self._rows)
        self._record(time_step, newest, None, self._start.unseen, self._infos)
        if self.has_gaps:
            time_step, others = self._closed_up(time_step, nest.arrays(others))
        return self._finish(self._start, time_step, others, None)

    def _closed_up(self, time_step: TimeStep, others: Nest) -> tuple[TimeStep, Nest]:
        """Moves PAD rows to the ends of columns.

        On-policy, rows without a next row are kept for the next unroll.
        """
        leaves, structure = nest.flatten((time_step, *others))
        state, transform_state = self._start.state, self._start.transform_state
        if self._waiting is not None:
            waits, waiting, states = self._waiting
            leaves = [_with_row(leaf, row, waits) for leaf, row in zip(leaves, waiting, strict=True)]
            own = nest.tensors((state, transform_state), self._device)
            states = nest.unflatten(nest.flatten(own)[1], states)
            state, transform_state = nest.where(torch.from_numpy(waits).to(self._device), states, own)
        rows = nest.unflatten(structure, leaves)
        step_type = rows[0].step_type
        order = np.argsort(step_type == StepType.PAD, axis=0, kind="stable")
        rows = nest.map(lambda leaf: leaf[order, np.arange(len(step_type[0]))], rows)
        if state is not None:
            begins = nest.tensors(rows[0].step_type[0], self._device)
            state = reset_state(nest.tensors(state, self._device), self._initial_state, begins)
        self._start = UnrollStart(self._start.unseen, state, transform_state)
        if self._algorithm.on_policy:
            self._keep_waiting(rows, step_type[-1] == StepType.PAD)
        return rows[0], list(rows[1:])

    def _keep_waiting(self, rows: Nest, is_absent: np.ndarray) -> None:
        """In columns without a row in the newest step, keeps the last row if the action chosen in it was executed."""
        step_type = rows[0].step_type
        number = (step_type != StepType.PAD).sum(0)
        last = nest.at(rows, (np.maximum(number - 1, 0), np.arange(len(number))))
        waits = is_absent & (number > 0) & (last[0].step_type <= StepType.MID)
        self._waiting = (waits, nest.leaves(last), self._states_at_row or []) if waits.any() else None

    def break_off(self) -> None:
        super().break_off()
        self._waiting = None

    def state_dict(self) -> dict[str, Any]:
        waiting = self._waiting and [nest.tensors(list(part)) for part in (self._waiting[:1], *self._waiting[1:])]
        own = {"waiting": waiting, "states_at_row": self._states_at_row, "stream": self.stream.state_dict()}
        return {**super().state_dict(), **own}

    def load_state_dict(self, state: dict[str, Any], continues: bool = False) -> None:
        """Restores a state.

        Args:
          state: state that `state_dict` returned.
          continues: whether the games continue; if not, the current episodes are truncated.
        """
        self._handed.continues = continues
        super().load_state_dict(state)
        self.stream.load_state_dict(state["stream"])
        self._states_at_row = state["states_at_row"] and nest.to(state["states_at_row"], self._device)
        if continues and state["waiting"] is not None:
            (waits,), rows, states = state["waiting"]
            self._waiting = waits.numpy(), nest.arrays(rows), nest.to(states, self._device)


def _with_row(leaf: np.ndarray, row: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Returns rows `[T, C, ...]` with row 0 replaced in some columns."""
    leaf = leaf.copy()
    leaf[0, columns] = row[columns]
    return leaf


def _where(rows: torch.Tensor, chosen: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Returns `chosen` where `rows` (`[C]` bool) is True, else `others`, `[C, ...]` each."""
    return torch.where(nest.widened(rows, others), chosen, others)
