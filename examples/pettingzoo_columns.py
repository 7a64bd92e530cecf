"""PettingZoo's parallel environments with a column for each agent; one policy acts for all agents and learns from all.

pip install mpe2
alfish train --gin_file=examples/ppo_spread.gin --root_dir=runs/spread
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gin
import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate

from alfish import specs
from alfish.data import StepType, TimeStep
from alfish.environments import Environment
from alfish.errors import UsageError
from alfish.nest import Nest
from alfish.parameters import NonNegativeInt, PositiveInt, checked, imports
from alfish.specs import ActionUnits, ObservationUnits


@gin.configurable
@checked
class PettingZooColumns(Environment):
    """Games of a parallel environment. Column `g * num_agents + i` is agent i of game g.

    An agent's episode ends when the agent leaves its game. Its column then has no rows until all agents have left,
    which resets the game. Each reset of each game has a seed of its own, so a resumed run begins the games that it
    would have begun next. Infos are dropped.

    Args:
      game: a module with a function `parallel_env`, as 'mpe2.simple_spread_v3', or a function that makes a parallel
        environment. Its agents have the same spaces, and all of them are present after `reset`.
      num_envs: columns; rounded up to whole games.
      game_kwargs: arguments of the function.
      seed: of the run.
      evaluation, render_mode: have no effect; a game of an evaluation has the seed of its first agent's episode.

    Raises:
      UsageError: there is no parallel environment, or its agents have different spaces.
    """

    uneven = has_gaps = True

    def __init__(
        self,
        game: str | Callable[..., Any] = gin.REQUIRED,
        num_envs: PositiveInt = 1,
        game_kwargs: Mapping[str, Any] | None = None,
        seed: NonNegativeInt = 0,
        evaluation: bool = False,
        render_mode: str | None = None,
    ):
        where = "PettingZooColumns.game"
        make = imports.import_named(game, where).parallel_env if isinstance(game, str) else game
        games = [make(**(game_kwargs or {}))]
        name = getattr(games[0], "metadata", {}).get("name", type(games[0]).__name__)
        if not hasattr(games[0], "possible_agents") or hasattr(games[0], "agent_iter"):
            raise UsageError(
                f"{where} makes a {name}, no parallel environment; name the `parallel_env` of its module, or a "
                "function that calls pettingzoo.utils.aec_to_parallel"
            )
        self._agents: list[str] = list(games[0].possible_agents)
        observation_space = _common(f"{name}'s observations", games[0].observation_space, self._agents)
        action_space = _common(f"{name}'s actions", games[0].action_space, self._agents)
        num_games = -(-num_envs // len(self._agents))
        super().__init__(num_games * len(self._agents), observation_space, action_space, specs.reward_spec())
        self.name, self._seed, self._num_resets = name, seed, [0] * num_games
        self._games = games + [make(**(game_kwargs or {})) for _ in range(num_games - 1)]
        self._columns: list[dict[str, int]] = [{} for _ in self._games]  # of the agents that are present
        self._observations: list[Any] = [None] * self.num_envs  # the last ones
        self._units, self._actions = ActionUnits(action_space), batch_space(action_space, self.num_envs)
        self._read = ObservationUnits(observation_space).from_environment
        self._resets: tuple[np.ndarray, TimeStep] | None = None
        self._restart = False  # after a resume the next step resets all games

    def reset(self, seeds: Sequence[int | None] | None = None, rows: np.ndarray | None = None) -> TimeStep:
        for game in range(len(self._games)):
            self._reset(game, None if seeds is None else seeds[game * len(self._agents)])
        self._restart = False
        return self._first()

    def step(self, action: Nest) -> TimeStep:
        if self._restart:
            return self.reset()
        executed = self._units.executed(action)
        actions = list(iterate(self._actions, self._units.stretch(executed)))
        step_type = np.full(self.num_envs, StepType.PAD, np.int32)
        reward, discount = np.zeros(self.num_envs, np.float32), np.ones(self.num_envs, np.float32)
        for game, columns in zip(self._games, self._columns):
            given = {agent: actions[column] for agent, column in columns.items()}
            observations, rewards, terminated, truncated, _ = game.step(given)
            for agent, column in list(columns.items()):
                self._observations[column], reward[column] = observations[agent], rewards[agent]
                discount[column] = not terminated[agent]
                leaves = terminated[agent] or truncated[agent] or agent not in game.agents
                step_type[column] = StepType.LAST if leaves else StepType.MID
                if leaves:
                    del columns[agent]
        arrived = TimeStep(step_type, reward, discount, self._batch(), executed, self.env_id)
        is_over = np.array([not columns for columns in self._columns])
        if is_over.any():
            for game in np.flatnonzero(is_over).tolist():
                self._reset(game)
            self._resets = is_over.repeat(len(self._agents)), self._first()
        return arrived

    def take_resets(self) -> tuple[np.ndarray, TimeStep] | None:
        resets, self._resets = self._resets, None
        return resets

    def state_dict(self) -> dict[str, Any]:
        return {"num_resets": list(self._num_resets)}

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        self._num_resets, self._restart = list(state["num_resets"]), True
        return False

    def close(self) -> None:
        for game in self._games:
            game.close()

    def _reset(self, game: int, seed: int | None = None) -> None:
        """Resets a game. Without a seed it has one of its own."""
        own = np.random.SeedSequence([self._seed, game, self._num_resets[game]]).generate_state(1)[0] >> 1
        self._num_resets[game] += 1
        observations, _ = self._games[game].reset(seed=int(own) if seed is None else seed)
        if absent := [agent for agent in self._agents if agent not in observations]:
            raise UsageError(f"{self.name}: {', '.join(absent)} not present after reset; let all possible_agents begin")
        for i, agent in enumerate(self._agents):
            self._columns[game][agent] = column = game * len(self._agents) + i
            self._observations[column] = observations[agent]

    def _first(self) -> TimeStep:
        step_type, zero = np.full(self.num_envs, StepType.FIRST, np.int32), np.zeros(self.num_envs, np.float32)
        no_action = self.convert(specs.zeros(self.action_spec, (self.num_envs,)))
        return TimeStep(step_type, zero, zero + 1, self._batch(), no_action, self.env_id)

    def _batch(self) -> Nest:
        empty = create_empty_array(self.observation_space, self.num_envs)
        return self._read(concatenate(self.observation_space, self._observations, empty))


def _common(what: str, space_of: Callable[[str], spaces.Space], agents: Sequence[str]) -> spaces.Space:
    """Returns the space of all agents."""
    for agent in agents:
        if space_of(agent) != space_of(agents[0]):
            raise UsageError(
                f"{what} are {space_of(agents[0])} for {agents[0]} and {space_of(agent)} for {agent}, and one policy "
                "acts for all; make them equal, e.g. by supersuit.pad_observations_v0 and pad_action_space_v0"
            )
    return space_of(agents[0])
