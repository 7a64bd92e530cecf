"""Sources of episodes: one module for each format, named by a scheme, as in `minari:mujoco/hopper/expert-v0`."""

import contextlib
import difflib
import importlib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from alfish import specs
from alfish.errors import RunError, UsageError, printable
from alfish.offline.episode import Episode, EpisodeSource, Unreadable
from alfish.offline.recorded_spaces import NO_SPACES, Spaces
from alfish.offline.sources.recognition import PAGE, foreign_file, foreign_scheme
from alfish.offline.sources.source_files import said


class Scheme(NamedTuple):
    module: str  # module in this folder
    source: str  # name of the class; its arguments are the text after the colon and the environment's spaces
    example: str  # name of a source, as an example in messages
    options: tuple[str, ...] = ()  # names of its options, see `open_source`


DONES = ("terminated", "truncated")
SCHEMES = {
    "alfish": Scheme("own", "OwnSource", "alfish:data/hopper"),
    "minari": Scheme("minari", "MinariSource", "minari:mujoco/hopper/expert-v0", ("leave_out",)),
    "d4rl": Scheme("d4rl", "D4RLSource", "d4rl:hopper_medium-v2.hdf5"),
    "npz": Scheme("npz", "NpzSource", "npz:mine.npz"),
    "sb3": Scheme("sb3", "SB3Source", "sb3:replay_buffer.pkl", ("dones",)),
    "d3rlpy": Scheme("d3rlpy", "D3rlpySource", "d3rlpy:dataset.h5"),
    "lerobot": Scheme("lerobot", "LeRobotSource", "lerobot:pusht", ("dones",)),
    "ogbench": Scheme("ogbench", "OGBenchSource", "ogbench:antmaze-large-navigate-v0.npz"),
    "alf": Scheme("alf", "ALFSource", "alf:train/algorithm/ckpt-1000-replay_buffer"),
    "run": Scheme("run", "RunSource", "run:runs/sac"),
}
SCHEME_OF_SUFFIX = {".npz": "npz", ".pkl": "sb3", ".hdf5": "d4rl", ".h5": "d3rlpy"}

MAX_NAME, MAX_SENTENCE = 500, 2000  # maximum numbers of characters in messages; a file's names may be longer


def open_source(name: str, environment: Spaces = NO_SPACES) -> EpisodeSource:
    """Opens the source that `scheme:where` names, and reads its spaces.

    Formats with incomplete records have options, such as `sb3:FILE?dones=terminated`:

        dones      meaning of a flag 'done': 'terminated' or 'truncated'
        leave_out  comma-separated keys of dict observations that are not read

    Args:
      name: name of the source: a scheme, a colon, and a path or the name of a data set; optionally `?` and options
        separated by `&`.
      environment: spaces of the environment; formats that store actions in an algorithm's units need them.

    Raises:
      UsageError: the scheme, option or file does not exist (the message names similar schemes), an extra is missing, or
        the file is not in the scheme's format.
    """
    scheme, colon, where = name.partition(":")
    if not colon or scheme not in SCHEMES:
        raise UsageError(_unknown(name, scheme if colon else ""))
    where, options = _options(where, scheme)
    if not where:
        raise UsageError(f"{name!r} is a scheme without a path; an example is {SCHEMES[scheme].example}")
    module = importlib.import_module(f"alfish.offline.sources.{SCHEMES[scheme].module}")
    return _Opened(f"{scheme}:{where}", lambda: getattr(module, SCHEMES[scheme].source)(where, environment, **options))


def _options(where: str, scheme: str) -> tuple[str, dict[str, str]]:
    """Splits the text after a scheme into the path or name of the data, and options.

    Raises:
      UsageError: an option does not exist for this scheme, or the value of `dones` is not allowed.
    """
    found = re.fullmatch(r"(.*?)\?(\w+=[^?/]*)", where, re.DOTALL)
    if not found or os.path.exists(os.path.expanduser(where)):  # a path may contain a question mark
        return where, {}
    options = dict(part.partition("=")[::2] for part in found[2].split("&"))
    known = SCHEMES[scheme].options
    for option, value in options.items():
        if option not in known:
            takes = " and ".join(known) or "no option"
            raise UsageError(f"{scheme}:{where} has the option {option!r}, but {scheme}: supports {takes}")
        if option == "dones" and value not in DONES:
            raise UsageError(f"{scheme}:{where} has dones={value}; it must be {' or '.join(DONES)}")
    return found[1], options


class _Opened(EpisodeSource):
    """A source whose errors are converted to sentences that name the file.

    Args:
      name: name of the source, as the user gave it.
      opened: function that constructs the source.

    Raises:
      UsageError: the source cannot be opened or, later, read; the original error is its cause.
    """

    def __init__(self, name: str, opened: Callable[[], EpisodeSource]):
        with _faults_named(name):
            self._source = opened()
            for space, kind in zip(self._source.spaces, ("observation", "action")):
                if space is not None:
                    specs.check_learnable(space, kind)
        super().__init__(self._source.name, self._source.spaces)
        self.notes, self.warnings = self._source.notes, self._source.warnings

    def episodes(self) -> Iterator[Episode | Unreadable]:
        with _faults_named(self.name):
            yield from self._source.episodes()


@contextlib.contextmanager
def _faults_named(name: str) -> Iterator[None]:
    """Converts errors of a source to a UsageError that names the source."""
    where = name.partition(":")[2]
    shown = printable(name)[:MAX_NAME]
    try:
        yield
    except RunError:
        raise
    except UsageError as error:
        words = printable(str(error))
        is_named = any(printable(one) in words for one in (where, str(Path(where).expanduser())))
        if is_named and words == str(error) and len(words) <= MAX_SENTENCE:
            raise
        words = words if len(words) <= MAX_SENTENCE else f"{words[:MAX_SENTENCE]}..."
        raise UsageError(words if is_named else f"{shown}: {words}") from error
    except MemoryError as error:
        raise UsageError(f"{shown} does not fit in memory; free memory, or split the data") from error
    except Exception as error:
        words = f"{type(error).__name__}: {said(error)}"
        raise UsageError(
            f"{shown} is damaged, or is not in the format of its scheme ({words}); write it again, or download it again"
        ) from error


def _unknown(name: str, scheme: str) -> str:
    path = Path(name)
    if (foreign := foreign_scheme(scheme) if scheme else foreign_file(name)) is not None:
        return f"{name!r}: {foreign}"
    if not scheme and path.suffix in SCHEME_OF_SUFFIX:
        return f"{name!r} has no scheme; if its suffix is right, write {SCHEME_OF_SUFFIX[path.suffix]}:{name}"
    if not scheme and (path / "data_set.json").is_file():
        return f"{name!r} has no scheme; write alfish:{name}"
    close = difflib.get_close_matches(scheme or name, SCHEMES, 3, 0.5)
    hint = f"; did you mean {' or '.join(f'{one}:' for one in close)}?" if close else ""
    what = f"there is no scheme {scheme!r}" if scheme else f"{name!r} has no scheme"
    examples = ", ".join(scheme.example for scheme in SCHEMES.values())
    return f"{what}{hint or ';'} a source is one of {examples}; {PAGE} shows how to read other data"
