"""Games of PettingZoo's AEC interface, in which one agent acts at a time."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from alfish.data import StepType
from alfish.environments.games.zoo import ZooGames
from alfish.environments.sequential import check_ends
from alfish.errors import UsageError
from alfish.errors.user_code import calling


class TurnGames(ZooGames):
    """Games of PettingZoo's AEC interface.

    In a step, one agent of each game acts. The step returns the row of the agent that acts next, and the LAST rows of
    agents that have ended. The reward of a row is the sum of the agent's rewards since its last action. Rewards before
    an agent's first turn do not belong to an action, and are left out. An agent whose game ends before its first turn
    has no episode. If `rewards` takes an entry from the info, the info at the agent's turn is used.

    Args:
      games, seed, settings: arguments of `ZooGames`.

    Raises:
      UsageError: as for `ZooGames`, or teams are given and `rewards` takes entries from infos. A step raises it if an
        agent leaves without being terminated or truncated; if an agent that has ended stays in `agents`; if an agent
        appears that is not in `possible_agents`; or if an observation does not match its space or is not finite.
    """

    def __init__(self, games: Sequence[Any], seed: int = 0, **settings: Any):
        super().__init__(games, seed, **settings)
        rewards = settings.get("rewards")
        sources = list(rewards.values()) if isinstance(rewards, Mapping) else []
        if self._teams and any(where.startswith("info:") for where in sources):
            raise UsageError(
                f"make_games.teams is set, and make_games.rewards reads entries of infos, but {self.name} is a "
                "turn-based game, which has infos only at the agent's turn; leave out one of the two settings"
            )
        self.turns = len(self.agents)
        # For each game and agent: the sum of the team's mean rewards since the agent's last action.
        self._of_team: list[dict[str, Any]] = [{} for _ in games]

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        if "games" in state:
            sums = [{agent: np.asarray(value).tolist() for agent, value in each.items()} for each in self._of_team]
            state["of_team"] = sums
        return state

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        continues = super().load_state_dict(state)
        if continues:
            self._of_team = [{agent: np.asarray(value) for agent, value in each.items()} for each in state["of_team"]]
        return continues

    def _begin(self, game: int, seed: int) -> None:
        with calling(f"{self.name}.reset"):
            self.games[game].reset(seed=seed)
        self._of_team[game] = {}
        self._select(game)

    def _advance(self, game: int, actions: Mapping[str, Sequence[Any]]) -> None:
        env, sums = self.games[game], self._of_team[game]
        agent = env.agent_selection
        with calling(f"{self.name}.step"):
            env.step(self._action(game, agent, actions))
        if self._teams:
            sums[agent] = 0.0
            given = {
                each: self._reward(game, each, reward, env.infos.get(each)) for each, reward in env.rewards.items()
            }
            for each, mean in self._teams.means(given).items():
                sums[each] = sums.get(each, 0.0) + np.asarray(mean, np.float64)  # as a checkpoint restores it
        self._select(game)

    def _select(self, game: int) -> None:
        """Stores the row of the agent that acts next, and the LAST rows of agents that have ended."""
        env, seen = self.games[game], None
        while env.agents:
            agent = env.agent_selection
            if agent not in self._place:
                raise UsageError(
                    f"{self.name}: {agent!r} should act in game {game}, but is not in possible_agents, which are "
                    f"{', '.join(self.agents)}; add it to possible_agents"
                )
            if seen is None:
                observations = {}
                if self._leaves.wants_others:
                    with calling(f"{self.name}.observe"):
                        observations = {each: env.observe(each) for each in env.agents if each in self._place}
                seen = self._leaves.seen(env, observations)
            with calling(f"{self.name}.last"):
                observation, reward, terminated, truncated, info = env.last()
            check_ends([terminated], [truncated])
            ends, plays = terminated or truncated, self._plays(game, agent)
            if ends or plays:
                reward = self._reward(game, agent, reward, info)
            if plays and agent in self._teams.team_of:
                info = {**(info or {}), "own_reward": reward}
                reward = self._teams.blend(reward, self._of_team[game].get(agent, 0.0))
            if not ends:
                if plays:
                    self._note(game, agent, StepType.MID, observation, seen, info, reward)
                else:
                    self._note(game, agent, StepType.FIRST, observation, seen, info)
                break
            if plays:
                self._note(game, agent, StepType.LAST, observation, seen, info, reward, terminated)
            with calling(f"{self.name}.step"):
                env.step(None)
            if agent in env.agents:
                raise UsageError(
                    f"{self.name}: {agent} of game {game} has ended, but step(None) has not removed it from `agents`; "
                    "begin step with PettingZoo's _was_dead_step"
                )
        if lost := [agent for agent in self.agents if self._plays(game, agent) and agent not in env.agents]:
            raise UsageError(
                f"{self.name}: {lost[0]} of game {game} is no longer in `agents`, but was neither terminated nor "
                "truncated before; PettingZoo's AEC interface keeps it there until step(None)"
            )
        self.is_over[game] = not env.agents
