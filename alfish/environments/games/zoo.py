"""The base class of PettingZoo's games, parallel and turn-based: spaces, resets, rewards, rows and states."""

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces

from alfish import specs
from alfish.data import StepType, TimeStep
from alfish.environments.games.columns import BadRow, Columns
from alfish.environments.games.games import Games, Group
from alfish.environments.games.leaves import Leaf, Leaves, Seen
from alfish.environments.games.replacements import Replacements
from alfish.environments.games.teams import Teams
from alfish.environments.masked_observation import MaskLeaf
from alfish.environments.members import check_state, state_of
from alfish.environments.objectives import RewardEntries, Rewards
from alfish.environments.sequential import close
from alfish.errors import UsageError
from alfish.errors.user_code import calling
from alfish.nest import Nest
from alfish.parameters.schedules import Schedule


class Place(NamedTuple):
    """The position of an agent: the name of its group, its index in the group, and the size of the group."""

    group: str
    number: int
    num_agents: int


class ZooGames(Games):
    """Games of PettingZoo, stepped one after another in this process.

    If the games have methods `get_state()` and `set_state(state)`, a resumed run continues the games; otherwise it
    begins new games.

    Args:
      games: games of one class, at least one.
      seed: seed of the run. The seed of reset k of game g is derived from (seed, g, k).
      rewards: names or sources of the entries of a vector reward, as in `make_environment`; None means the reward of
        the games, a number, or a vector if they have a `reward_space`.
      action_mask: source of the action mask: 'observation:LEAF', 'info:KEY', or 'method:NAME' for a method that takes
        the agent's name. None means the leaf `action_mask` if observations are a Dict with exactly `observation` and
        `action_mask`; otherwise no mask.
      leaves: further leaves of each observation: 'state', 'others', 'agent', see `Leaves`.
      teams: patterns of the agents' names of each team, by the team's name.
      team_spirit: weight of the team's mean reward in an agent's reward, or a schedule of this weight, see `Teams`.
      make: function that makes a new game in place of a game that fails (`tolerate_errors`); None means that errors of
        games are raised.

    Raises:
      UsageError: the games do not follow PettingZoo's interface, differ from each other, or lack a part that the
        arguments refer to. For errors of a step, see the subclasses.
    """

    _is_checked = False  # whether the form of a game's state has been checked
    _is_abandoned = False

    def __init__(
        self,
        games: Sequence[Any],
        seed: int = 0,
        rewards: Rewards | None = None,
        action_mask: str | None = None,
        leaves: Sequence[Leaf] = (),
        teams: Mapping[str, str | Sequence[str]] | None = None,
        team_spirit: float | Schedule = 0.0,
        make: Callable[[], Any] | None = None,
    ):
        first, name = games[0], name_of(games[0])
        self.agents = _agents(games, name)
        own = _spaces_of(games, self.agents, name)
        self._masks = {agent: _mask_leaf(*own[agent], action_mask) for agent in self.agents}
        observed = {agent: pair[0] for agent, pair in own.items()}
        observed |= {agent: mask.observation_space for agent, mask in self._masks.items() if mask is not None}
        alike = _alike(own)
        self._leaves = Leaves(leaves, first, observed, alike, name)
        self._entries = _entries(first, self.agents[0], rewards, name)
        reward_spec = specs.reward_spec() if self._entries is None else self._entries.reward_space
        groups = {
            agents[0]: Group(
                agents[0], agents, len(games), self._leaves.space(agents[0]), own[agents[0]][1], reward_spec
            )
            for agents in alike
        }
        super().__init__(name, groups, len(games), has_gaps=True)
        self.games, self._seed = list(games), seed
        self.stepping = "" if len(games) == 1 else "one by one"
        self._teams = Teams(teams or {}, team_spirit, self.agents)
        self._replacements = Replacements(make, first, len(games), name)
        self.follows_progress = self._teams.follows_progress or self._replacements.have_curriculum
        self._columns = {key: Columns(group, name) for key, group in groups.items()}
        self._place = {
            agent: Place(key, i, len(group.agents))
            for key, group in groups.items()
            for i, agent in enumerate(group.agents)
        }
        self.is_over = np.ones(len(games), bool)  # games that the next step resets

    def reset(self, seeds: Sequence[int | None] | None = None) -> dict[str, TimeStep]:
        self._begin_rows()
        self.is_over = np.zeros(self.num_games, bool)
        self.starts = np.ones(self.num_games, bool)
        for game in range(self.num_games):
            try:
                self._restart(game, None if seeds is None else seeds[game])
            except (Exception, SystemExit) as error:
                if not self._is_checked:  # an error in the first reset is a mistake of the user
                    raise
                self._replace(game, error)
        if not self._is_checked:
            self._is_checked = True
            check_state(self.games[0], self.name)
        return self._rows()

    def step(self, action: Mapping[str, Nest]) -> dict[str, TimeStep]:
        if self.is_over.all():
            return self.reset()
        actions = {key: columns.act(action[key]) for key, columns in self._columns.items()}
        self._begin_rows()
        self.starts, self.is_over = self.is_over, np.zeros(self.num_games, bool)
        for game in range(self.num_games):
            try:
                if self.starts[game]:
                    self._restart(game, None)
                else:
                    self._advance(game, actions)
            except (Exception, SystemExit) as error:
                self._replace(game, error)
        return self._rows()

    def ignore_infos(self) -> None:
        for columns in self._columns.values():
            columns.gathers_infos = False

    def set_progress(self, progress: float) -> None:
        self._teams.set_progress(progress)
        self._replacements.set_progress(progress, self.games)

    def tolerate_errors(self, report: Callable[[int, BaseException], None]) -> None:
        self._replacements.tolerate_errors(report)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"num_resets": list(self.num_resets)}
        if self._has_states and not self._is_abandoned and any(self.num_resets):
            state["games"] = [state_of(game, self.name) for game in self.games]
            state["columns"] = {key: columns.state() for key, columns in self._columns.items()}
            state["is_over"] = torch.from_numpy(self.is_over.copy())
        return state

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        known, self.is_over = list(state["num_resets"]), np.ones(self.num_games, bool)
        self.num_resets = [*known, *[0] * self.num_games][: self.num_games]
        if "games" not in state or not self._has_states or len(known) != self.num_games:
            return False
        for game in self.games:  # some games need a reset before their state can be set
            with calling(f"{self.name}.reset"):
                game.reset(seed=0)
        for game, own in zip(self.games, state["games"], strict=True):
            with calling(f"{self.name}.set_state"):
                game.set_state(own)
        for key, columns in self._columns.items():
            columns.restore(state["columns"][key])
        self.is_over = state["is_over"].numpy().copy()
        return True

    def render(self, game: int) -> Any:
        with calling(f"{self.name}.render"):
            return self.games[game].render()

    def abandon(self) -> None:
        self._is_abandoned = True

    def close(self) -> None:
        for game in self.games:
            close(game)

    @abc.abstractmethod
    def _begin(self, game: int, seed: int) -> None:
        """Resets a game and stores its first rows."""

    @abc.abstractmethod
    def _advance(self, game: int, actions: Mapping[str, Sequence[Any]]) -> None:
        """Steps a game and stores the new rows. Sets `is_over` if the game has ended.

        Args:
          game: index of the game.
          actions: action of each column in the game's units, by group.
        """

    @property
    def _has_states(self) -> bool:
        return all(hasattr(game, "get_state") and hasattr(game, "set_state") for game in self.games)

    def _restart(self, game: int, seed: int | None) -> None:
        """Resets a game; None means a seed from the run's seed, the game's index and the number of its resets."""
        own = np.random.SeedSequence([self._seed, game, self.num_resets[game]]).generate_state(1)[0] >> 1
        self.num_resets[game] += 1
        for place in self._place.values():  # the reset ends the current episodes of all agents
            self._columns[place.group].plays[self._column(place, game)] = False
        self._begin(game, int(own) if seed is None else int(seed))
        if not any(self._plays(game, agent) for agent in self.agents):
            raise UsageError(
                f"{self.name}: game {game} has no agent that can act after reset; at least one of possible_agents must "
                "act first"
            )

    def _replace(self, game: int, error: BaseException) -> None:
        """Replaces a failed game with a new game and resets it; raises `error` if errors are not tolerated."""
        report = self._replacements.report
        if report is None:
            raise error
        failed: BaseException | None = error
        while failed is not None:  # does not loop forever: after too many reports, the trainer ends this process
            report(game, failed)
            for columns in self._columns.values():
                columns.drop(game)
            try:
                self.games[game] = self._replacements.replaced(self.games[game])
                self._restart(game, None)
                failed = None
            except (Exception, SystemExit) as again:
                failed = again
        self.starts[game], self.is_over[game] = True, False
        self._replacements.failed[game] = True

    def _begin_rows(self) -> None:
        self._replacements.failed[:] = False
        for columns in self._columns.values():
            columns.begin()

    def _rows(self) -> dict[str, TimeStep]:
        found: dict[str, TimeStep] = {}
        while not found:
            try:
                found = {key: columns.rows() for key, columns in self._columns.items()}
            except BadRow as error:
                self._replace(error.game, error)
        failed, self.broken = self._replacements.failed, {}
        if failed.any():
            self.broken = {key: np.repeat(failed, len(group.agents)) for key, group in self.groups.items()}
        self.infos = {key: columns.infos for key, columns in self._columns.items()}
        return found

    def _plays(self, game: int, agent: str) -> bool:
        """Returns whether an agent is in an episode."""
        place = self._place[agent]
        return bool(self._columns[place.group].plays[self._column(place, game)])

    def _action(self, game: int, agent: str, actions: Mapping[str, Sequence[Any]]) -> Any:
        place = self._place[agent]
        return actions[place.group][self._column(place, game)]

    def _note(
        self,
        game: int,
        agent: str,
        step_type: int,
        observation: Any,
        seen: Seen,
        info: Any,
        reward: Any = 0.0,
        terminated: Any = False,
    ) -> None:
        """Stores the row of an agent.

        Args:
          game: index of the game.
          agent: name of the agent.
          step_type: FIRST, MID or LAST.
          observation: observation of the agent, as the game returned it.
          seen: values that all rows of the game share.
          info: info of the agent; None if the agent has no info.
          reward: reward of the agent, see `_reward`.
          terminated: whether the agent's episode has ended by termination.
        """
        place = self._place[agent]
        columns, column = self._columns[place.group], self._column(place, game)
        info = info or {}
        mask = self._masks[agent]
        if mask is not None:
            given = mask.given(observation, info) if mask.kind != "method" else self._called_mask(game, agent, mask)
            fitted = mask.fitted(given, step_type == StepType.LAST, f"of {agent} in game {game}")
            observation = mask.put(observation, fitted[0])
        columns.note(column, step_type, self._leaves.extended(agent, observation, seen), reward, terminated, info)

    def _reward(self, game: int, agent: str, reward: Any, info: Mapping[str, Any] | None) -> Any:
        """Returns an agent's reward, a number or `[R]` float32, from the game's reward and info."""
        if self._entries is not None:
            return self._entries(reward, dict(info or {}))
        if np.size(reward) != 1:
            raise UsageError(
                f"{self.name}: {agent} of game {game} has a reward of {np.size(reward)} numbers, but the game has no "
                f"reward_space; declare a reward_space, a Box of shape ({np.size(reward)},), or return the sum"
            )
        try:
            return float(np.asarray(reward).item())
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"{self.name}: {agent} of game {game} has the reward {reward!r}; it must be a number"
            ) from error

    def _called_mask(self, game: int, agent: str, mask: MaskLeaf) -> Any:
        method = getattr(self.games[game], mask.where, None)
        if not callable(method):
            raise UsageError(
                f"make_games.action_mask is 'method:{mask.where}', but {self.name} has no method {mask.where}; give a "
                "method that takes the agent's name and returns its mask"
            )
        with calling(f"{self.name}.{mask.where}"):
            return method(agent)

    @staticmethod
    def _column(place: Place, game: int) -> int:
        return game * place.num_agents + place.number


def name_of(game: Any) -> str:
    """Returns the name of a game in messages: PettingZoo's name, or the name of the class."""
    metadata = getattr(game, "metadata", None)
    name = metadata.get("name") if isinstance(metadata, Mapping) else None
    return name if isinstance(name, str) else type(game).__name__


def _agents(games: Sequence[Any], name: str) -> list[str]:
    """Returns the names of the agents that may appear; they must be the same in all games."""
    given = getattr(games[0], "possible_agents", None)
    if not isinstance(given, Sequence) or isinstance(given, str) or not given:
        raise UsageError(
            f"{name} has no possible_agents, so its agents are not known in advance; set possible_agents to the names "
            "of all agents that may appear"
        )
    agents = list(given)
    if not all(isinstance(agent, str) for agent in agents) or len(set(agents)) < len(agents):
        raise UsageError(f"{name}.possible_agents is {agents!r}; it must be a list of distinct names")
    for other in games[1:]:
        if list(other.possible_agents) != agents:
            raise UsageError(
                f"one {name} has the possible_agents {agents}, but another has {list(other.possible_agents)}; they "
                "must be equal"
            )
    return agents


def _spaces_of(games: Sequence[Any], agents: Sequence[str], name: str) -> dict[str, tuple[spaces.Space, spaces.Space]]:
    """Returns the spaces of each agent; they must be the same in all games."""
    found: dict[str, tuple[spaces.Space, spaces.Space]] = {}
    for game in games:
        for agent in agents:
            with calling(f"{name}.observation_space or {name}.action_space"):
                own = game.observation_space(agent), game.action_space(agent)
            for kind, space in zip(("observation", "action"), own):
                if not isinstance(space, spaces.Space):
                    raise UsageError(f"{name}.{kind}_space({agent!r}) is {space!r}; it must be a gymnasium space")
                specs.check_learnable(space, kind)
            if found.setdefault(agent, own) != own:
                raise UsageError(
                    f"{agent} has the spaces {found[agent][0]} and {found[agent][1]} in one {name}, but {own[0]} and "
                    f"{own[1]} in another; they must be equal"
                )
    return found


def _alike(own: Mapping[str, tuple[spaces.Space, spaces.Space]]) -> list[list[str]]:
    """Returns lists of agents with equal spaces, in the order of the agents."""
    alike: list[list[str]] = []
    for agent, pair in own.items():
        for agents in alike:
            if own[agents[0]] == pair:
                agents.append(agent)
                break
        else:
            alike.append([agent])
    return alike


def _mask_leaf(observation: spaces.Space, action: spaces.Space, action_mask: str | None) -> MaskLeaf | None:
    """Returns the leaf of an agent's action mask; None without a mask."""
    if action_mask is None:
        if not isinstance(observation, spaces.Dict) or set(observation.spaces) != {"observation", "action_mask"}:
            return None
        action_mask = "observation:action_mask"
    return MaskLeaf(action_mask, observation, action, "make_games.action_mask")


def _entries(game: Any, agent: str, rewards: Rewards | None, name: str) -> RewardEntries | None:
    """Returns the function that computes vector rewards; None if the reward is a number."""
    if rewards is not None and not rewards:
        raise UsageError(
            f"make_games.rewards is {rewards!r}; it must name at least one entry of a vector reward; or leave it out"
        )
    space = getattr(game, "reward_space", None)
    if callable(space):
        with calling(f"{name}.reward_space"):
            space = space(agent)
    space = space if isinstance(space, spaces.Box) and space.shape else None
    if space is None and rewards is None:
        return None
    return RewardEntries(space, rewards, name if rewards is None else f"make_games.rewards = {rewards!r}")
