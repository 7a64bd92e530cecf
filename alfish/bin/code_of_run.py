"""Runs a command with the code that a run has saved, in a process of its own."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from alfish.bin import shared_flags
from alfish.parameters import imports
from alfish.runs import code, contents
from alfish.runs.checkpoints import CODE_FILE
from alfish.runs.packed.fetching import as_directory

_PROGRAM = """
import sys; sys.path[:] = [{!r}, *filter(None, sys.path)]
from alfish.__main__ import main; sys.exit(main())
"""


def call(command: str, arguments: Sequence[str], root_dir: str | None) -> int:
    """Runs `alfish COMMAND` with the code of a run; returns the exit status.

    The process may import every module of the archive, because --code=run means that the archive is trusted.

    Args:
      command: name of the subcommand.
      arguments: arguments of the subcommand, including --code=run.
      root_dir: directory of the run, or a packed run.

    Raises:
      UsageError: the run has no code, or its archive is refused; see `code.extract`.
    """
    shared_flags.check_root_dir(root_dir)
    with tempfile.TemporaryDirectory(prefix="alfish-code-") as place:
        with as_directory(str(root_dir)) as directory:
            contents.check_inside(Path(directory), CODE_FILE)
            modules = code.extract(Path(directory) / CODE_FILE, Path(place))
        allowed = filter(None, [os.environ.get(imports.VARIABLE), *modules])
        environment = os.environ | {imports.VARIABLE: ",".join(allowed)}
        words = [command, *arguments, "--code=installed"]
        return subprocess.run([sys.executable, "-c", _PROGRAM.format(place), *words], env=environment).returncode
