"""Builds games from a module, a class or a function: `make_games`."""

import difflib
import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gin
import gymnasium

from alfish.environments import rendering
from alfish.environments.finding import name_of
from alfish.environments.games.games import Games
from alfish.environments.games.leaves import Leaf
from alfish.environments.games.parallel import ParallelGames
from alfish.environments.games.turns import TurnGames
from alfish.environments.wrapping import own
from alfish.errors import UsageError
from alfish.errors.user_code import calling
from alfish.parameters import NonNegativeInt, PositiveInt, UnitInterval, checked, imports
from alfish.parameters.schedules import Schedule

# Packages with games: names of the module and of the package for pip.
PACKAGES = {"mpe2": "mpe2", "pettingzoo": "pettingzoo", "momaland": "momaland", "magent2": "magent2"}
EXTRAS_OF_PETTINGZOO = ("atari", "butterfly", "classic", "sisl")


@gin.configurable(module="alfish.environments")
@checked
def make_games(
    game: str | Callable[..., Any] = gin.REQUIRED,
    num_games: PositiveInt = 1,
    game_kwargs: Mapping[str, Any] | None = None,
    rewards: Sequence[str] | Mapping[str, str] | None = None,
    action_mask: str | None = None,
    leaves: Sequence[Leaf] = (),
    teams: Mapping[str, str | Sequence[str]] | None = None,
    team_spirit: UnitInterval | Schedule = 0.0,
    seed: NonNegativeInt = 0,
    num_envs: PositiveInt | None = None,
    evaluation: bool = False,
    render_mode: str | None = None,
) -> Games:
    """Builds games of several agents that step together, from a game of PettingZoo.

    Args:
      game: name of a module with a function `parallel_env` or `env`, such as 'mpe2.simple_tag_v3'; or a class or
        function that makes a game, or its name (`my_module:MyGame`). The game has PettingZoo's parallel interface, or
        its AEC interface, in which agents act in turns.
      num_games: number of games, G.
      game_kwargs: arguments of the function or class; each game receives a deep copy, except of objects that cannot be
        copied.
      rewards: names of the entries of a vector reward, or the source of each entry, such as {'speed': 'info:speed'} for
        an entry of the agent's info, see `environments.objectives`. None means the game's own reward, a number, or a
        vector if the game has a `reward_space`.
      action_mask: source of an agent's mask of allowed actions: 'observation:LEAF', 'info:KEY', or 'method:NAME' for a
        method that takes the agent's name. None means the leaf `action_mask` if observations are a Dict with exactly
        `observation` and `action_mask`; otherwise no mask.
      leaves: further leaves of each observation. 'state' is the game's `state()`; 'others' are the flattened
        observations of the other agents, with zeros for absent agents; 'agent' is a one-hot vector of the agent in its
        group. An observation that is not a Dict becomes the leaf `observation`.
      teams: patterns of the agents of each team, such as {'chasers': 'adversary_*'}.
      team_spirit: weight of the team's mean reward in an agent's reward, in [0, 1]; a number or a schedule of progress.
        The agent's info then has the agent's own reward as the entry `own_reward`.
      seed: seed of the run, passed by a Trainer. The seed of reset k of game g is derived from (seed, g, k).
      num_envs: number of games, passed by evaluations in place of `num_games`.
      evaluation: flag without effect, passed by a Trainer.
      render_mode: render mode of the game, such as 'rgb_array'; None means no frames.

    Raises:
      UsageError: the game does not exist, a package is missing (the message has the command that installs it), the
        object is not a game, or the game lacks a part that the arguments refer to.
    """
    if render_mode:
        rendering.prepare()
    kwargs = dict(game_kwargs or {}) | ({"render_mode": render_mode} if render_mode else {})
    make = _maker(game) if isinstance(game, str) else game
    name = game if isinstance(game, str) else name_of(game)

    def another() -> Any:
        with calling(f"the constructor of {name}"):
            made = _made(own(make), own(kwargs), name)
        _check_game(made, name)
        return made

    games = [another() for _ in range(num_envs or num_games)]
    settings: dict[str, Any] = {"rewards": rewards, "action_mask": action_mask, "leaves": leaves}
    settings |= {"teams": teams, "team_spirit": team_spirit}
    kind = TurnGames if hasattr(games[0], "agent_iter") else ParallelGames
    made: Games = kind(games, seed, **settings, make=another)
    made.settings = {**settings, "game_kwargs": game_kwargs}
    return made


def _maker(game: str) -> Callable[..., Any]:
    """Returns the function or class that a name refers to."""
    where = "make_games.game"
    module, _, function = game.partition(":")
    package = module.partition(".")[0]
    if package in PACKAGES and importlib.util.find_spec(package) is None:
        raise UsageError(f"{where} is {game!r}, but {package} is not installed: {_install(module)}")
    imports.admit(module, where)
    imports.admit_functions(module, where)
    if package in PACKAGES:
        _check_module(module, game)
    imported = imports.import_named(module, where)
    names = [function] if function else ["parallel_env", "env"]
    for name in names:
        made = getattr(imported, name, None)
        if callable(made):
            return made
    if function:
        raise UsageError(f"{where} is {game!r}, but {module} has no class or function {function}")
    raise UsageError(
        f"{where} is {game!r}, but this module has neither parallel_env nor env; give the class or function that makes "
        f"the game, as '{module}:MyGame'"
    )


def _check_module(module: str, game: str) -> None:
    """Raises UsageError if a package with games lacks a module, or the module lacks a package that it needs."""
    parent, _, name = module.rpartition(".")
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise UsageError(f"make_games.game is {game!r}, which needs {error.name}: {_install(module)}") from error
        folders = getattr(sys.modules.get(parent), "__path__", [])
        close = difflib.get_close_matches(name, [found.name for found in pkgutil.iter_modules(folders)], 1, 0.7)
        hint = f"; write '{parent}.{close[0]}'" if close else ""
        raise UsageError(f"make_games.game is {game!r}, and {parent} has no module {name}{hint}") from error


def _install(module: str) -> str:
    """Returns the command that installs a package with games and the packages that it needs."""
    package, _, rest = module.partition(".")
    extra = rest.partition(".")[0]
    if package == "pettingzoo" and extra in EXTRAS_OF_PETTINGZOO:
        return f"pip install 'pettingzoo[{extra}]'"
    return f"pip install {PACKAGES[package]}"


def _made(make: Callable[..., Any], kwargs: Mapping[str, Any], name: str) -> Any:
    try:
        return make(**kwargs)
    except TypeError as error:
        if "unexpected keyword argument" not in str(error):
            raise
        if "'render_mode'" in str(error):
            raise UsageError(f"{name} cannot be filmed: it takes no render_mode; add that argument") from error
        raise UsageError(f"make_games: {name} does not take game_kwargs={dict(kwargs)}: {error}") from error


def _check_game(game: Any, name: str) -> None:
    """Raises UsageError if an object is not a PettingZoo game."""
    lacking = [method for method in ("reset", "step", "observation_space", "action_space") if not hasattr(game, method)]
    if isinstance(game, (gymnasium.Env, gymnasium.vector.VectorEnv)):
        raise UsageError(
            f"make_games.game: {name} makes a {type(game).__name__}, a gymnasium environment with one agent; use "
            "make_environment"
        )
    if lacking or not callable(game.observation_space):
        raise UsageError(
            f"make_games.game: {name} makes a {type(game).__name__}, which is not a PettingZoo game: it has no "
            f"{' and no '.join(lacking or ['method observation_space'])}"
        )
