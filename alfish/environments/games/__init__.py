"""Games of several agents, such as those of PettingZoo, as streams of time steps with a column for each agent.

Agents with equal spaces form a `Group`. A column has the rows of one agent's episodes. An episode begins when the agent
appears in its game and ends when the agent leaves; in steps without a row, the column has PAD.
"""

from alfish.environments.games.games import Games, Group, SideBySide
from alfish.environments.games.make import make_games
from alfish.environments.games.parallel import ParallelGames
from alfish.environments.games.turns import TurnGames

__all__ = ["Games", "Group", "ParallelGames", "SideBySide", "TurnGames", "make_games"]
