"""Checks of `alfish check-env` for games with several agents."""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from gymnasium.vector.utils import batch_space, iterate

from alfish import nest, specs
from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.bin.first_run import print_algorithms, refusals, rounded
from alfish.data import StepType, TimeStep
from alfish.environments.games import Games, Group
from alfish.errors import counted, significant
from alfish.runs import random_state

MORE_STEPS = 10  # largest number of random steps until a game ends, as a multiple of `num_steps`
LONGEST_SECONDS = 4.0  # seconds after which random steps in slow games stop


def report(games: Games, num_steps: int, algorithms: Sequence[type[RLAlgorithm]]) -> int:
    """Prints groups of agents, statistics of random games, and the algorithms that fit each group.

    Args:
      games: games to examine.
      num_steps: number of steps of each game; up to `MORE_STEPS` times as many if no game ends earlier.
      algorithms: algorithms to check against the specs of each group.

    Returns:
      Exit status: 0 if an algorithm can train and nothing is wrong, else 1.
    """
    order = "in turns" if games.turns > 1 else "all agents at once"
    print(f"game         {games.name}: {counted(len(_agents(games)), 'agent')}, {order}")
    for group in games.groups.values():
        print(f"agents       {', '.join(group.agents)}")
        print(f"observation  {specs.describe(group.observation_spec)}")
        print(f"action       {specs.describe(group.action_spec)}  (the algorithm's units)")
    observed = RandomGames(games)
    complaints = observed.play(num_steps)
    games.close()
    for line in observed.lines():
        print(line)
    for complaint in complaints:
        print(f"problem      {complaint}")
    for warning in observed.warnings():
        print(f"warning      {warning}")
    reasons = {name: refusals(algorithms, group) for name, group in games.groups.items()}
    for name, own in reasons.items():
        equal = [other for other in reasons if reasons[other] == own]
        if name == equal[0]:
            print_algorithms(own, ", ".join(equal) if len(equal) < len(reasons) else "")
    is_able = not all(reason for own in reasons.values() for reason in own.values())
    if is_able and complaints:
        print(f"next         fix the {'problem' if len(complaints) == 1 else 'problems'}, and check again")
    return 0 if is_able and not complaints else 1


class RandomGames:
    """Acts at random in games, and collects statistics and faults.

    Args:
      games: games to step.
    """

    def __init__(self, games: Games):
        self._games = games
        self._masks = {
            name: specs.mask_reader(group.observation_spec, group.action_spec) for name, group in games.groups.items()
        }
        self._lengths: list[int] = []  # numbers of steps of the games that have ended
        self._returns: dict[str, list[np.ndarray]] = {agent: [] for agent in _agents(games)}  # ended episodes' returns
        self._seen: set[str] = set()  # agents that have occurred
        self._num_steps, self._seconds = 0, 0.0

    def play(self, num_steps: int) -> list[str]:
        """Steps the games; returns a sentence for each kind of fault."""
        games, complaints = self._games, []
        seeds = [5 + game for game in range(games.num_games)]
        with random_state.apart():
            once, rows = games.reset(seeds), games.reset(seeds)
        if any(not _equal(once[name], rows[name]) for name in rows):
            complaints.append(
                "two resets with the same seed give different observations, so evaluations cannot be repeated"
            )
        random_state.seed_torch(0)  # seed of the actions
        begins = np.zeros(games.num_games, int)
        totals = {name: np.zeros((group.num_envs, *group.reward_spec.shape)) for name, group in games.groups.items()}
        for step in range(1, MORE_STEPS * num_steps + 1):
            has_enough = step > num_steps
            if (self._lengths and has_enough) or ((self._lengths or has_enough) and self._seconds > LONGEST_SECONDS):
                break
            actions = {name: self._action(name, rows[name]) for name in rows}
            began = time.perf_counter()
            with random_state.apart():
                rows = games.step(actions)
            self._seconds += time.perf_counter() - began
            self._num_steps += games.num_games
            # A game that was reset in this step ended in the previous step.
            self._lengths += (step - 1 - begins[games.starts]).tolist()
            begins[games.starts] = step
            for name, group in games.groups.items():
                self._add(group, rows[name], totals[name])
                if not any("outside" in complaint for complaint in complaints):
                    complaints += _outside(group, rows[name])
        if not self._lengths:
            num_played = self._num_steps // games.num_games
            complaints.append(
                f"no game ended in {num_played:,} random steps, so there are no returns to report; if games are "
                f"longer, raise --num_steps to {MORE_STEPS * num_steps}, otherwise let the game truncate its agents "
                "after some steps"
            )
        return complaints

    def lines(self) -> list[str]:
        """Returns lines about lengths, returns and speed."""
        found = []
        if self._lengths:
            spread = f"{min(self._lengths)} to {max(self._lengths)}"
            found.append(f"games        {counted(len(self._lengths), 'random game')} of {spread} steps")
        for agent, returns in self._returns.items():
            if returns:
                mean = np.atleast_1d(np.mean(returns, 0))
                found.append(f"return       {agent}: {', '.join(map(significant, mean.tolist()))} on average")
        if self._seconds:
            found.append(f"speed        about {rounded(self._num_steps / self._seconds)} game steps/s")
        return found

    def warnings(self) -> list[str]:
        found = []
        if absent := [agent for agent in self._returns if agent not in self._seen]:
            found.append(f"{', '.join(absent)} never appeared in random games")
        ended = [one for returns in self._returns.values() for one in returns]
        if ended and not np.any(ended):
            found.append(
                "the return of each agent is 0 in each random game; check that step returns the rewards, or in a "
                "turn-based game that it calls _accumulate_rewards"
            )
        for group in self._games.groups.values():
            paths = nest.paths(group.observation_spec)
            if "action_mask" in paths and self._masks[group.name] is None:
                found.append(
                    f"the part action_mask that {', '.join(group.agents)} observe is not used as a mask; bind "
                    "make_games.action_mask = 'observation:action_mask'"
                )
        return found

    def _action(self, name: str, rows: TimeStep) -> Any:
        group, masks = self._games.groups[name], self._masks[name]
        allowed = None if masks is None else masks(nest.tensors(rows.observation))
        return nest.arrays(specs.sample(group.action_spec, group.num_envs, allowed))

    def _add(self, group: Group, rows: TimeStep, totals: np.ndarray) -> None:
        totals[rows.step_type == StepType.FIRST] = 0
        totals += rows.reward
        for column in np.flatnonzero(rows.step_type != StepType.PAD).tolist():
            agent = group.agents[column % len(group.agents)]
            self._seen.add(agent)
            if rows.step_type[column] == StepType.LAST:
                self._returns[agent].append(totals[column].copy())


def _agents(games: Games) -> list[str]:
    return [agent for group in games.groups.values() for agent in group.agents]


def _equal(one: TimeStep, other: TimeStep) -> bool:
    """Returns whether two time steps have equal observations of the same agents."""
    here = one.step_type != StepType.PAD
    if not np.array_equal(one.step_type, other.step_type):
        return False
    pairs = zip(nest.leaves(one.observation), nest.leaves(other.observation))
    return all(torch.equal(*(torch.from_numpy(leaf[here]) for leaf in pair)) for pair in pairs)


def _outside(group: Group, rows: TimeStep) -> list[str]:
    """Returns a sentence if an observation is outside its space."""
    given = specs.ObservationUnits(group.observation_space).to_environment(rows.observation)
    for column, one in enumerate(iterate(batch_space(group.observation_space, group.num_envs), given)):
        if rows.step_type[column] == StepType.PAD:
            continue
        if fault := specs.outside(one, group.observation_space, "observation"):
            agent = group.agents[column % len(group.agents)]
            return [f"an observation of {agent} is outside its space: {fault}"]
    return []
