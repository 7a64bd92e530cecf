"""Exceptions that the command line prints without a traceback, and helpers for their messages."""

import contextlib
import importlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

_IS_COMMAND: ContextVar[bool] = ContextVar("is_command", default=False)


class UsageError(ValueError):
    """A mistake that the user can correct; the message says what is wrong, where it is, and how to correct it."""


class RepeatedError(UsageError):
    """A mistake that another learner has already reported; the command does not print it again."""


class RunError(RuntimeError):
    """A run cannot continue for a reason outside alfish; the message says what happened and what to check."""


@contextlib.contextmanager
def phrased_for_command() -> Iterator[None]:
    """Within the context, messages name command-line flags instead of arguments of a Python call."""
    token = _IS_COMMAND.set(True)
    try:
        yield
    finally:
        _IS_COMMAND.reset(token)


def is_command() -> bool:
    """Returns whether a command is running, so that messages name flags."""
    return _IS_COMMAND.get()


def argument(name: str, value: Any = None) -> str:
    """Returns the text of an argument for messages: `--root_dir=runs/ppo`, or `root_dir='runs/ppo'` in Python."""
    if is_command():
        return f"--{name}" if value is None else f"--{name}={value}"
    return name if value is None else f"{name}={str(value)!r}"


def optional_module(module: str, extra: str, what: str) -> Any:
    """Imports a module that an extra of alfish installs.

    Args:
      module: name of the module.
      extra: name of the extra.
      what: feature that needs the module, for the message.

    Raises:
      UsageError: the module is not installed; the message has the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UsageError(f"{what} needs the extra {extra!r}: pip install 'alfish[{extra}]' ({error})") from error


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, without control characters."""
    return printable((str(error).strip() or type(error).__name__).splitlines()[0])


def printable(words: str) -> str:
    """Replaces line ends and control characters with spaces, because a terminal could execute control characters."""
    return "".join(letter if letter.isprintable() else " " for letter in words)


# Functions that write numbers for messages.


def counted(count: int, noun: str) -> str:
    """Returns '1 episode' or '1,000 episodes'."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def significant(value: float, digits: int = 4) -> str:
    """Returns a number with `digits` significant digits, or all digits before the point: 0.9968, 480.2, 12845."""
    if 10 ** (digits - 1) <= abs(value) < 1e9:
        return f"{value:.0f}"
    return f"{value:.{digits}g}"


def size(num_bytes: int) -> str:
    """Returns '12 kB' or '3.4 MB', in powers of 1000."""
    if num_bytes < 1000:
        return counted(num_bytes, "byte")
    units = ((12, "TB"), (9, "GB"), (6, "MB"), (3, "kB"))
    # 999.5 and larger numbers round to 1 of the next unit.
    power, unit = next((power, unit) for power, unit in units if num_bytes >= 0.9995 * 10**power)
    return f"{significant(num_bytes / 10**power, 3)} {unit}"
