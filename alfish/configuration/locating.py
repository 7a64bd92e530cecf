"""Finds and reads gin files in the working directory, beside the including file, and among the shipped confs."""

import difflib
import re
from collections.abc import Sequence
from pathlib import Path

import alfish
from alfish.errors import UsageError
from alfish.runs import contents


def confs_directory() -> Path:
    """Returns the directory of the shipped confs: inside the installed package, or beside the package in a checkout."""
    package = Path(alfish.__file__).parent
    return package / "confs" if (package / "confs").is_dir() else package.parent / "confs"


def find(file: str) -> Path:
    """Returns the path of a gin file that the user named.

    Raises:
      UsageError: the file is neither in the working directory nor among the shipped confs.
    """
    shipped = confs_directory()
    for path in (Path(file), shipped / file, shipped.parent / file):  # the last path finds confs/NAME.gin
        if path.is_file():
            return path
    names = sorted(path.name for path in confs_directory().glob("*.gin"))
    close = difflib.get_close_matches(Path(file).name, names, 3, 0.4)
    hint = f"close ones are {', '.join(close)}" if close else "`alfish confs` lists the shipped ones"
    raise UsageError(f"there is no gin file {file!r} in the working directory or among the shipped confs; {hint}")


def text_of(path: Path) -> str:
    """Returns the text of a gin file.

    Raises:
      UsageError: as for `contents.content`, or the file is not UTF-8.
    """
    return contents.decoded(path, contents.content_of(path, contents.MAX_TEXT))


def find_include(file: str, named: Sequence[Path]) -> Path | None:
    """Returns the path of an included file; None if the file is not found.

    Searches beside the files that the user named, then among the shipped confs, and last in the working directory.

    Args:
      file: file name in the include statement.
      named: files that the user named.
    """
    shipped = confs_directory()
    directories = [*(path.resolve().parent for path in named), shipped, shipped.parent, Path.cwd()]
    return next((path for path in (directory / file for directory in directories) if path.is_file()), None)


def file_of(name: str) -> str:
    """Returns the gin file for a path, the name of a shipped conf, or the name of an algorithm ("PPO").

    Raises:
      UsageError: there is no conf with the given name.
    """
    shipped = {path.stem.replace("_", ""): path.name for path in confs_directory().glob("*.gin")}
    plain = re.sub(r"[^a-z0-9]", "", name.lower())
    if name.endswith(".gin") or plain in shipped:
        return name if name.endswith(".gin") else shipped[plain]
    if Path(f"{name}.gin").is_file():
        return f"{name}.gin"
    close = difflib.get_close_matches(plain, shipped, 3, 0.6)
    hint = f"close ones are {', '.join(shipped[one].removesuffix('.gin') for one in close)}"
    raise UsageError(f"there is no algorithm or conf {name!r}; {hint if close else '`alfish confs` lists them'}")
