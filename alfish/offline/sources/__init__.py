"""Where episodes come from: a file for each format, named by a scheme, as in `minari:mujoco/hopper/expert-v0`."""

import difflib
import importlib
from pathlib import Path
from typing import NamedTuple

from alfish.errors import UsageError
from alfish.offline.episode import EpisodeSource
from alfish.offline.spaces import NO_SPACES, Spaces


class Scheme(NamedTuple):
    module: str  # in this folder
    source: str  # the class, constructed with what follows the colon and the environment's spaces
    example: str


SCHEMES = {
    "alfish": Scheme("own", "OwnSource", "alfish:data/hopper"),
    "minari": Scheme("minari", "MinariSource", "minari:mujoco/hopper/expert-v0"),
    "d4rl": Scheme("d4rl", "D4RLSource", "d4rl:hopper_medium-v2.hdf5"),
    "npz": Scheme("npz", "NpzSource", "npz:mine.npz"),
    "sb3": Scheme("sb3", "SB3Source", "sb3:replay_buffer.pkl"),
    "d3rlpy": Scheme("d3rlpy", "D3rlpySource", "d3rlpy:dataset.h5"),
    "lerobot": Scheme("lerobot", "LeRobotSource", "lerobot:pusht"),
    "alf": Scheme("alf", "ALFSource", "alf:train/algorithm/ckpt-1000-replay_buffer"),
    "run": Scheme("run", "RunSource", "run:runs/sac"),
}
SCHEME_OF_SUFFIX = {".npz": "npz", ".pkl": "sb3", ".hdf5": "d4rl", ".h5": "d3rlpy"}


def open_source(name: str, environment: Spaces = NO_SPACES) -> EpisodeSource:
    """The source that `scheme:where` names, opened far enough to know its spaces.

    Args:
      name: a scheme, a colon, and a path or the data set's name.
      environment: its spaces, which formats in an algorithm's units cannot be read without.

    Raises:
      UsageError: there is no such scheme (with close matches) or file, an extra is missing, or it is another format.
    """
    scheme, colon, where = name.partition(":")
    if not colon or scheme not in SCHEMES:
        raise UsageError(_unknown(name, scheme if colon else ""))
    if not where:
        raise UsageError(f"{name!r} says no more than the scheme; an example is {SCHEMES[scheme].example}")
    module = importlib.import_module(f"alfish.offline.sources.{SCHEMES[scheme].module}")
    return getattr(module, SCHEMES[scheme].source)(where, environment)


def _unknown(name: str, scheme: str) -> str:
    path = Path(name)
    if not scheme and path.suffix in SCHEME_OF_SUFFIX:
        return f"{name!r} has no scheme; if it is what its name says, write {SCHEME_OF_SUFFIX[path.suffix]}:{name}"
    if not scheme and (path / "data_set.json").is_file():
        return f"{name!r} has no scheme; write alfish:{name}"
    close = difflib.get_close_matches(scheme or name, SCHEMES, 3, 0.5)
    hint = f"; did you mean {' or '.join(f'{one}:' for one in close)}?" if close else ""
    what = f"there is no scheme {scheme!r}" if scheme else f"{name!r} has no scheme"
    return f"{what}{hint or ';'} a source is one of {', '.join(scheme.example for scheme in SCHEMES.values())}"
