"""Games of PettingZoo's parallel interface, in which all present agents act in each step."""

from collections.abc import Mapping, Sequence
from typing import Any

from alfish.data import StepType
from alfish.environments.games.zoo import ZooGames
from alfish.environments.sequential import check_ends
from alfish.errors import UsageError
from alfish.errors.user_code import calling


class ParallelGames(ZooGames):
    """Games of PettingZoo's parallel interface.

    The episode of an agent begins when it appears in `agents`, after `reset` or during the game, and ends when it is
    terminated, truncated, or no longer in `agents`. The agent may appear again later in the same game.

    Args:
      games, seed, rewards, action_mask, leaves, teams, team_spirit: as for `ZooGames`.

    Raises:
      UsageError: as for `ZooGames`. A step raises it if a game returns no observation, reward, termination or
        truncation for an agent that acted; if an agent that has ended stays in `agents`; if an agent appears that is
        not in `possible_agents`; or if an observation does not match its space or is not finite.
    """

    def _begin(self, game: int, seed: int) -> None:
        env = self.games[game]
        with calling(f"{self.name}.reset"):
            results = env.reset(seed=seed)
        observations, infos = self._dicts(results, "reset", ("observations", "infos"))
        self._check_arrivals(game, env.agents, observations)
        seen = self._leaves.seen(env, {agent: observations[agent] for agent in env.agents})
        for agent in env.agents:
            self._note(game, agent, StepType.FIRST, observations[agent], seen, infos.get(agent))

    def _advance(self, game: int, actions: Mapping[str, Sequence[Any]]) -> None:
        env = self.games[game]
        present = [agent for agent in self.agents if self._plays(game, agent)]
        with calling(f"{self.name}.step"):
            results = env.step({agent: self._action(game, agent, actions) for agent in present})
        names = ("observations", "rewards", "terminations", "truncations", "infos")
        observations, given, terminated, truncated, infos = self._dicts(results, "step", names)
        for result, by_agent in zip(names[:4], (observations, given, terminated, truncated)):
            if lacking := [agent for agent in present if agent not in by_agent]:
                raise UsageError(
                    f"{self.name}: step returned no {result} of {lacking[0]} in game {game}, although this agent has "
                    "acted; PettingZoo's parallel interface requires one for each agent that acted"
                )
        check_ends([terminated[agent] for agent in present], [truncated[agent] for agent in present])
        ended = {agent for agent in present if terminated[agent] or truncated[agent]}
        remaining = list(env.agents)  # `agents` is read once, because each wrapper slows down the access
        goes_on = not ended.issuperset(remaining)
        if goes_on and (staying := sorted(ended.intersection(remaining))):
            raise UsageError(
                f"{self.name}: {staying[0]} of game {game} is terminated or truncated, but still in `agents`; "
                "PettingZoo's parallel interface removes an agent when it has ended"
            )
        rewards = {agent: self._reward(game, agent, given[agent], infos.get(agent)) for agent in present}
        means = self._teams.means(rewards)
        arriving = [agent for agent in remaining if agent not in present] if goes_on else []
        self._check_arrivals(game, arriving, observations)
        seen = self._leaves.seen(env, {agent: observations[agent] for agent in (*present, *arriving)})
        for agent in present:
            reward, info = rewards[agent], infos.get(agent)
            if agent in means:
                info = {**(info or {}), "own_reward": reward}
                reward = self._teams.blend(reward, means[agent])
            leaves = agent in ended or agent not in remaining
            kind = StepType.LAST if leaves else StepType.MID
            self._note(game, agent, kind, observations[agent], seen, info, reward, terminated[agent])
        for agent in arriving:
            self._note(game, agent, StepType.FIRST, observations[agent], seen, infos.get(agent))
        self.is_over[game] = not goes_on

    def _check_arrivals(self, game: int, agents: Sequence[str], observations: Mapping[str, Any]) -> None:
        """Raises UsageError if a new agent is unknown, or has no observation."""
        for agent in agents:
            if agent not in self._place:
                raise UsageError(
                    f"{self.name}: {agent!r} is in `agents` of game {game}, but not in possible_agents, which are "
                    f"{', '.join(self.agents)}; add it to possible_agents"
                )
            if agent not in observations:
                raise UsageError(
                    f"{self.name}: {agent} is in `agents` of game {game}, but has no observation; reset and step must "
                    "return one for each agent in `agents`"
                )

    def _dicts(self, results: Any, method: str, names: Sequence[str]) -> Sequence[Mapping[str, Any]]:
        """Returns the results of a method of a game, which are dicts by agent."""
        are_dicts = isinstance(results, tuple) and all(isinstance(result, Mapping) for result in results)
        if not are_dicts or len(results) != len(names):
            raise UsageError(
                f"{self.name}.{method} did not return {len(names)} dicts; PettingZoo's parallel interface returns "
                f"({', '.join(names)}), each a dict by agent name"
            )
        return results
