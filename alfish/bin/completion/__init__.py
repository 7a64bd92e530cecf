"""Prints a script that completes subcommands, flags, shipped confs and gin parameters.

  alfish completion bash > ~/.local/share/bash-completion/completions/alfish
  alfish completion zsh > ~/.zfunc/_alfish      # with `fpath+=~/.zfunc` before `compinit` in ~/.zshrc

In a running shell: source <(alfish completion bash). The script contains all names, so completion is fast. Print it
again after an update of alfish.
"""

import importlib
import shlex
from collections.abc import Iterable
from pathlib import Path

from absl import flags

from alfish.bin import SUBCOMMANDS, module_of, show
from alfish.errors import UsageError

FLAGS = flags.FlagValues()
TAKES_WORDS = True

SHELLS = ("bash", "zsh")


def main(flag_values: flags.FlagValues, *words: str) -> int:
    if len(words) != 1 or words[0] not in SHELLS:
        raise UsageError("give the name of a shell: `alfish completion bash` or `alfish completion zsh`")
    (shell,) = words
    lists = [f"{name}={shlex.quote(' '.join(value))}\n" for name, value in _lists()]
    script = Path(__file__).with_name(f"alfish.{shell}").read_text()
    show("".join(["#compdef alfish\n" * (shell == "zsh"), *lists, script]).rstrip())
    return 0


def _lists() -> Iterable[tuple[str, Iterable[str]]]:
    """Yields each variable of the script: its name and its words."""
    from alfish.configuration import catalogue
    from alfish.configuration.locating import confs_directory

    yield "_alfish_commands", SUBCOMMANDS
    yield "_alfish_confs", sorted(path.name for path in confs_directory().glob("*.gin"))
    yield "_alfish_params", dict.fromkeys(entry.name for entry in catalogue.entries())
    for name in SUBCOMMANDS:
        own = importlib.import_module(module_of(name)).FLAGS
        yield f"_alfish_flags_{name.replace('-', '_')}", (_written(own[flag]) for flag in sorted(own))


def _written(flag: flags.Flag) -> str:
    return f"--{flag.name}" + "=" * (not flag.boolean)
