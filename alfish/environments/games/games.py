"""The interface of games of several agents, and an adapter from ordinary environments to a game."""

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec

from alfish import specs
from alfish.data import TimeStep
from alfish.environments.environment import Environment
from alfish.errors import UsageError
from alfish.nest import Nest


class Group:
    """Agents with equal spaces. Column `g * len(agents) + i` is agent i of game g.

    Args:
      name: name of the group: the name of its first agent.
      agents: names of the agents.
      num_games: number of games, G.
      observation_space, action_space: gymnasium's spaces of one agent.
      reward_spec: spec of one agent's reward.

    Attributes:
      num_envs: number of columns, G times the number of agents.
      observation_spec, action_spec: specs of one agent's observation and canonical action, see `alfish.specs`.
      name, agents, num_games, observation_space, action_space, reward_spec: the constructor's arguments.
    """

    def __init__(
        self,
        name: str,
        agents: Sequence[str],
        num_games: int,
        observation_space: spaces.Space,
        action_space: spaces.Space,
        reward_spec: spaces.Box,
    ):
        self.name = name
        self.agents = tuple(agents)
        self.num_games = num_games
        self.num_envs = num_games * len(self.agents)
        self.observation_space, self.action_space, self.reward_spec = observation_space, action_space, reward_spec
        self.observation_spec = specs.observation_spec(observation_space)
        self.action_spec = specs.action_spec(action_space)


class Games(abc.ABC):
    """G games that step together. A step makes one row for each column, a PAD row if its agent has no time step.

    The episode of an agent is FIRST (the agent appears), MID ..., LAST (the agent leaves). An agent may appear late,
    and several times in a game. A game that has ended resets in the next step, not in the step in which it ends.

    Leaves of rows and of infos are numpy arrays `[columns, ...]`. Returned leaves are not modified later.

    Args:
      name: name of the game in messages.
      groups: groups of agents, by the name of the group's first agent.
      num_games: number of games, G.
      has_gaps: whether a column may have no row in some step.

    Attributes:
      turns: number of steps in which each agent acts once: 1, or the number of agents if they act in turns.
      starts: games that were reset in the last `reset` or `step`, `[G]` bool.
      is_over: games that have ended and that the next step resets, `[G]` bool.
      num_resets: number of resets of each game.
      infos: infos of the last reset or step by group, each in gymnasium's format for vector environments; {} for a
        group whose agents have no infos.
      broken: mask of columns whose game failed in the last step and was built again, `[columns]` bool by group; {} if
        none failed. Rows of these columns are FIRST or PAD; see `tolerate_errors`.
      stepping: way of stepping games, as text after their number in the log ("8 games one by one").
      remark: sentence for the log about a faster way to step the games; empty if none is known.
      settings: arguments of `make_games` that change the game or its rows.
      env_spec: None, because games have no specification of gymnasium.
      follows_progress: True if the games have a curriculum, which `set_progress` advances.
      name, groups, num_games, has_gaps: the constructor's arguments.
    """

    turns = 1
    settings: Mapping[str, Any] = {}
    follows_progress = False
    env_spec: EnvSpec | None = None
    stepping = remark = ""

    def __init__(self, name: str, groups: Mapping[str, Group], num_games: int, has_gaps: bool):
        self.name = name
        self.groups = dict(groups)
        self.num_games = num_games
        self.has_gaps = has_gaps
        self.starts, self.is_over = np.zeros(num_games, bool), np.zeros(num_games, bool)
        self.num_resets = [0] * num_games
        self.infos: dict[str, dict[str, Any]] = {key: {} for key in self.groups}
        self.broken: dict[str, np.ndarray] = {}

    @property
    def num_envs(self) -> int:
        """Number of games; environments have an attribute of the same name."""
        return self.num_games

    @abc.abstractmethod
    def reset(self, seeds: Sequence[int | None] | None = None) -> dict[str, TimeStep]:
        """Resets all games, and returns their first rows by group.

        Args:
          seeds: one seed for each game; None means seeds derived from the run's seed, the game's index and the number
            of its resets.
        """

    @abc.abstractmethod
    def step(self, action: Mapping[str, Nest]) -> dict[str, TimeStep]:
        """Executes actions, resets games that ended before, and returns the new rows by group.

        Args:
          action: actions by group, `[columns, ...]` in the algorithm's units. Entries of agents that do not wait for an
            action are ignored.
        """

    def ignore_infos(self) -> None:
        """Allows `infos` to stay empty from now on. Default: does nothing."""

    def set_progress(self, progress: float) -> None:
        """Sets the progress of training, in [0, 1]; requires `follows_progress`."""

    def tolerate_errors(self, report: Callable[[int, BaseException], None]) -> None:
        """Makes later steps rebuild and reset a game that fails, instead of raising its error.

        Default: does nothing, so errors are raised.

        Args:
          report: function that receives the index and the error of a game that failed.
        """

    @abc.abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the games and of their future resets."""

    @abc.abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Restores a state; returns True if games continue, or False if the next `step` resets all games."""

    def render(self, game: int) -> Any:
        """Returns a frame of a game; None if it has no frames. Default: None."""

    def abandon(self) -> None:
        """Marks the running step as one that may never end; afterwards only `close` and `state_dict` may be called.

        Default: does nothing.
        """

    def close(self) -> None:
        """Closes the games. Default: does nothing."""


class SideBySide(Games):
    """Ordinary environments in the form of one game, whose agents do not affect each other.

    The environments of a name are the columns of one agent with this name. A group therefore has as many columns as
    environments, and `num_games` is 1. A joint run in such a game equals separate runs, one for each name.

    Args:
      environments: environments by agent name, which reset in the step after an episode's end.

    Raises:
      UsageError: environments reset in the step of an episode's end.
    """

    def __init__(self, environments: Mapping[str, Environment]):
        for name, environment in environments.items():
            if environment.uneven:
                raise UsageError(
                    f"SideBySide: the environments {name!r} ({environment.name}) reset in the step in which an episode "
                    "ends; build them with AutoresetMode.NEXT_STEP"
                )
        groups = {
            name: Group(name, (name,), one.num_envs, one.observation_space, one.action_space, one.reward_spec)
            for name, one in environments.items()
        }
        super().__init__("SideBySide", groups, 1, has_gaps=False)
        self.environments = dict(environments)
        self._restart: set[str] = set()  # names whose environments the next step resets
        self.follows_progress = any(one.follows_progress for one in environments.values())

    def reset(self, seeds: Sequence[int | None] | None = None) -> dict[str, TimeStep]:
        self.starts, self.num_resets = np.ones(1, bool), [self.num_resets[0] + 1]
        seed = None if seeds is None else seeds[0]
        return self._rows({
            name: one.reset(None if seed is None else [seed + row for row in range(one.num_envs)])
            for name, one in self.environments.items()
        })  # fmt: skip

    def ignore_infos(self) -> None:
        for environment in self.environments.values():
            environment.ignore_infos()

    def step(self, action: Mapping[str, Nest]) -> dict[str, TimeStep]:
        self.starts, restart = np.zeros(1, bool), self._restart
        self._restart = set()
        return self._rows({
            name: one.reset() if name in restart else one.step(one.convert(action[name]))
            for name, one in self.environments.items()
        })  # fmt: skip

    def set_progress(self, progress: float) -> None:
        for environment in self.environments.values():
            if environment.follows_progress:
                environment.set_progress(progress)

    def tolerate_errors(self, report: Callable[[int, BaseException], None]) -> None:
        for environment in self.environments.values():
            environment.tolerate_errors(report)

    def state_dict(self) -> dict[str, Any]:
        own = {name: one.state_dict() for name, one in self.environments.items()}
        return {"num_resets": list(self.num_resets), "environments": own}

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        self.num_resets = list(state["num_resets"])
        continues = {n: one.load_state_dict(state["environments"][n]) for n, one in self.environments.items()}
        if not all(continues.values()):
            self._restart = {name for name in continues if continues[name]}  # the other environments reset themselves
        return all(continues.values())

    def abandon(self) -> None:
        for environment in self.environments.values():
            environment.abandon()

    def close(self) -> None:
        for environment in self.environments.values():
            environment.close()

    def _rows(self, rows: dict[str, TimeStep]) -> dict[str, TimeStep]:
        self.broken = {}
        for name, environment in self.environments.items():
            self.infos[name] = environment.infos
            if environment.broken is not None:
                self.broken[name] = environment.broken
        return rows
