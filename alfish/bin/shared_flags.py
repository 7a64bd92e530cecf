"""Help texts, definitions and checks of flags that several commands share."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags

from alfish.errors import UsageError
from alfish.parameters.differences import literal

CHECKPOINT = "latest, best, or a number of environment steps (updates for a run on recorded data)."
ALLOW_IMPORT = (
    "Module or package, such as my_lab, that the run's configuration may import in addition to alfish's modules; "
    "repeatable. Modules in the environment variable ALFISH_ALLOW_IMPORT are allowed too."
)
GIN_PARAM = "Binding in place of that of the run, such as \"make_environment.env_kwargs = {'g': 5.0}\"; repeatable."
MAX_LENGTH = "Number of steps after which an episode is cut; default: Trainer.max_evaluation_length."

NUM_ENVS = "Number of environments that run at the same time."
LARGEST_SEED = 2**63 - 2**32 - 1  # largest seed of episode 0; the seeds of later episodes then fit 63 bits


def define_episodes(flag_values: flags.FlagValues, num_episodes: int, seed: int = 0) -> None:
    """Defines the flags of a command that runs episodes of a saved policy.

    Args:
      flag_values: flags of the command.
      num_episodes: default number of episodes.
      seed: default seed of episode 0.
    """
    flags.DEFINE_string("root_dir", None, "Directory of the run.", flag_values=flag_values)
    flags.DEFINE_string("checkpoint", "latest", CHECKPOINT, flag_values=flag_values)
    flags.DEFINE_integer("num_episodes", num_episodes, "Number of episodes to run.", 1, flag_values=flag_values)
    flags.DEFINE_integer("seed", seed, "Seed of episode 0.", 0, LARGEST_SEED, flag_values=flag_values)
    flags.DEFINE_integer("max_length", None, MAX_LENGTH, 1, flag_values=flag_values)
    words = "Sample actions as in training, instead of taking the mode."
    flags.DEFINE_boolean("sample", False, words, flag_values=flag_values)
    flags.DEFINE_string("device", "cpu", "cpu, cuda or cuda:N.", flag_values=flag_values)
    flags.DEFINE_multi_string("allow_import", [], ALLOW_IMPORT, flag_values=flag_values)
    flags.DEFINE_multi_string("gin_param", [], GIN_PARAM, flag_values=flag_values)


def define_env_kwargs(flag_values: flags.FlagValues) -> None:
    """Defines the flag that `env_kwargs` reads."""
    words = "Arguments of the environment's constructor, such as {'difficulty': 2}."
    flags.DEFINE_string("env_kwargs", None, words, flag_values=flag_values)


def env_kwargs(flag_values: flags.FlagValues) -> dict[str, Any]:
    """Returns the arguments of the environment's constructor; {} without the flag.

    Raises:
      UsageError: the flag is not a dict.
    """
    text = flag_values.env_kwargs
    try:
        value = {} if text is None else literal(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise UsageError(f"--env_kwargs is {text!r}; it must be a dict, such as \"{{'difficulty': 2}}\"")
    return value


def run(flag_values: flags.FlagValues) -> tuple[str, str, list[str], list[str]]:
    """Returns the arguments of `open_run`, from the flags of `define_episodes`."""
    return flag_values.root_dir, flag_values.device, flag_values.allow_import, flag_values.gin_param


def define_code(flag_values: flags.FlagValues) -> None:
    """Defines the flag for the code that the command runs; see `bin.code_of_run`."""
    words = "Code to execute: installed, or (run) the code that CodeSnapshot saved in the run, if you trust it."
    flags.DEFINE_enum("code", "installed", ["installed", "run"], words, flag_values=flag_values)


def define_lineup(flag_values: flags.FlagValues) -> None:
    """Defines the flag for the policies of agents in games."""
    words = "Policies of agents in games, such as 'agent_*=runner' or 'agent_*=random'; default: the run's lineup."
    flags.DEFINE_list("lineup", [], words, flag_values=flag_values)


def lineup(flag_values: flags.FlagValues) -> dict[str, dict[str, str]]:
    """Returns --lineup as an option of `Trainer.evaluator`; {} without the flag.

    Raises:
      UsageError: an entry is malformed.
    """
    pairs = [entry.partition("=") for entry in flag_values.lineup]
    for pattern, sign, name in pairs:
        if not (pattern and sign and name):
            raise UsageError(
                f"--lineup has {pattern + sign + name!r}; an entry is AGENT=POLICY, such as 'agent_*=random'"
            )
    return {"lineup": {pattern: name for pattern, _, name in pairs}} if pairs else {}


def define_captions(flag_values: flags.FlagValues) -> None:
    """Defines the flag for captions in films."""
    words = "Show episode, return, reward, action, and value (unless the algorithm has none) in the film."
    flags.DEFINE_boolean("captions", False, words, flag_values=flag_values)


def define_films(flag_values: flags.FlagValues) -> None:
    """Defines the flags for films in a run's directory."""
    flags.DEFINE_boolean(
        "video", False, "Film the first episodes, into films/ in the run's directory.", flag_values=flag_values
    )
    words = "Number of episodes shown side by side in a film."
    flags.DEFINE_integer("video_episodes", 1, words, 1, flag_values=flag_values)
    define_captions(flag_values)


def num_filmed(flag_values: flags.FlagValues, num_episodes: int) -> int:
    """Prepares rendering and returns the number of episodes to film.

    Raises:
      UsageError: the extra 'video' is missing, or there are fewer episodes than --video_episodes.
    """
    if not flag_values.video:
        return 0
    from alfish.environments import rendering
    from alfish.runs.film_file import check_extra

    check_extra("--video")
    if flag_values.video_episodes > num_episodes:
        raise UsageError(
            f"--video_episodes is {flag_values.video_episodes}, but there are only {num_episodes} episodes"
        )
    rendering.prepare()
    return flag_values.video_episodes


def checkpoint(name: str, flag: str = "checkpoint", names: Sequence[str] = ("latest", "best")) -> str | int:
    """Returns the value of a flag for checkpoints: one of `names`, or a number of steps.

    Raises:
      UsageError: the value is malformed.
    """
    if name in names:
        return name
    if re.fullmatch("[0-9]+(_[0-9]+)*", name):
        return int(name)
    raise UsageError(f"--{flag} is {name!r}; it must be {', '.join(names)}, or a number of steps")


def check_root_dir(root_dir: str | None) -> None:
    """Raises UsageError if --root_dir is missing."""
    if not root_dir:
        raise UsageError("--root_dir is missing: give the directory of a run of `alfish train`")


def check_writable_run(root_dir: str, flag: str) -> None:
    """Raises UsageError if the run is packed; its directory is then a temporary copy.

    Args:
      root_dir: run as the user named it.
      flag: flag or command that writes into the run's directory, for the message.
    """
    from alfish.runs.packed.fetching import is_packed

    if is_packed(root_dir):
        raise UsageError(
            f"{flag} writes into the directory of the run, but {root_dir} is packed; unpack it first with `alfish "
            "unpack`"
        )


def output_file(output: str | None, *suffixes: str) -> Path:
    """Returns the path of --output, after checking that the file can be written.

    Raises:
      UsageError: no path is given, or it has another suffix, is a directory, is in no directory, or cannot be written.
    """
    *others, last = suffixes
    choices = " or ".join(filter(None, (", ".join(others), last)))
    if not output:
        raise UsageError(f"--output is missing: give a file name that ends in {choices}")
    path = Path(output)
    if path.suffix not in suffixes:
        raise UsageError(f"--output={path} must end in {choices}")
    parent = path.parent
    if path.is_dir():
        raise UsageError(f"--output={path} is a directory; give the path of a file in it")
    if not parent.is_dir():
        raise UsageError(f"--output={path} cannot be written: there is no directory {parent}")
    if not os.access(path if path.exists() else parent, os.W_OK):
        raise UsageError(f"--output={path} cannot be written: permission denied")
    return path
