"""Records configurations that this user has trained on this machine; they may import the modules they name.

An entry is a small file in the user's state directory. Its name is a digest of the exact text of a saved configuration
and of the paths of the modules in the text. A configuration from elsewhere, or one that was changed, therefore has no
entry. A configuration also has no entry if its modules are now found at different paths, for example in a directory
that somebody else prepared.
"""

import contextlib
import hashlib
import importlib.machinery
import importlib.util
import os
import re
import stat
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path

from alfish.errors import UsageError, first_line
from alfish.parameters import gin_internals, imports
from alfish.parameters.description import PART
from alfish.runs import contents
from alfish.runs.files import temporary_of

# Matches text such as 'my_lab.tasks:Reach-v0' and 'my_lab.tasks', which may name modules.
NAMED_IN_TEXT = re.compile(r"""['"]([A-Za-z_][\w.]*:|[A-Za-z_]\w*(?:\.\w+)+['"])""")


def record(text: str) -> None:
    """Records a configuration that this process trains, unless another person may have written it.

    A configuration without modules of the user needs no entry. If the state directory cannot be written, nothing is
    recorded, and opening the run requires the flag --allow_import.
    """
    modules = _modules(text)
    if not modules or not imports.is_own():
        return
    with contextlib.suppress(OSError, RuntimeError):
        path = _entry(text, modules)
        if path.is_file():
            return
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = temporary_of(path)
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "w") as file:
            file.write("".join(f"{module}\n" for module in modules))  # for human readers
        os.replace(temporary, path)


@contextlib.contextmanager
def restricted(config: Path, allow_import: Sequence[str]) -> Iterator[None]:
    """Restricts imports to the modules that the configuration of a saved run may import.

    Args:
      config: file of the saved configuration; if the file is recorded, the modules that it names are allowed.
      allow_import: names of modules, as for `imports.restricted`.
    """
    try:
        text = contents.content_of(config).decode()
    except (UsageError, OSError, UnicodeDecodeError):  # reading the configuration reports the error
        text = ""
    modules = _modules(text)
    with imports.restricted(
        allow_import, modules if modules and _is_recorded(text, modules) else None, _remark() if modules else ""
    ):
        yield


def _modules(text: str) -> list[str]:
    """Returns the modules outside of alfish that a configuration names, sorted."""
    try:
        statements = list(gin_internals.statements(text))
    except (
        SyntaxError,
        ValueError,
        tokenize.TokenError,
        RecursionError,
        gin_internals.GinChanged,
    ):  # reading the configuration reports the error
        return []
    named = {one.module for one in statements if gin_internals.is_import(one) and not one.module.startswith("__gin__")}
    named |= {module for module, _ in PART.findall(text)} | {found[:-1] for found in NAMED_IN_TEXT.findall(text)}
    return sorted(module for module in named if module.partition(".")[0] not in ("alfish", "__main__"))


def _is_recorded(text: str, modules: Sequence[str]) -> bool:
    try:
        found = os.lstat(_entry(text, modules))
    except (OSError, RuntimeError):
        return False
    is_private = found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISREG(found.st_mode) and is_private


def _entry(text: str, modules: Sequence[str]) -> Path:
    """Returns the path of the entry whose name is the digest of a configuration and of its modules' current paths."""
    places = [f"{module} {_place(module.partition('.')[0])}\n" for module in modules]
    digest = hashlib.sha256("\0".join([text, *places]).encode("utf-8", "surrogateescape")).hexdigest()
    return _directory() / digest


def _place(package: str) -> str:
    """Returns the file or directory from which a package would be imported; '' if the package is not found."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):  # ValueError: a module made by the program has no spec
        spec = None
    # The working directory is searched last, see `imports.admit`.
    spec = spec or importlib.machinery.PathFinder.find_spec(package, [os.getcwd()])
    if spec is None:
        return ""
    places = [spec.origin] if spec.origin else sorted(spec.submodule_search_locations or ())
    return os.pathsep.join(map(os.path.realpath, places))


def _directory() -> Path:
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "alfish" / "trusted"


def _remark() -> str:
    """Returns the reason why runs cannot be recorded here; '' if they can."""
    try:
        directory = _directory()
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:
        return f"runs that you train here are not marked as your own: {first_line(error)}"
    if not os.access(directory, os.W_OK | os.X_OK):
        return f"runs that you train here are not marked as your own, because {directory} is not writable"
    return ""
