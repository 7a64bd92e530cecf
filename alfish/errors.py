"""Exceptions that the command line prints as one sentence without a traceback, and other errors in one line."""

import traceback


class UsageError(ValueError):
    """A mistake that the user can correct; the message says what is wrong, where, and the remedy."""


class RepeatedError(UsageError):
    """A mistake that the first of several learners reports with the same words; commands do not print it again."""


class RunError(RuntimeError):
    """A run that cannot continue for a reason outside alfish; the message says what happened, and what to check."""


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, without control characters."""
    return printable((str(error).strip() or type(error).__name__).splitlines()[0])


def printable(words: str) -> str:
    """Replaces line ends and control characters by spaces, because those of a file could command a terminal."""
    return "".join(letter if letter.isprintable() else " " for letter in words)


def exited(error: SystemExit) -> RunError:
    """Returns the error of a run in which code outside alfish, such as an environment, called sys.exit."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.endswith("_sitebuiltins.py")]  # of exit() and quit()
    return RunError(
        f"sys.exit({'' if error.code is None else repr(error.code)}) was called in {own[-1].name} "
        f"({own[-1].filename}:{own[-1].lineno}), and nothing that runs inside alfish may end the program; end the "
        "episode there, or raise an error"
    )
