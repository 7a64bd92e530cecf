"""Exceptions that the command line prints as one sentence, without a traceback."""


class UsageError(ValueError):
    """A mistake that the user can mend: what is wrong, where, and the remedy."""


class RunError(RuntimeError):
    """A run that cannot go on, through no fault of alfish's code: what happened, where, and what to look at."""
