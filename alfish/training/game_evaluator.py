"""Evaluation of several policies in whole, seeded games."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Protocol

import numpy as np
import torch

from alfish import nest, specs
from alfish.algorithms.acting import in_eval_mode
from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.data import StepType, TimeStep
from alfish.environments.games import Games, Group, SideBySide
from alfish.errors import RunError, UsageError, counted
from alfish.errors.user_code import calling
from alfish.metrics.env_info import SUCCESS, EpisodeInfos
from alfish.nest import Nest
from alfish.offline import Episode
from alfish.parameters import NonNegativeInt, checked
from alfish.policies.lineup import Lineup
from alfish.runs import random_state
from alfish.training.evaluations.evaluation import Evaluation
from alfish.training.evaluator import MAX_EPISODE_LENGTH, episode_of, print_to_stderr, report_unmatched
from alfish.training.films import FilmRow
from alfish.training.padded_policy import PaddedPolicy
from alfish.transforms import Transforms
from alfish.unrollers.episode_runner import EpisodeAccumulator

RANDOM = "random"  # name of an opponent with uniformly random actions
_CPU = torch.device("cpu")


class Player(Protocol):
    """Interface of an evaluator's policies: name and networks. `algorithm` None means uniformly random actions."""

    @property
    def name(self) -> str: ...

    @property
    def algorithm(self) -> RLAlgorithm | None: ...

    @property
    def transforms(self) -> Transforms: ...


class GameEvaluator:
    """Plays whole games with `predict_step` and frozen transforms; global random states do not change.

    Game k is reset with `seed + k`. Its result does not depend on the number of games that are played together.

    Args:
      games: games built for evaluation.
      members: policies that play.
      lineup: lineup of the run, which says which policies play which agents.
      opponents: policies by patterns of agents' names; each is the name of a policy, or 'random'. Agents that match no
        pattern are played by the policies of `lineup`.
      max_length: number of steps after which a game is truncated.

    Attributes:
      environment, max_length: the games, and the constructor's argument.
      log: function that receives a line about truncated games; the default prints to standard error.
      num_cut: number of truncated games of the last evaluation.
      infos: globs of the numbers that `evaluate` reads from the infos at the ends of agents' episodes.

    Raises:
      UsageError: a pattern matches no agent, or no policy of that name can play the agents.
    """

    def __init__(
        self,
        games: Games,
        members: Sequence[Player],
        lineup: Lineup,
        opponents: Mapping[str, str] | None = None,
        max_length: int = MAX_EPISODE_LENGTH,
    ):
        if isinstance(games, SideBySide):
            raise UsageError(
                "SideBySide cannot be evaluated, because the episodes of its environments do not end together; bind "
                "Trainer.listeners without @Evaluate(), and evaluate each policy in its own environment"
            )
        self.environment = games
        self._members = list(members)
        self._lineup = lineup
        self.max_length, self.num_cut = max_length, 0
        self.log: Callable[[str], Any] = print_to_stderr
        self.infos: Sequence[str] = SUCCESS
        self._unmatched: list[str] = []  # see `Evaluator`
        self._numbers = {member.name: number for number, member in enumerate(members)}
        self._fixed = self._fixed_numbers(opponents or {})

    @checked
    def evaluate(
        self,
        num_episodes: int,
        seed: NonNegativeInt = 0,
        sample: bool = False,
        env_steps: int = 0,
        on_row: Callable[[Any], Any] | None = None,
        values: bool = False,
    ) -> Evaluation:
        """Evaluates the policies.

        Args:
          num_episodes: number of games.
          seed: seed of game 0.
          sample: whether to act with `rollout_step`.
          env_steps: number of environment steps of training, copied into the result.
          on_row: function that is called after every reset and step (for films), with a row for each game.
          values: flag without effect, because rows of games have no values.

        Returns:
          Evaluation. `by_objective` has the mean return of each policy's agents in each game, and `infos` the means of
          the numbers in their infos; `returns` has the mean over the policies of each game, and 0 for a game that ended
          before any policy acted. If only random agents played, `returns` has their means.

        Raises:
          UsageError: `num_episodes` is below 1.
          RunError: a return is not finite.
        """
        if num_episodes < 1:
            raise UsageError(f"the evaluator was asked for {num_episodes} games; it must be at least 1")
        self.num_cut = 0
        names = [*self._numbers, RANDOM]
        returns, lengths = np.full((num_episodes, len(names)), np.nan), np.zeros(num_episodes, np.int64)
        infos = _AgentInfos(self.environment, self.infos, num_episodes)
        with self._acting(sample):
            for first in range(0, num_episodes, self.environment.num_games):
                count = min(self.environment.num_games, num_episodes - first)
                infos.begin({key: self._playing(key, seed + first) for key in self.environment.groups})
                found, length = self._play(first, seed + first, count, sample, on_row, infos.add)
                returns[first : first + count], lengths[first : first + count] = found[:count], length[:count]
        self._unmatched = report_unmatched(infos.unmatched(), self._unmatched, self.log)
        if np.isinf(returns).any() or np.isnan(returns).all(1).any():
            raise RunError("the return of a game of the evaluation is not finite; check the rewards of the game")
        if self.num_cut:
            limit = f"{self.max_length:,} steps (Trainer.max_evaluation_length)"
            self.log(f"{counted(self.num_cut, 'game')} cut at {limit}")
        of_policies = returns[:, :-1]
        objectives = {name: tuple(own.tolist()) for name, own in zip(self._numbers, of_policies.T)}
        counted_returns = of_policies if np.isfinite(of_policies).any() else returns
        num_counted = np.isfinite(counted_returns).sum(1)
        whole = np.nansum(counted_returns, axis=1) / np.maximum(num_counted, 1)
        steps, means = tuple(lengths.tolist()), infos.means(list(self._numbers))
        return Evaluation(env_steps, seed, tuple(whole.tolist()), steps, self.num_cut, objectives, means)

    def test_episodes(self, num_games: int, seed: int = 0, *, policy: str = "") -> Iterator[Episode]:
        """Yields the episodes of a policy's agents, in the order in which they end; see `Evaluator.test_episodes`.

        In a game that is cut, the episode of an agent that acted at the cut ends there. Other episodes are left out.

        Args:
          num_games: number of games.
          seed: seed of game 0.
          policy: name of the policy; '' means the first policy.
        """
        policy = policy or next(iter(self._numbers))
        key = self._lineup.group[policy]
        group, number = self.environment.groups[key], self._numbers[policy]
        for first in range(0, num_games, self.environment.num_games):
            count = min(self.environment.num_games, num_games - first)
            found: list[Episode] = []
            kept = EpisodeAccumulator(group.num_envs)
            is_own = self._playing(key, seed + first) == number
            is_own &= np.arange(self.environment.num_games).repeat(len(group.agents)) < count

            def keep(
                rows: Mapping[str, TimeStep], counts: np.ndarray, cut: np.ndarray, kept=kept, is_own=is_own, found=found
            ) -> None:
                own, counts, cut = rows[key], *(each.repeat(len(group.agents)) for each in (counts, cut))
                present = is_own & counts & (own.step_type != StepType.PAD)
                ends = present & ((own.step_type == StepType.LAST) | cut & (own.step_type == StepType.MID))
                kept.add(own._replace(step_type=np.where(ends, StepType.LAST, own.step_type)), _indices(present))
                for column in _indices(ends):
                    found.append(episode_of(len(found), kept.take(column), group.observation_space, group.action_space))

            with self._acting(False):
                self._play(first, seed + first, count, False, None, keep)
            yield from found

    def close(self) -> None:
        self.environment.close()

    @contextlib.contextmanager
    def _acting(self, sample: bool) -> Iterator[None]:
        """Acts without gradient in eval mode within the context; restores generators and modes on exit."""
        with torch.no_grad(), contextlib.ExitStack() as stack, random_state.preserved():
            for member in self._members:
                if member.algorithm is not None:
                    stack.enter_context(in_eval_mode(member.algorithm, sample))
            yield

    def _play(
        self,
        first: int,
        seed: int,
        count: int,
        sample: bool,
        on_row: Callable[[FilmRow], Any] | None,
        keep: Callable[[Mapping[str, TimeStep], np.ndarray, np.ndarray], None] | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Plays a round: one game in each environment.

        Args:
          first: number of the round's first game.
          seed: seed of the round's first game; each further game has the next seed.
          count: number of games whose results are used; further games of the round are not filmed.
          sample, on_row: arguments of `evaluate`.
          keep: function that receives the rows of each group after the reset and each step, and two masks `[G]` bool:
            games that were not over before these rows, and games that are cut at these rows. None keeps no rows.

        Returns:
          The mean return of each policy's agents in each game, `[G, P+1]`, and the lengths of the games, `[G]`. Column
          P is for agents with random actions. An entry is nan if none of its agents has played.
        """
        games = self.environment
        num_games = games.num_games
        random_state.seed_all(seed)
        with calling(f"{games.name}.reset"):
            rows = games.reset([seed + k for k in range(num_games)])
        seats, first_agent = {}, 0
        for key, group in games.groups.items():
            seats[key] = _Seats(group, self._playing(key, seed), self._members, sample, seed, first_agent)
            first_agent += len(group.agents)
        is_over, length = np.zeros(num_games, bool), np.zeros(num_games, np.int64)
        numbers = np.where(np.arange(num_games) < count, first + np.arange(num_games), -1)

        def show(ends: np.ndarray) -> None:
            if on_row is not None:
                found = self._means(seats.values())
                returns = np.nansum(found, axis=1) / np.maximum(np.isfinite(found).sum(1), 1)
                reward = returns - shown
                shown[:] = returns
                on_row(FilmRow(np.where(is_over & ~ends, -1, numbers), reward, None, None, ends))

        shown = np.zeros(num_games)  # returns at the last row that was shown
        show(is_over)
        if keep is not None:
            keep(rows, ~is_over, is_over)
        while not is_over.all():
            actions = {key: own.act(rows[key]) for key, own in seats.items()}
            with calling(f"{games.name}.step"):
                rows = games.step(actions)
            length += ~is_over
            is_cut = ~is_over & ~games.is_over & (length >= self.max_length)
            if keep is not None:
                keep(rows, ~is_over, is_cut)
            for key, own in seats.items():
                own.count(rows[key], is_over)
            self.num_cut += int(is_cut[:count].sum())
            ends = ~is_over & (games.is_over | is_cut)
            is_over = is_over | ends
            show(ends)
        return self._means(seats.values()), length

    def _means(self, seats: Iterable["_Seats"]) -> np.ndarray:
        """Returns the mean return so far of each policy's agents, and of agents with random actions, `[G, P+1]`."""
        totals, counts = np.zeros((2, self.environment.num_games, len(self._members) + 1))
        for own in seats:
            own.add_returns(totals, counts)
        return np.divide(totals, counts, out=np.full_like(totals, np.nan), where=counts > 0)

    def _playing(self, key: str, seed: int) -> np.ndarray:
        """Returns the number of the policy that plays each column of a group, -1 for random actions, `[columns]`."""
        rows = []
        for game in range(self.environment.num_games):
            drawn = self._lineup.of_game(seed + game)[key]
            rows.append([own if fixed is None else fixed for own, fixed in zip(drawn, self._fixed[key])])
        return np.array(rows).reshape(-1)

    def _fixed_numbers(self, opponents: Mapping[str, str]) -> dict[str, list[int | None]]:
        """Returns, for each group, the number of each agent's policy in `opponents`; None for other agents."""
        fixed: dict[str, list[int | None]] = {
            key: [None] * len(group.agents) for key, group in self.environment.groups.items()
        }
        for pattern, name in opponents.items():
            fits = False
            for key, group in self.environment.groups.items():
                for i, agent in enumerate(group.agents):
                    if not fnmatchcase(agent, pattern):
                        continue
                    fits = True
                    if name != RANDOM and self._lineup.group.get(name) != key:
                        raise UsageError(
                            f"the lineup has the policy {name!r} for {agent}; policies with the agent's spaces are "
                            f"{', '.join(one for one in self._numbers if self._lineup.group[one] == key)} and {RANDOM}"
                        )
                    fixed[key][i] = -1 if name == RANDOM else self._numbers[name]
            if not fits:
                agents = [agent for group in self.environment.groups.values() for agent in group.agents]
                raise UsageError(
                    f"the lineup has {pattern!r}, which matches no agent; the agents are {', '.join(agents)}"
                )
        return fixed


class _Seats:
    """The policies of one group of agents in a round of games, and the agents' returns.

    Args:
      group: group of agents.
      playing: number of the policy that plays each column, -1 for random actions, `[columns]`.
      members: policies, by number.
      sample: whether policies act with `rollout_step`.
      seed: seed of the round.
      first_agent: number of agents in earlier groups.
    """

    def __init__(
        self, group: Group, playing: np.ndarray, members: Sequence[Player], sample: bool, seed: int, first_agent: int
    ):
        self._playing, num_games = playing, len(playing) // len(group.agents)
        self._game = np.repeat(np.arange(num_games), len(group.agents))
        self._returns = np.zeros(len(playing))
        self._has_played = np.zeros(len(playing), bool)
        self._policies: dict[int, PaddedPolicy | _RandomPolicy] = {}
        for number in sorted(set(playing.tolist())):
            algorithm = None if number < 0 else members[number].algorithm
            policy: PaddedPolicy | _RandomPolicy
            if algorithm is None:
                policy = _RandomPolicy(group)
            else:
                policy = PaddedPolicy(algorithm, members[number].transforms, len(playing), sample, has_gaps=True)
            for column in _indices(playing == number):
                # The noise of an agent depends only on its game and its index among all agents.
                game, agent = divmod(column, len(group.agents))
                policy.begin(
                    column, int(np.random.SeedSequence([seed + game, first_agent + agent]).generate_state(1)[0])
                )
            self._policies[number] = policy

    def act(self, rows: TimeStep) -> Nest:
        """Returns the actions of all columns, arrays `[columns, ...]`."""
        time_step, columns = nest.tensors(rows), np.arange(len(self._playing))
        actions: Nest = None
        for number, policy in self._policies.items():
            found = nest.arrays(policy.act(time_step, np.where(self._playing == number, columns, -1)))
            actions = found if actions is None else nest.where(self._playing == number, found, actions)
        return actions

    def count(self, rows: TimeStep, is_over: np.ndarray) -> None:
        """Adds the rewards of games that are not over to the returns."""
        counts = ~is_over[self._game] & (rows.step_type != StepType.PAD)
        reward = rows.reward.reshape(len(counts), -1).sum(1).astype(np.float64)
        self._returns += np.where(counts & (rows.step_type != StepType.FIRST), reward, 0.0)
        self._has_played |= counts

    def add_returns(self, totals: np.ndarray, counts: np.ndarray) -> None:
        """Adds the returns of agents that have played to `totals`, and 1 for each to `counts`, both `[G, P+1]`."""
        own = self._game[self._has_played], self._playing[self._has_played]
        np.add.at(totals, own, self._returns[self._has_played])
        np.add.at(counts, own, 1)


class _AgentInfos:
    """Numbers in the infos at the ends of agents' episodes.

    Args:
      games: games that are played in rounds, one game in each environment.
      include: globs of the numbers.
      num_games: number of games in all rounds.
    """

    def __init__(self, games: Games, include: Sequence[str], num_games: int):
        self._games, self._num_games = games, num_games
        num_rounds = -(-num_games // games.num_games)
        self._found = {key: EpisodeInfos(include, num_rounds * group.num_envs) for key, group in games.groups.items()}
        self._playing: dict[str, list[np.ndarray]] = {key: [] for key in games.groups}

    def begin(self, playing: Mapping[str, np.ndarray]) -> None:
        """Begins a round; `playing` has the number of the policy that plays each column of a group, `[columns]`."""
        for key, own in playing.items():
            self._playing[key].append(own)

    def add(self, rows: Mapping[str, TimeStep], counts: np.ndarray, cut: np.ndarray) -> None:
        """Reads the infos of the last step; see `keep` of `GameEvaluator._play`."""
        for key, group in self._games.groups.items():
            step_type, (here, is_cut) = rows[key].step_type, (mask.repeat(len(group.agents)) for mask in (counts, cut))
            ended = here & ((step_type == StepType.LAST) | is_cut & (step_type == StepType.MID))
            column = (len(self._playing[key]) - 1) * group.num_envs + np.arange(group.num_envs)
            self._found[key].add(self._games.infos[key], column, ended)

    def unmatched(self) -> list[str]:
        """Returns the globs that have matched no number of any agent."""
        of_groups = [found.unmatched() for found in self._found.values()]
        return [glob for glob in of_groups[0] if all(glob in own for own in of_groups[1:])]

    def means(self, names: Sequence[str]) -> dict[str, tuple[float, ...]]:
        """Returns means over the agents of each policy in each game, `[games]`, by `POLICY/NAME`; nan without agents.

        Args:
          names: names of the policies, by number.
        """
        means = {}
        for key, found in self._found.items():
            shape = -1, len(self._games.groups[key].agents)
            playing = np.concatenate(self._playing[key]).reshape(shape)[: self._num_games]
            for name, values in found.values.items():
                of_agents = values.reshape(shape)[: self._num_games]
                for number in np.unique(playing[playing >= 0]).tolist():
                    is_own = (playing == number) & ~np.isnan(of_agents)
                    count = is_own.sum(1)
                    total = np.where(is_own, of_agents, 0.0).sum(1)
                    mean = np.divide(total, count, out=np.full(len(count), np.nan), where=count > 0)
                    means[f"{names[number]}/{name}"] = tuple(mean.tolist())
        return dict(sorted(means.items()))


class _RandomPolicy:
    """Takes uniformly random actions among the allowed ones, with a generator for each column; see `PaddedPolicy`."""

    def __init__(self, group: Group):
        self._action_spec = group.action_spec
        self._masks = specs.mask_reader(group.observation_spec, group.action_spec)
        self._generators: dict[int, list[torch.Tensor]] = {}

    def begin(self, column: int, seed: int) -> None:
        """Seeds the generator of a column."""
        random_state.seed_torch(seed)
        self._generators[column] = random_state.torch_state(_CPU)

    def act(self, time_step: TimeStep, columns: np.ndarray) -> Nest:
        """Returns actions `[columns, ...]`; zeros where `columns` is -1, because another policy acts there."""
        actions = specs.zeros(self._action_spec, (len(columns),))
        for column in _indices(columns >= 0):
            own = nest.map(lambda leaf, column=column: leaf[column : column + 1], time_step.observation)
            mask = None if self._masks is None else self._masks(own)
            random_state.set_torch_state(_CPU, self._generators[column])
            drawn = specs.sample(self._action_spec, 1, mask)
            self._generators[column] = random_state.torch_state(_CPU)
            for target, leaf in zip(nest.leaves(actions), nest.leaves(drawn), strict=True):
                target[column] = leaf[0]
        return actions


def _indices(mask: np.ndarray) -> list[int]:
    return np.flatnonzero(mask).tolist()
