"""Exceptions that the command line prints as one sentence without a traceback, and other errors in one line."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

_IS_COMMAND: ContextVar[bool] = ContextVar("is_command", default=False)


class UsageError(ValueError):
    """A mistake that the user can correct; the message says what is wrong, where, and the remedy."""


class RepeatedError(UsageError):
    """A mistake that the first of several learners reports with the same words; commands do not print it again."""


class RunError(RuntimeError):
    """A run that cannot continue for a reason outside alfish; the message says what happened, and what to check."""


@contextlib.contextmanager
def phrased_for_command() -> Iterator[None]:
    """Within the context, sentences name flags of a command; elsewhere they name arguments of a Python call."""
    token = _IS_COMMAND.set(True)
    try:
        yield
    finally:
        _IS_COMMAND.reset(token)


def is_command() -> bool:
    """Returns True if a command is running, whose user writes flags."""
    return _IS_COMMAND.get()


def argument(name: str, value: Any = None) -> str:
    """Returns an argument as the user writes it: `--root_dir=runs/ppo`, or `root_dir='runs/ppo'` in Python."""
    if is_command():
        return f"--{name}" if value is None else f"--{name}={value}"
    return name if value is None else f"{name}={str(value)!r}"


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, without control characters."""
    return printable((str(error).strip() or type(error).__name__).splitlines()[0])


def printable(words: str) -> str:
    """Replaces line ends and control characters by spaces, because those of a file could command a terminal."""
    return "".join(letter if letter.isprintable() else " " for letter in words)
