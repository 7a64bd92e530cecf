"""Teams: the reward of an agent is blended with the mean reward of its team."""

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from alfish.errors import UsageError
from alfish.parameters.measured import schedule_of_progress
from alfish.parameters.schedules import Schedule


class Teams:
    """Blends the reward of an agent with the mean reward of its team.

        reward = (1 - spirit) own + spirit * mean of the team

    The mean is taken over the agents of the team that received a reward in the step. An agent without a team keeps its
    own reward.

    Args:
      teams: patterns of the agents of each team, by its name: 'adversary_*', or a list of patterns.
      spirit: weight of the team's mean, in [0, 1]; a number or a schedule of progress.
      agents: names of all agents.

    Raises:
      UsageError: a pattern matches no agent, an agent is in two teams, or `spirit` is set without teams.
    """

    def __init__(self, teams: Mapping[str, str | Sequence[str]], spirit: float | Schedule, agents: Sequence[str]):
        self.team_of: dict[str, str] = {}
        for team, patterns in teams.items():
            for pattern in [patterns] if isinstance(patterns, str) else patterns:
                found = [agent for agent in agents if fnmatchcase(agent, pattern)]
                if not found:
                    raise UsageError(
                        f"make_games.teams[{team!r}] has {pattern!r}, which matches no agent; the agents are "
                        f"{', '.join(agents)}"
                    )
                for agent in found:
                    other = self.team_of.setdefault(agent, team)
                    if other != team:
                        raise UsageError(
                            f"make_games.teams has {agent} in {other!r} and in {team!r}; an agent can be in one team "
                            "only"
                        )
        if not teams and (callable(spirit) or spirit):
            raise UsageError("make_games.team_spirit is set, but make_games.teams is not; list the agents of each team")
        self.follows_progress = callable(spirit)
        self._spirit: Callable[[Any], Any] = schedule_of_progress(spirit, "make_games.team_spirit")
        self.set_progress(0.0)

    def __bool__(self) -> bool:
        return bool(self.team_of)

    def set_progress(self, progress: float) -> None:
        self._share = float(self._spirit(progress))

    def means(self, rewards: Mapping[str, Any]) -> dict[str, Any]:
        """Returns, for each agent with a team, the mean reward of its team.

        Args:
          rewards: rewards of the agents that received a reward in a step.
        """
        of_team: dict[str, list[Any]] = {}
        for agent, reward in rewards.items():
            if agent in self.team_of:
                of_team.setdefault(self.team_of[agent], []).append(reward)
        means = {team: np.mean(each, 0) for team, each in of_team.items()}
        return {agent: means[team] for agent, team in self.team_of.items() if team in means}

    def blend(self, own: Any, mean: Any) -> Any:
        """Returns the reward of an agent from its own reward and the mean of its team."""
        return (1 - self._share) * own + self._share * mean
