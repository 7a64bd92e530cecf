"""Exceptions that the command line prints as one sentence, without a traceback; what others say, in one line."""


class UsageError(ValueError):
    """A mistake that the user can mend: what is wrong, where, and the remedy."""


class RunError(RuntimeError):
    """A run that cannot go on, through no fault of alfish's code: what happened, where, and what to look at."""


def first_line(error: BaseException) -> str:
    """What it says, without the report that may follow."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
