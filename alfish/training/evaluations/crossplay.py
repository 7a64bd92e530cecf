"""Games between all players of runs, each a policy at a checkpoint or random actions; each pair has result files."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.environments.games import Games
from alfish.errors import UsageError
from alfish.offline.recorded_spaces import Spaces, check_fit
from alfish.policies.joint_unroller import JointUnroller
from alfish.policies.lineup import Lineup
from alfish.runs import contents
from alfish.runs.files import make_directory, sha256, write_atomically
from alfish.training.evaluations.evaluation import bootstrap_interval, mean
from alfish.training.evaluations.ratings import Outcomes, Pair, Ratings, elo_ratings, exploitability
from alfish.training.evaluations.watch import type_name
from alfish.training.game_evaluator import RANDOM, GameEvaluator
from alfish.training.policy import Policy
from alfish.training.trainer import Trainer

SIDES = ("first", "second")  # names of the players of a match
ZERO = 1e-6  # largest |sum of the two sides' returns| in a zero-sum game

Side = tuple[str, ...]  # names of agents


@dataclass(frozen=True)
class Player:
    """A policy of a run, at a checkpoint, or `random_player`.

    Attributes:
      policy: name of the policy.
      run: directory of the run; '' means uniformly random actions.
      steps: clock steps of the checkpoint.
      checksum: SHA-256 sum of the checkpoint's file.
      agents: agents that the policy may play in its run.
    """

    policy: str
    run: str
    steps: int
    checksum: str
    agents: frozenset[str]

    @property
    def name(self) -> str:
        return f"{self.policy}@{self.run}:{self.steps}" if self.run else self.policy


def random_player(games: Games) -> Player:
    """Returns a player for any side of games, which takes uniformly random actions among the allowed ones."""
    return Player(RANDOM, "", 0, "", frozenset(agent for group in games.groups.values() for agent in group.agents))


def players_of(trainer: Trainer, run: str, checkpoints: Sequence[str | int], policies: Sequence[str]) -> list[Player]:
    """Returns the players of a run, by policy and then by steps.

    Args:
      trainer: trainer of the run.
      run: name of the run.
      checkpoints: names of checkpoints: 'all', 'latest', 'best' or steps.
      policies: names of policies; empty means all policies that train.

    Raises:
      UsageError: the run does not have several policies, or has no such policy or checkpoint.
    """
    unroller = trainer.unroller
    if not isinstance(unroller, JointUnroller):
        raise UsageError(f"{run} is not a run in games of several agents; see docs/several_policies.md")
    members = {member.name: member for member in unroller.members}
    if unknown := [name for name in policies if name not in members]:
        raise UsageError(f"{run} has no policy {unknown[0]!r}; its policies are {', '.join(members)}")
    names = policies or [name for name, member in members.items() if member.trains]
    saved = trainer.directory.checkpoints
    steps, best = saved.steps(), saved.best()
    named = {"all": steps, "latest": steps[-1:], "best": [one for one in steps if one == best]}
    found: set[int] = set()
    for which in checkpoints:
        own = named[which] if isinstance(which, str) else [one for one in steps if one == which]
        if not own:
            raise UsageError(f"{run} has no checkpoint {which}; its checkpoints are {steps}")
        found |= set(own)
    checksums = {one: sha256(saved.path(one)) for one in sorted(found)}
    return [
        Player(name, run, one, checksum, frozenset(unroller.lineup.agents_of(name)))
        for name in names
        for one, checksum in checksums.items()
    ]


def sides_of(games: Games, patterns: Sequence[str], players: Sequence[Player]) -> tuple[Side, Side]:
    """Returns the agents of the two sides of games.

    Args:
      games: games to play.
      patterns: pattern of the names of each side's agents. Empty means the two agents of a game with two agents; in
        other games, the two sets of agents that the players' policies play.
      players: players, whose agents determine the sides if `patterns` is empty.

    Raises:
      UsageError: the two sides do not contain each agent of the game exactly once.
    """
    agents = [agent for group in games.groups.values() for agent in group.agents]
    if patterns:
        found = [tuple(agent for agent in agents if fnmatchcase(agent, one)) for one in patterns]
    elif len(agents) == 2:
        found = [(agent,) for agent in agents]
    else:
        played = {tuple(agent for agent in agents if agent in one.agents) for one in players}
        found = sorted(played - {()}, key=lambda side: agents.index(side[0]))
    if len(found) != 2 or sorted(agent for side in found for agent in side) != sorted(agents):
        raise UsageError(
            f"crossplay is for two sides, which have all agents of the game once ({', '.join(agents)}); name the sides "
            "by --sides, as --sides='adversary_*,agent_*'"
        )
    return found[0], found[1]


def pairs_of(players: Sequence[Player], sides: tuple[Side, Side]) -> list[Pair]:
    """Returns all pairs of different players that can play each other, as numbers (first side, second side).

    Raises:
      UsageError: there is no such pair, or a player is in no pair.
    """
    able = [[set(side) <= player.agents for side in sides] for player in players]
    numbers = range(len(players))
    pairs = [
        (first, second)
        for first in numbers
        for second in numbers
        if first != second and able[first][0] and able[second][1]
    ]
    in_words = " and ".join(map(", ".join, sides))
    if not pairs:
        raise UsageError(
            f"crossplay has {len(players)} players, and no two of them play the sides {in_words}; name more "
            "checkpoints, policies or runs"
        )
    if idle := set(numbers) - {number for pair in pairs for number in pair}:
        player = players[min(idle)]
        raise UsageError(
            f"{player.name} plays {', '.join(sorted(player.agents))} in its run, and can play neither of the sides "
            f"{in_words}; leave it out by --policies, or choose other --sides"
        )
    return pairs


class Match(NamedTuple):
    """The games of two players in one seating.

    Attributes:
      first, second: numbers of the players of the first and of the second side.
      returns: mean return of each side's agents in each game, `[2, N]`; nan where no agent of the side has acted.
    """

    first: int
    second: int
    returns: np.ndarray

    def outcomes(self) -> Outcomes:
        """Returns the numbers of games that the first side won, drew and lost."""
        difference = self.returns[0] - self.returns[1]
        return Outcomes(int((difference > 0).sum()), int((difference == 0).sum()), int((difference < 0).sum()))


class Crossplay:
    """Plays games between all pairs of players, in each seating that their policies were trained for.

    Args:
      evaluator: evaluator of the games; its policies are not used.
      players: players to match.
      sides: agents of the two sides.
      directory: directory of the result files.
      load: function that returns the policy of a player.
      num_games: number of games of a pair in one seating; game k of each pair has the seed `seed + k`.
      seed: seed of game 0.
      sample: whether policies sample their actions.
      show: function that receives a line about each match.

    Raises:
      UsageError: no two players can play each other, or a player can play neither side.
    """

    def __init__(
        self,
        evaluator: GameEvaluator,
        players: Sequence[Player],
        sides: tuple[Side, Side],
        directory: Path,
        load: Callable[[Player], Policy],
        num_games: int,
        seed: int,
        sample: bool,
        show: Callable[[str], Any] = print,
    ):
        self._games, self._max_length = evaluator.environment, evaluator.max_length
        self.players = players
        self._sides = sides
        self._directory = directory
        self._load = load
        self._num_games = num_games
        self._seed = seed
        self._sample = sample
        self._show = show
        self._seated: dict[int, _Seated] = {}
        self.pairs = pairs_of(players, sides)

    def matches(self) -> list[Match]:
        """Returns the matches of all pairs; plays the matches without a result file."""
        return [self._match(pair) for pair in self.pairs]

    def _match(self, pair: Pair) -> Match:
        key = self._key(pair)
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
        path = self._directory / f"{digest[:24]}.json"
        if (stored := contents.json_value(self._directory, path.name)) is not None:
            return Match(*pair, self._stored(path, stored, key))
        returns = self._played(pair)
        make_directory(self._directory)
        numbers = [[None if np.isnan(one) else one for one in own] for own in returns.tolist()]
        write_atomically(path, json.dumps({**key, "returns": numbers}) + "\n")
        match = Match(*pair, returns)
        own, (wins, draws, losses) = returns[0][np.isfinite(returns[0])], match.outcomes()
        first, second = (self.players[k].name for k in pair)
        self._show(f"{first} against {second}: return {mean(own):.4g}, {wins} won, {draws} drawn, {losses} lost")
        return match

    def _key(self, pair: Pair) -> dict[str, Any]:
        """Returns everything that determines the result of a match."""
        players = [self.players[k] for k in pair]
        return {
            "players": [one.name for one in players],
            "checksums": [one.checksum for one in players],
            "sides": [list(side) for side in self._sides],
            "game": self._games.name,
            "settings": json.loads(json.dumps(self._games.settings, default=type_name, skipkeys=True)),
            "seed": self._seed,
            "num_games": self._num_games,
            "max_length": self._max_length,
            "sample": self._sample,
        }

    def _stored(self, path: Path, stored: Any, key: Mapping[str, Any]) -> np.ndarray:
        """Returns the returns of a result file."""
        try:
            if {name: stored[name] for name in key} != dict(key):
                raise ValueError("it has other settings")
            returns = np.array([[np.nan if one is None else float(one) for one in own] for own in stored["returns"]])
            if returns.shape != (2, self._num_games):
                raise ValueError("it has another number of games")
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"{path} is not a result of `alfish crossplay` ({error}); remove it") from error
        return returns

    def _played(self, pair: Pair) -> np.ndarray:
        seated = [self._seat(number)._replace(name=name) for number, name in zip(pair, SIDES)]
        lineup = Lineup(dict(zip(SIDES, self._sides)), self._games, self._seed, weights=None, mixed=True, requires=None)
        for one, number in zip(seated, pair):
            group = self._games.groups[lineup.group[one.name]]
            if one.spaces is not None:
                spaces = Spaces(group.observation_space, group.action_space)
                check_fit(one.spaces, spaces, self.players[number].name, "those of the game")
        evaluator = GameEvaluator(self._games, seated, lineup, None, self._max_length)
        evaluation = evaluator.evaluate(self._num_games, self._seed, self._sample)
        return np.array([evaluation.by_objective[name] for name in SIDES])

    def _seat(self, number: int) -> "_Seated":
        if not self.players[number].run:
            return _Seated("", None, None, None)
        if number not in self._seated:
            policy = self._load(self.players[number])
            spaces = Spaces(policy.observation_space, policy.action_space)
            self._seated[number] = _Seated("", policy.algorithm, policy.transforms, spaces)
        return self._seated[number]


class _Seated(NamedTuple):
    """A player with the attributes that `GameEvaluator` reads; if all but `name` are None, actions are random."""

    name: str
    algorithm: RLAlgorithm | None
    transforms: Any
    spaces: Spaces | None


class Standings:
    """Results of the matches, for each pair and for each player.

    Args:
      players: players, in the order of their numbers.
      matches: all matches of these players.
      anchor: number of the player whose Elo is 1000.

    Attributes:
      is_zero_sum: whether the returns of the two sides add up to 0 in each game, as wins and ratings require.
      ratings: Elo of the players; None unless `is_zero_sum`.
      exploitability: largest mean loss of each player to another player, `[P]`; None unless `is_zero_sum`.
      means: mean return of each player over its opponents, `[P]`; nan for a player without opponents.
    """

    def __init__(self, players: Sequence[Player], matches: Sequence[Match], anchor: int = 0):
        self._players, self._matches = players, matches
        sums = np.concatenate([match.returns.sum(0) for match in matches])
        self.is_zero_sum = bool((np.abs(sums) <= ZERO).all())
        means, count = self._means(), len(players)
        own = [[value for (player, _), value in means.items() if player == k] for k in range(count)]
        self.means = np.array([mean(values) if values else np.nan for values in own])
        self.ratings: Ratings | None = None
        self.exploitability: np.ndarray | None = None
        if self.is_zero_sum:
            outcomes = {(match.first, match.second): match.outcomes() for match in matches}
            self.ratings = elo_ratings(outcomes, count, anchor)
            self.exploitability = exploitability(means, count)

    def match_table(self) -> list[list[Any]]:
        """Returns a table of matches; row 0 is the header."""
        header = ["first", "second", "games"]
        for side in SIDES:
            header += [f"mean_return/{side}", f"ci_low/{side}", f"ci_high/{side}"]
        rows: list[list[Any]] = [[*header, "wins", "draws", "losses"]]
        for match in self._matches:
            names = [self._players[k].name for k in (match.first, match.second)]
            row: list[Any] = [*names, match.returns.shape[1]]
            for own in match.returns:
                present = own[np.isfinite(own)]
                row += [mean(present), *bootstrap_interval(present)] if len(present) else [None] * 3
            rows.append([*row, *(match.outcomes() if self.is_zero_sum else [None] * 3)])
        return rows

    def player_table(self) -> list[list[Any]]:
        """Returns a table of players, the strongest one first; row 0 is the header."""
        order = np.argsort(-(self.means if self.ratings is None else self.ratings.elo), kind="stable")
        rows: list[list[Any]] = [["player", "elo", "ci_low", "ci_high", "exploitability", "mean_return"]]
        for k in order.tolist():
            rated = [None] * 3 if self.ratings is None else [float(one[k]) for one in self.ratings]
            loss = None if self.exploitability is None else float(self.exploitability[k])
            rows.append([self._players[k].name, *rated, loss, float(self.means[k])])
        return rows

    def _means(self) -> dict[Pair, float]:
        """Returns the mean return of each player against each other player, over both seatings."""
        found: dict[Pair, list[float]] = {}
        for match in self._matches:
            pair = match.first, match.second
            for key, own in zip((pair, pair[::-1]), match.returns):
                found.setdefault(key, []).extend(own[np.isfinite(own)].tolist())
        return {pair: mean(own) for pair, own in found.items() if own}
