"""Exceptions that the command line prints as one sentence without a traceback, and other errors in one line."""


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
