"""Assigns policies to agents, either the same in all games or drawn for each game."""

import copy
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal

import gin
import numpy as np

from alfish.environments.games import Games
from alfish.errors import UsageError
from alfish.parameters import NonNegativeFloat, NonNegativeInt, checked

# Type of `Trainer.policies`, see `patterns_of`.
PolicyPatterns = Mapping[str, Any] | Literal["each"]
_PURPOSE = 7  # makes the seeds of draws differ from other seeds of the run


@gin.configurable(module="alfish.policies")
@checked
class Lineup:
    """Determines the policy of each agent in each game.

    If several policies may play an agent, one of them is drawn whenever a game begins. A draw depends only on the seed,
    the game's number and the number of its resets. Draws are therefore the same in every process, and are not saved. If
    a worker process is replaced, its games count resets from 0 again; the draws then also depend on the number of the
    worker's earlier processes.

    Args:
      patterns: patterns of the names of the agents that a policy may play, by the policy's name; see `patterns_of`.
      games: games to play.
      seed: seed of the draws.
      weights: relative frequency of a policy among the policies that may play an agent, by name; 1 for policies that
        are not named. The name `past` means each of past0, past1, ...
      mixed: whether policies are drawn independently for each agent. If not, all agents of a group that have the
        same candidate policies are played by one of these policies in each game.
      requires: name of a policy that plays in each game. If it was not drawn for any agent of a game, it gets one of
        the agents that it may play (if not `mixed`, one set of agents with a common policy), chosen uniformly. None
        means no such policy.

    Attributes:
      names: names of the policies.
      group: name of the group of a policy's agents, by the policy's name.
      columns: ascending indices of the group's columns that a policy may play, by the policy's name.
      is_fixed: whether only one policy may play each agent.
      playing: number of the policy that plays each column now, `[columns]` int, by the group's name.

    Raises:
      UsageError: a pattern matches no agent, or agents with different spaces; or an agent has no policy.
    """

    def __init__(
        self,
        patterns: Mapping[str, Sequence[str]],
        games: Games,
        seed: NonNegativeInt,
        weights: Mapping[str, NonNegativeFloat] | None = None,
        mixed: bool = True,
        requires: str | None = None,
    ):
        self.names = tuple(patterns)
        self._patterns = patterns
        self._seed = seed
        self._mixed = mixed
        self._first_game = 0
        self._process: tuple[int, ...] = ()
        self._assign(games)
        self._weights = self._read_weights(weights or {})
        self._required = self._read_required(requires)

    def of_worker(self, games: Games, first_game: int, generation: int) -> "Lineup":
        """Returns the lineup of a worker's games; a game has the same draws in both lineups.

        Args:
          games: games of the worker.
          first_game: number of the worker's first game among the games of all workers.
          generation: number of earlier processes of the worker in the run.
        """
        own = copy.copy(self)
        own._first_game, own._process = first_game, (generation,) if generation else ()
        own._assign(games)
        return own

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out the games, because a worker builds its own; see `of_worker`."""
        return {name: value for name, value in vars(self).items() if name not in ("_games", "playing")}

    def _assign(self, games: Games) -> None:
        """Assigns the agents of some games to the policies that may play them."""
        self._games = games
        self.group: dict[str, str] = {}
        self.columns: dict[str, np.ndarray] = {}
        # Numbers of the policies that may play each agent, by group.
        self._able: dict[str, list[list[int]]] = {key: [[] for _ in one.agents] for key, one in games.groups.items()}
        for number, name in enumerate(self.names):
            self._add(number, name, self._patterns[name])
        for key, group in games.groups.items():
            for agent, able in zip(group.agents, self._able[key]):
                if not able:
                    raise UsageError(
                        f"Trainer.policies has no policy that plays {agent}; add the agent to one of "
                        f"{', '.join(self.names)}"
                    )
        self.is_fixed = all(len(able) == 1 for each in self._able.values() for able in each)
        self.playing = {
            key: np.tile([able[0] for able in self._able[key]], group.num_games) for key, group in games.groups.items()
        }

    def draw(self) -> None:
        """Draws the policies of games that have just begun."""
        if self.is_fixed:
            return
        for game in np.flatnonzero(self._games.starts).tolist():
            drawn = self.of_game(self._seed, self._first_game + game, self._games.num_resets[game], *self._process)
            for key, numbers in drawn.items():
                self.playing[key][game * len(numbers) : (game + 1) * len(numbers)] = numbers

    def of_game(self, *seed: int) -> dict[str, list[int]]:
        """Returns the number of the policy of each agent in one game, by group.

        Args:
          seed: numbers that determine the draw, each at least 0.
        """
        generator = np.random.default_rng([*seed, _PURPOSE])
        drawn = {key: self._drawn(able, generator) for key, able in self._able.items()}
        if self._required is not None and not any(self._required in numbers for numbers in drawn.values()):
            units = self._units(self._required)
            for agent in units[generator.integers(len(units))]:
                drawn[self.group[self.names[self._required]]][agent] = self._required
        return drawn

    def agents_of(self, name: str) -> list[str]:
        """Returns the agents that a policy may play."""
        number, key = self.names.index(name), self.group[name]
        agents = self._games.groups[key].agents
        return [agent for agent, able in zip(agents, self._able[key]) if number in able]

    def share(self, name: str) -> float:
        """Returns the expected number of columns that a policy plays at the same time."""
        number, key = self.names.index(name), self.group[name]
        shares = [self._share(number, key, agent) for agent, able in enumerate(self._able[key]) if number in able]
        return float(sum(shares)) * self._games.groups[key].num_games

    def _share(self, number: int, key: str, agent: int) -> float:
        """Returns the probability that a policy plays an agent; the policy must be a candidate for the agent."""
        able = self._able[key][agent]
        drawn = float(self._probabilities(able)[able.index(number)])
        required = self._required
        if required is None or required not in able:
            return drawn
        units = self._units(required)
        others = [self._able[key][unit[0]] for unit in units]
        absent = [1.0 - float(self._probabilities(one)[one.index(required)]) for one in others]
        # Probability that no agent draws the required policy, and that it is then assigned to this agent.
        given = float(np.prod(absent)) / len(units)
        if number == required:
            return drawn + given
        own = 1.0 - float(self._probabilities(able)[able.index(required)])
        return drawn * (1.0 - given / own) if own else 0.0

    def _units(self, number: int) -> list[list[int]]:
        """Returns the agents that a policy may play, as indices in their group; agents in one list are drawn together.

        Args:
          number: number of the policy.
        """
        able = self._able[self.group[self.names[number]]]
        units: dict[Any, list[int]] = {}
        for agent, candidates in enumerate(able):
            if number in candidates:
                units.setdefault(agent if self._mixed else tuple(candidates), []).append(agent)
        return list(units.values())

    def _add(self, number: int, name: str, patterns: Sequence[str]) -> None:
        """Adds a policy to the candidates for the agents that its patterns match."""
        for pattern in patterns:
            if not any(fnmatchcase(agent, pattern) for group in self._games.groups.values() for agent in group.agents):
                raise UsageError(
                    f"Trainer.policies[{name!r}] has {pattern!r}, which matches no agent; agents with equal spaces are "
                    f"{_in_words(self._games)}"
                )
        fitting = {
            key: [i for i, agent in enumerate(group.agents) if any(fnmatchcase(agent, one) for one in patterns)]
            for key, group in self._games.groups.items()
        }
        keys = [key for key, agents in fitting.items() if agents]
        if len(keys) != 1:
            raise UsageError(
                f"Trainer.policies[{name!r}] is {list(patterns)}, which matches agents with different spaces; agents "
                f"with equal spaces are {_in_words(self._games)}"
            )
        (key,) = keys
        group = self._games.groups[key]
        self.group[name] = key
        is_own = np.zeros((group.num_games, len(group.agents)), bool)
        is_own[:, fitting[key]] = True
        self.columns[name] = np.flatnonzero(is_own)
        for agent in fitting[key]:
            self._able[key][agent].append(number)

    def _read_weights(self, weights: Mapping[str, float]) -> np.ndarray:
        if unknown := sorted(weights.keys() - {*self.names, *map(family_of, self.names)}):
            raise UsageError(f"Lineup.weights has {unknown[0]!r}; the policies are {', '.join(self.names)}")
        found = np.array([float(weights.get(name, weights.get(family_of(name), 1.0))) for name in self.names])
        for each in self._able.values():
            for able in each:
                if not found[able].sum():
                    raise UsageError(
                        f"Lineup.weights is 0 for {', '.join(self.names[k] for k in able)}, but no other policy can "
                        "play an agent; give one of these policies a weight above 0"
                    )
        return found

    def _read_required(self, name: str | None) -> int | None:
        if name is None:
            return None
        if name not in self.names:
            raise UsageError(f"Lineup.requires is {name!r}; the policies are {', '.join(self.names)}")
        return self.names.index(name)

    def _probabilities(self, able: Sequence[int]) -> np.ndarray:
        weights = self._weights[list(able)]
        return weights / weights.sum()

    def _drawn(self, able: Sequence[Sequence[int]], generator: np.random.Generator) -> list[int]:
        """Returns the policy of each agent of a game's group, drawn among the policies in `able`."""
        # Policy drawn for each set of candidates. Agents with equal candidates share the draw, unless `mixed`.
        drawn: dict[tuple[int, ...], int] = {}
        result = []
        for candidates in map(tuple, able):
            if self._mixed or candidates not in drawn:
                drawn[candidates] = int(generator.choice(candidates, p=self._probabilities(candidates)))
            result.append(drawn[candidates])
        return result


def family_of(name: str) -> str:
    """Returns the name of a policy without its final number: 'past' for 'past3'; see `patterns_of`."""
    return name.rstrip("0123456789")


def patterns_of(policies: PolicyPatterns | None, games: Games) -> dict[str, tuple[str, ...]]:
    """Returns the patterns of each policy's agents.

    Args:
      policies: agents of each policy: a pattern ('agent_*'), several patterns, or a pattern and a number of policies,
        such as `{'p': ('*', 4)}` for policies p0 to p3 that may all play these agents. 'each' means one policy for each
        agent, with the agent's name. None means one policy for all agents, called 'shared'.
      games: games of the agents.

    Raises:
      UsageError: an entry has the wrong form, or the agents have different spaces and `policies` is None.
    """
    agents = [agent for group in games.groups.values() for agent in group.agents]
    if policies is None:
        if len(games.groups) > 1:
            example = {f"p{k}": list(group.agents) for k, group in enumerate(games.groups.values())}
            raise UsageError(
                f"the agents of {games.name} have different spaces, so one policy cannot play all of them; bind for "
                f"example Trainer.policies = {example}"
            )
        return {"shared": ("*",)}
    if policies == "each":
        return {agent: (agent,) for agent in agents}
    if not isinstance(policies, Mapping) or not policies:
        raise UsageError(f"Trainer.policies is {policies!r}; it must be 'each', or a dict from names to agents")
    found: dict[str, tuple[str, ...]] = {}
    for name, given in policies.items():
        entries = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, (tuple, list)) else ()
        if len(entries) == 2 and isinstance(entries[0], str) and type(entries[1]) is int and entries[1] > 0:
            own = {f"{name}{k}": (entries[0],) for k in range(entries[1])}
        elif entries and all(isinstance(entry, str) for entry in entries):
            own = {name: entries}
        else:
            raise UsageError(
                f"Trainer.policies[{name!r}] is {given!r}; it must be a pattern of agents such as 'agent_*', a list of "
                "patterns, or a pattern with a number of policies, ('agent_*', 4)"
            )
        for one in own:
            _check_name(one)
            if one in found:
                raise UsageError(f"Trainer.policies names the policy {one} twice; give one of the two another name")
        found |= own
    return found


def _check_name(name: Any) -> None:
    """Raises UsageError if a policy cannot have this name."""
    if not isinstance(name, str) or not name.isidentifier() or name in _RESERVED or len(name) > 64:
        raise UsageError(
            f"Trainer.policies has a policy called {name!r}; a name consists of letters, digits and '_', does not "
            f"begin with a digit, has at most 64 characters, and is none of {', '.join(sorted(_RESERVED))}"
        )


# Reserved names: scopes of networks, attributes of modules, and opponents.
_RESERVED = {"actor", "critic", "progress", "random", "training"}


def _in_words(games: Games) -> str:
    return "; ".join(", ".join(group.agents) for group in games.groups.values())
