"""Ids of other packages: the modules that register them, and corrections of unknown ids."""

import contextlib
import difflib
import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from alfish.errors import UsageError


class Suite(NamedTuple):
    """A package that registers environments.

    Attributes:
      ids: regular expression for the beginning of the suite's ids.
      module: name of the module that registers the environments.
      package: name of the package that pip installs.
      engine: requirement of pip that excludes engines too new for the package, such as 'mujoco<4'; '' if not needed.
    """

    ids: str
    module: str
    package: str
    engine: str = ""

    @property
    def install(self) -> str:
        """The command that installs the package."""
        return f"pip install {self.package}" + f" '{self.engine}'" * bool(self.engine)


SUITES = (
    Suite("(MiniGrid|BabyAI)-", "minigrid", "minigrid"),
    Suite(
        "(Fetch|HandReach|HandManipulate|AntMaze_|PointMaze_|AdroitHand|FrankaKitchen)",
        "gymnasium_robotics",
        "gymnasium-robotics",
        engine="mujoco<3.12",  # for gymnasium-robotics 1.4.2, whose robots raise AssertionErrors with newer engines
    ),
    Suite(
        "(highway|merge|roundabout|parking|intersection|racetrack|two-way|u-turn|exit|lane-keeping)-",
        "highway_env",
        "highway-env",
    ),
    Suite("MiniHack-", "minihack", "minihack"),
    Suite("NetHack", "nle", "nle"),
    Suite("MiniWorld-", "miniworld", "miniworld"),
    Suite("Vizdoom", "vizdoom.gymnasium_wrapper", "vizdoom"),
    Suite("FlappyBird", "flappy_bird_gymnasium", "flappy-bird-gymnasium"),
    Suite("PyFlyt/", "PyFlyt.gym_envs", "PyFlyt"),
    Suite("Meta-World/", "metaworld", "metaworld"),
    Suite("dm_control/", "shimmy", "'shimmy[dm-control]'", engine="mujoco<4"),  # for dm_control 1.0.50
    Suite("bsuite/", "shimmy", "'shimmy[bsuite]'"),
    Suite("Panda(Reach|Push|Slide|PickAndPlace|Stack|Flip)", "panda_gym", "panda-gym"),
    Suite(r"\w+Bullet(Env)?-", "pybullet_envs_gymnasium", "pybullet-envs-gymnasium"),
    Suite("tetris_gymnasium/", "tetris_gymnasium.envs", "tetris-gymnasium"),
    Suite("(stocks|forex)-", "gym_anytrading", "gym-anytrading"),
    Suite("gym_pusht/", "gym_pusht", "gym-pusht"),
    Suite("gym_aloha/", "gym_aloha", "gym-aloha"),
    Suite("gym_xarm/", "gym_xarm", "gym-xarm"),
    Suite("miniwob/", "miniwob", "miniwob"),
    Suite("popgym-", "popgym", "popgym"),
    Suite("Eplus-", "sinergym", "sinergym"),
    Suite("myo[A-Z]", "myosuite", "myosuite"),
    Suite(
        "(mo-|deep-sea-treasure|resource-gathering|four-room|minecart|fruit-tree|water-reservoir|breakable-bottles|fishwood)",
        "mo_gymnasium",
        "'alfish[mo]'",
    ),
    Suite("gymnasium_2048/", "gymnasium_2048", "gymnasium-2048"),
    Suite("MemoryMaze-", "memory_maze", "memory-maze"),
    Suite("Crafter", "crafter", "crafter"),
    Suite(r"\w+-(MinAtar|bsuite)$", "gymnax", "'alfish[gymnax]'"),
)
# Adapters of packages whose interface is not gymnasium's; the first argument is the name of a task.
ADAPTERS = {
    "gymnax": "alfish.simulators.gymnax_environment:GymnaxEnvironment",
    "brax": "alfish.simulators.brax_environment:BraxEnvironment",
    "mujoco_playground": "alfish.simulators.brax_environment:PlaygroundEnvironment",
}
# Ids of games in the old gym; gymnasium's ids keep only the name of the game.
OLD_ATARI = re.compile(
    r"([A-Z]\w+?)(?:NoFrameskip-v[04]|Deterministic-v[04])|"
    r"(Pong|Breakout|SpaceInvaders|Seaquest|Qbert|BeamRider|Enduro|MsPacman|MontezumaRevenge|Freeway)-v[0-5]",
)
PROCGEN = re.compile("procgen[-_/:]", re.IGNORECASE)


def check_installed(module: str, written: str) -> None:
    """Raises UsageError if an id names the module of a known package that is not installed.

    Args:
      module: name of the module that registers the environment.
      written: id that the user wrote.
    """
    for suite in SUITES:
        if suite.module == module and not _is_installed(module):
            raise UsageError(f"{written} needs {_package(module)}: {suite.install}")


def cure(env_id: str, registered: Iterable[str]) -> str:
    """Returns the end of a sentence with the correction of an unknown id.

    Args:
      env_id: id of the environment, without a module.
      registered: ids that gymnasium has registered.
    """
    for suite in SUITES:
        if re.match(suite.ids, env_id):
            install = "" if _is_installed(suite.module) else f" ({suite.install})"
            return f"; write '{suite.module}:{env_id}'{install}"
    if game := OLD_ATARI.fullmatch(env_id):
        return f"; this game is now 'ALE/{game[1] or game[2]}-v5'"
    if PROCGEN.match(env_id):
        return "; procgen supports only the old gym, but EnvPool has its games: https://envpool.readthedocs.io"
    if named := re.fullmatch(r"([A-Za-z_][\w.]*)\.([A-Za-z_]\w*)", env_id):
        return f"; write a class or function of a module as '{named[1]}:{named[2]}'"
    namespace, _, name = env_id.rpartition("/")
    if re.fullmatch(r"\w+", namespace) and name and _is_installed(namespace):
        return f"; write '{namespace}:{env_id}'"
    return f"{close_ids(env_id, registered)}; if your module registers it, write 'my_module:{env_id}'"


def other_interface(made: Any) -> str:
    """Returns the end of a sentence about an id or object of the old gym, or a game of PettingZoo; '' for any other.

    Args:
      made: id without a module, after the import of its module, or an environment.
    """
    if hasattr(made, "possible_agents"):
        return "; it is a game of several agents: give it to make_games (docs/several_policies.md)"
    gym = sys.modules.get("gym")  # None if gym is not imported
    if isinstance(made, str):
        registry = getattr(getattr(gym, "envs", None), "registry", {})
        is_old = made in getattr(registry, "env_specs", registry)
    else:
        is_old = gym is not None and isinstance(made, gym.Env)
    what = "an environment of the old gym, whose reset and step return other values; wrap it in a gymnasium.Env"
    return f"; it is {what} (docs/environments.md, Environments of the old gym)" if is_old else ""


def conflict(env_id: str | Callable[..., Any]) -> str:
    """Returns the end of a sentence with the remedy if an engine is too new for the package of an id; else ''.

    Args:
      env_id: id, with its module, of an environment that raised an error.
    """
    module, _, name = env_id.rpartition(":") if isinstance(env_id, str) else ("", "", "")
    for suite in SUITES:
        if suite.engine and suite.module == module and re.match(suite.ids, name):
            engine, _, limit = suite.engine.partition("<")
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                installed = importlib.metadata.version(engine)
                if _numbers(installed) >= _numbers(limit):
                    return f"; {engine} {installed} is too new for {suite.package}: pip install '{suite.engine}'"
    return ""


def close_ids(env_id: str, registered: Iterable[str]) -> str:
    """Returns '; close ones are ...' with ids that differ by a few letters or by the version; '' without such ids."""
    by_name: dict[str, list[str]] = {}
    for known in sorted(registered, reverse=True):  # newest versions first
        by_name.setdefault(_name(known), []).append(known)
    close = difflib.get_close_matches(_name(env_id), by_name, 2, 0.8)
    ids = [known for name in close for known in by_name[name][:2]]
    return f"; close ones are {', '.join(ids)}" if ids else ""


def _name(env_id: str) -> str:
    """Returns an id in lower case, without the version."""
    return re.sub(r"-v\d+$", "", env_id).lower()


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(_package(module)) is not None


def _package(module: str) -> str:
    """Returns the name of the package that contains a module."""
    return module.partition(".")[0]
