"""Exceptions that the command line prints as one sentence, without a traceback; what others say, in one line."""

import traceback


class UsageError(ValueError):
    """A mistake that the user can mend: what is wrong, where, and the remedy."""


class RunError(RuntimeError):
    """A run that cannot go on, through no fault of alfish's code: what happened, where, and what to look at."""


def first_line(error: BaseException) -> str:
    """What it says, without the report that may follow, and without what a file might tell the terminal."""
    return printable((str(error).strip() or type(error).__name__).splitlines()[0])


def printable(words: str) -> str:
    """Words in one line of characters that can be shown: a control character from a file could command a terminal."""
    return "".join(letter if letter.isprintable() else " " for letter in words)


def exited(error: SystemExit) -> RunError:
    """The error of a run in which an environment, or another part that is not alfish's, called sys.exit."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.endswith("_sitebuiltins.py")]  # of exit() and quit()
    return RunError(
        f"sys.exit({'' if error.code is None else repr(error.code)}) was called in {own[-1].name} "
        f"({own[-1].filename}:{own[-1].lineno}), and nothing that runs inside alfish may end the program; end the "
        "episode there, or raise an error"
    )
