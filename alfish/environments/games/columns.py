"""The columns of a group of agents: observations, executed actions, and the rows of a step."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate

from alfish import nest, specs
from alfish.data import StepType, TimeStep
from alfish.environments.games.games import Group
from alfish.environments.sequential import gathered
from alfish.errors import UsageError, first_line
from alfish.nest import Nest
from alfish.specs import ActionUnits, ObservationUnits


class BadRow(UsageError):
    """Error about a row whose observation does not match its space, or has a value that is not finite.

    Args:
      game: index of the row's game.
      text: sentence about the error.
    """

    def __init__(self, game: int, text: str):
        super().__init__(text)
        self.game = game


class Columns:
    """The columns of a group of agents.

    Args:
      group: group of agents.
      name: name of the game in messages.

    Attributes:
      waits: mask of columns whose newest row waits for an action, `[columns]` bool.
      plays: mask of columns whose agent is in an episode, `[columns]` bool.
      infos: infos of the last step's rows, in gymnasium's format for vector environments; {} without infos.
      gathers_infos: whether `infos` is set.
    """

    def __init__(self, group: Group, name: str):
        self._group, self._name = group, name
        self._units = ActionUnits(group.action_space)
        self._observed = ObservationUnits(group.observation_space, copies=False)
        self._action_batch = batch_space(group.action_space, group.num_envs)
        self._masks = specs.mask_reader(group.observation_spec, group.action_spec)
        self._env_id = np.arange(group.num_envs, dtype=np.int32)
        self.waits, self.plays = np.zeros(group.num_envs, bool), np.zeros(group.num_envs, bool)
        blank = self._observed.to_environment(nest.arrays(specs.zeros(group.observation_spec, (1,))))
        (first,) = iterate(batch_space(group.observation_space, 1), blank)
        # The newest observation of each column, or `_blank`, an arbitrary element of the space, if there is none.
        self._blank = first
        self._observations: list[Any] = [first] * group.num_envs
        self._batch = self._observed.from_environment(self._concatenated(self._observations))
        # The last executed action of each column.
        self._acted: Nest = nest.arrays(specs.zeros(group.action_spec, (group.num_envs,)))
        self.infos: dict[str, Any] = {}
        self.gathers_infos = True
        self.begin()

    def begin(self) -> None:
        """Begins a step, with PAD rows until `note` stores rows."""
        count = self._group.num_envs
        self._step_type = np.full(count, StepType.PAD, np.int32)
        self._reward = np.zeros((count, *self._group.reward_spec.shape), np.float32)
        self._discount = np.ones(count, np.float32)
        self._infos: list[dict[str, Any]] = [{}] * count

    def act(self, action: Nest) -> Sequence[Any]:
        """Stores the actions `[columns, ...]` of waiting columns; returns all actions in the game's units."""
        executed, waits = self._units.executed(nest.arrays(action)), self.waits
        self._acted = nest.map(lambda new, old: np.where(nest.widened(waits, new), new, old), executed, self._acted)
        if self._masks is not None:
            mask = self._masks.mask(self._batch)
            forbidden = self._masks.layout.forbids(mask, self._acted) & waits
            if forbidden.any():
                column = int(np.flatnonzero(forbidden)[0])
                raise UsageError(
                    f"{self.place(column)}: its action is forbidden by {self._masks.name}, which allows the choices "
                    f"{np.flatnonzero(mask[column]).tolist()}; an algorithm reads masks from the observation, see "
                    "RLAlgorithm.action_masks"
                )
        actions = nest.map(np.array, self._units.stretch(executed))  # a copy, because a game may write to its action
        return list(actions if isinstance(actions, np.ndarray) else iterate(self._action_batch, actions))

    def note(
        self, column: int, step_type: int, observation: Any, reward: Any, terminated: Any, info: dict[str, Any] | None
    ) -> None:
        """Stores the new row of a column."""
        if self._step_type[column] != StepType.PAD:
            raise UsageError(
                f"{self.place(column)} appears again in the same step in which it left; let it appear in a later step"
            )
        self._step_type[column], self._reward[column], self._discount[column] = step_type, reward, not terminated
        self._observations[column] = observation
        self.plays[column] = step_type != StepType.LAST
        if info:
            self._infos[column] = info

    def drop(self, game: int) -> None:
        """Replaces the new rows of a failed game with PAD, and forgets its observations."""
        size = len(self._group.agents)
        for column in range(game * size, (game + 1) * size):
            self._step_type[column], self._reward[column], self._discount[column] = StepType.PAD, 0.0, 1.0
            self._observations[column], self._infos[column] = self._blank, {}
            self.plays[column] = False

    def rows(self) -> TimeStep:
        """Returns the rows of the current step, `[columns]`.

        Raises:
          BadRow: an observation does not match its space, or a value is not finite.
        """
        step_type, arrived = self._step_type, self._step_type != StepType.PAD
        try:
            batch = self._concatenated(self._observations)
        except Exception:  # a wrong observation may raise any exception in gymnasium's and numpy's code
            self._name_misfit(arrived)
            raise
        self._batch = self._observed.from_environment(batch)
        self._check_finite(self._batch, arrived)
        self.waits = (step_type == StepType.FIRST) | (step_type == StepType.MID)
        self.infos = gathered(self._infos) if self.gathers_infos and any(self._infos) else {}
        first = step_type == StepType.FIRST
        before = self._acted
        if first.any():
            before = nest.map(lambda leaf: np.where(nest.widened(first, leaf), leaf.dtype.type(0), leaf), before)
        return TimeStep(step_type, self._reward, self._discount, self._batch, before, self._env_id)

    def place(self, column: int) -> str:
        """Returns the game and the agent of a column for messages: 'tag: agent_0 of game 3'."""
        agent = column % len(self._group.agents)
        return f"{self._name}: {self._group.agents[agent]} of game {self._game(column)}"

    def _game(self, column: int) -> int:
        return column // len(self._group.agents)

    def state(self) -> dict[str, Any]:
        """Returns the state as tensors."""
        state = {"observations": self._concatenated(self._observations), "acted": self._acted}
        return nest.tensors({**nest.map(np.copy, state), "waits": self.waits.copy(), "plays": self.plays.copy()})

    def restore(self, state: dict[str, Any]) -> None:
        """Restores the result of `state`."""
        state = nest.map(np.copy, nest.arrays(state))
        batch = batch_space(self._group.observation_space, self._group.num_envs)
        self._observations = list(iterate(batch, state["observations"]))
        self._batch = self._observed.from_environment(state["observations"])
        self._acted = state["acted"]
        self.waits = state["waits"]
        self.plays = state["plays"]

    def _concatenated(self, observations: Sequence[Any]) -> Any:
        """Returns a new batch of observations."""
        empty: Any = create_empty_array(self._group.observation_space, len(observations))
        return concatenate(self._group.observation_space, observations, empty)

    def _name_misfit(self, arrived: np.ndarray) -> None:
        """Raises BadRow for the first column whose observation does not match the space."""
        for column in np.flatnonzero(arrived).tolist():
            observation = self._observations[column]
            try:
                self._concatenated([observation])
            except Exception as error:
                raise BadRow(
                    self._game(column),
                    f"{self.place(column)} has the observation {_form(observation)}, but its observation_space is "
                    f"{self._group.observation_space} ({first_line(error)})",
                ) from error

    def _check_finite(self, batch: Nest, arrived: np.ndarray) -> None:
        for name, leaf in nest.named_leaves(batch, "observation"):
            if leaf.dtype.kind != "f" or np.isfinite(leaf).all():
                continue
            wrong = arrived & ~np.isfinite(leaf).reshape(len(leaf), -1).all(1)
            if wrong.any():
                column = int(np.flatnonzero(wrong)[0])
                raise BadRow(self._game(column), f"{self.place(column)} has an {name} that is not finite")
        if not np.isfinite(self._reward).all():
            wrong = ~np.isfinite(self._reward).reshape(len(arrived), -1).all(1)
            column = int(np.flatnonzero(wrong)[0])
            raise BadRow(self._game(column), f"{self.place(column)} has a reward that is not finite")


def _form(observation: Any) -> str:
    """Returns a description of an observation's shapes and dtypes for messages."""
    if isinstance(observation, dict):
        return "{" + ", ".join(f"{key!r}: {_form(part)}" for key, part in observation.items()) + "}"
    if isinstance(observation, tuple):
        return f"({', '.join(map(_form, observation))})"
    if isinstance(observation, (np.ndarray, torch.Tensor)):
        return f"{type(observation).__name__} of shape {tuple(observation.shape)} and dtype {observation.dtype}"
    return f"{observation!r}"[:80]
