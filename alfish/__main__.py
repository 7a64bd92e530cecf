"""The `alfish` command: `alfish SUBCOMMAND --flags`."""

import contextlib
import difflib
import errno
import importlib
import math
import os
import re
import sys
import traceback
from collections.abc import Sequence

from alfish.bin import SUBCOMMANDS, end_output, module_of, prepare_process, show
from alfish.errors import RepeatedError, RunError, UsageError, first_line, phrased_for_command, printable
from alfish.errors.user_code import CodeError, calling, in_words
from alfish.processes import replicas


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a subcommand, and returns its exit status: 2 for a mistake of the user, 1 for a run that failed.

    Args:
      arguments: command-line arguments without the name of the program. None means the arguments of the process, whose
        standard streams and working directory are then checked first.
    """
    if arguments is not None:
        with phrased_for_command():
            return _command(list(arguments))
    try:
        prepare_process()
        with phrased_for_command():
            status = _command(sys.argv[1:])
        sys.stdout.flush()
        if "omni.kit.app" in sys.modules:
            # When Python closes Isaac Sim at exit, Isaac Sim ends the process with status 0, or hangs.
            sys.stderr.flush()
            os._exit(status)
        return status
    except BrokenPipeError:
        end_output()
        return 1
    except RunError as error:
        print(f"alfish: {error}", file=sys.stderr)
        return 1


def _command(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        show(_help())
        return 0 if arguments else 2
    if arguments[0] in ("-V", "--version"):
        import alfish

        print(f"alfish {alfish.__version__}")
        return 0
    name, *rest = arguments
    if name not in SUBCOMMANDS:
        close = difflib.get_close_matches(name, SUBCOMMANDS, 1)
        hint = f"; did you mean {close[0]}?" if close else ""
        print(f"alfish: there is no subcommand {name!r}{hint}\n\n{_help()}", file=sys.stderr)
        return 2
    module = importlib.import_module(module_of(name))
    _define_verbosity(module)
    if any(argument in ("-h", "--help") for argument in rest):
        show(f"{(module.__doc__ or name).strip()}\n\nFlags:\n{_flag_help(module.FLAGS)}")
        return 0
    # A shell expands `~` in `--root_dir ~/runs`, but not in `--root_dir=~/runs`.
    rest = [re.sub(r"(?<==)~[^=]*$", lambda path: os.path.expanduser(path[0]), one, count=1) for one in rest]
    return _run(name, module, rest)


def _define_verbosity(module) -> None:
    """Adds the flag `--verbosity`, which every subcommand has."""
    from absl import flags

    if "verbosity" not in module.FLAGS:
        words = "1 shows debug messages, and the traceback of an error that ends the command."
        flags.DEFINE_integer("verbosity", 0, words, 0, 1, flag_values=module.FLAGS)


def _run(name: str, module, rest: list[str]) -> int:
    from absl import flags, logging

    for flag in module.FLAGS:
        module.FLAGS[flag].unparse()  # removes the value of an earlier call in this process
    try:
        with replicas.joined() if getattr(module, "HAS_LEARNERS", False) else contextlib.nullcontext():
            try:
                left = module.FLAGS([f"alfish {name}", *rest])[1:]
            except flags.Error as error:
                words = re.sub(r"\('(.*)', '.*'\)$", r"\1", str(error))  # removes the second name of a boolean flag
                is_unlike_flags = isinstance(error, flags.UnrecognizedFlagError) and "Did you mean" not in words
                if is_unlike_flags and "gin_param" in module.FLAGS:
                    words += "; settings of classes are given as in --gin_param=PPO.gamma=0.98"
                raise UsageError(f"{words}; `alfish {name} --help` lists the flags") from error
            if left and not getattr(module, "TAKES_WORDS", False):
                raise UsageError(f"{left[0]!r} is not a flag; flags look like {_flag_like(left[0], module.FLAGS)}")
            for flag, value in module.FLAGS.flag_values_dict().items():
                if isinstance(value, float) and math.isnan(value):
                    raise UsageError(f"--{flag} is nan; it must be a number")
            if module.FLAGS.verbosity:
                logging.set_verbosity(logging.DEBUG)
            if "code" in module.FLAGS and module.FLAGS.code == "run":
                from alfish.bin import code_of_run

                return code_of_run.call(name, rest, module.FLAGS.root_dir)
            with calling():
                return module.main(module.FLAGS, *left)
    except RepeatedError:
        return 2
    except (UsageError, RunError) as error:
        if module.FLAGS.is_parsed() and module.FLAGS.verbosity:
            traceback.print_exception(error)
        for line in f"alfish {name}: {error}".split("\n"):
            print(printable(line), file=sys.stderr)
        if isinstance(error, CodeError) and not module.FLAGS.verbosity:
            print("The traceback is in log.txt of a run, and --verbosity=1 shows it", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        print(f"alfish {name}: {error.filename} is not a valid file name: {error.strerror}", file=sys.stderr)
        return 2
    except (MemoryError, RuntimeError) as error:
        if not (isinstance(error, MemoryError) or "can't allocate memory" in str(error)):  # torch's message
            raise
        print(f"alfish {name}: memory is exhausted: {first_line(error)}; lower sizes such as num_envs", file=sys.stderr)
        return 1
    except SystemExit as error:  # raised by an environment, or by other code of the user
        print(f"alfish {name}: {in_words(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"alfish {name}: interrupted", file=sys.stderr)
        return 130


def _flag_like(word: str, flag_values) -> str:
    """Returns the flag for which `word` is probably the value, or else an example of a flag."""
    if word.endswith(".gin"):
        return f"--gin_file={word}"
    if "root_dir" in flag_values and os.path.isdir(word):
        return f"--root_dir={word}"
    return f"--env_id={word}" if "env_id" in flag_values else "--root_dir=runs/ppo"


def _help() -> str:
    lines = [f"  {name:<13} {words}" for name, words in SUBCOMMANDS.items()]
    return "\n".join(
        [
            "alfish: reinforcement learning in PyTorch",
            "",
            "usage: alfish SUBCOMMAND --flags",
            "",
            *lines,
            "",
            "alfish SUBCOMMAND --help explains one of them.",
        ]
    )


def _flag_help(flag_values) -> str:
    lines = []
    for name in sorted(flag_values):
        flag = flag_values[name]
        words = flag.help.partition(";\n")[0]  # cuts off absl's remark that a flag may be repeated
        lines.append(f"  --{name}: {words}")
        if flag.default not in (None, []):
            lines.append(f"      default: {flag.default}")
    return "\n".join(lines) or "  none"


if __name__ == "__main__":
    sys.exit(main())
