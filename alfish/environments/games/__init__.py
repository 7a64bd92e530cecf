"""Games of several agents, such as those of PettingZoo, as streams of time steps with a column for each agent.

Agents with equal spaces are a `Group`. A row of a column is a row of an agent's own episode, which begins when the
agent appears in its game and ends when it leaves; where it has no row, the column has PAD.
"""

from alfish.environments.games.games import Games, Group, SideBySide
from alfish.environments.games.make import make_games
from alfish.environments.games.parallel import ParallelGames
from alfish.environments.games.turns import TurnGames

__all__ = ["Games", "Group", "ParallelGames", "SideBySide", "TurnGames", "make_games"]
