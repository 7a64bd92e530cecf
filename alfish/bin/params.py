"""Lists parameters that gin can bind: default, kind, and a line of help.

  alfish params                                  # all of them
  alfish params gamma                            # parameters with this word in their name
  alfish params 'PPO.*'                          # parameters that match a pattern
  alfish params --gin_file=ppo_cartpole.gin      # parameters that this conf reaches, with their values
  alfish params --gin_file=ppo_cartpole.gin learner

Several words must all be in the name. With --gin_file, the command builds the configuration as `alfish train` does, but
trains and writes nothing. If a value differs from its parameter's default, the default follows as `(default ...)`.
"""

import contextlib
import fnmatch
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from absl import flags

from alfish.bin import show
from alfish.errors import UsageError

if TYPE_CHECKING:
    from alfish.configuration.catalogue import Setting

FLAGS = flags.FlagValues()
TAKES_WORDS = True
flags.DEFINE_multi_string("gin_file", [], "Gin file; repeatable, later files override earlier ones.", flag_values=FLAGS)
flags.DEFINE_multi_string(
    "gin_param", [], "One binding, such as 'PPO.gamma=0.98'; repeatable, overrides files.", flag_values=FLAGS
)


def main(flag_values: flags.FlagValues, *words: str) -> int:
    from alfish.configuration import catalogue

    if flag_values.gin_file or flag_values.gin_param:
        operative = _operative_text(flag_values.gin_file, flag_values.gin_param)
        listed = [(binding, entry) for binding, entry in catalogue.in_force(operative) if _has(binding, words)]
        lines = [_in_force(binding, entry) for binding, entry in listed]
    else:
        lines = [_by_default(entry) for entry in catalogue.entries() if _has(entry.name, words)]
    if not lines:
        raise UsageError(f"no parameter has {' and '.join(words)} in its name; `alfish params` lists all parameters")
    show("\n".join(lines))
    return 0


def _operative_text(files: list[str], bindings: list[str]) -> str:
    """Builds a Trainer, discards it, and returns its configuration with all defaults."""
    from alfish.configuration import reading
    from alfish.configuration.runs import configured_run

    with tempfile.TemporaryDirectory() as directory:
        run = configured_run(Path(directory) / "run", files, bindings, makes_directory=False)
        with run as trainer, contextlib.closing(trainer):
            return reading.operative_text()


def _has(name: str, words: tuple[str, ...]) -> bool:
    """Returns whether the name of a binding contains or matches each of the words."""
    name = name.partition(" = ")[0].lower()
    return all(fnmatch.fnmatch(name, one.lower() if set("*?[") & set(one) else f"*{one.lower()}*") for one in words)


def _by_default(entry: "Setting") -> str:
    value = "must be bound" if entry.default is None else f"= {entry.default}"
    return f"{entry.name} {value}  ({entry.kind})" + _help(entry)


def _in_force(binding: str, entry: "Setting | None") -> str:
    if entry is None:
        return binding
    value = binding.partition(" = ")[2]
    is_default = entry.default is None or value == entry.default
    return f"{binding}  ({'' if is_default else f'default {entry.default}; '}{entry.kind})" + _help(entry)


def _help(entry: "Setting") -> str:
    return f"\n    {entry.help}" if entry.help else ""
