"""Games of several agents, such as PettingZoo's, as streams of time steps with a column for each agent.

Agents with equal spaces form a `Group`. A column has the rows of one agent in one game. An episode begins when the
agent appears in the game, and ends when the agent leaves. In steps without a row of the agent, the column has PAD rows.
"""

from alfish.environments.games.games import Games, Group, SideBySide
from alfish.environments.games.make import make_games
from alfish.environments.games.parallel import ParallelGames
from alfish.environments.games.turns import TurnGames

__all__ = ["Games", "Group", "ParallelGames", "SideBySide", "TurnGames", "make_games"]
