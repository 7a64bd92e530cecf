"""Decides whether `Learner.compile = 'auto'` compiles, and from which update on, from the configuration only.

Times are those of one core of a server processor of 2024 (`python -m benchmarks.growth`). They need not be right for
another machine, because they decide nothing but the number of an update, and which budgets are long. No clock, no cache
and no machine takes part, so the same configuration gives the same bits everywhere.
"""

import math

# An update's seconds: those of its calls, and those of each of its rows x parameters.
PLAIN_SECONDS, PLAIN_SECONDS_OF_ONE = 0.8e-3, 0.18e-9
COMPILED_SECONDS, COMPILED_SECONDS_OF_ONE = 0.1e-3, 0.09e-9
COMPILATION_SECONDS = 15.0


def first_compiled_update(work: float) -> int:
    """Returns the number of plain updates that take as long as a compilation.

    Args:
      work: rows of an update x parameters.
    """
    return math.ceil(COMPILATION_SECONDS / (PLAIN_SECONDS + work * PLAIN_SECONDS_OF_ONE))


def saved_seconds(num_updates: float, work: float) -> float:
    """Returns the seconds that compiled updates save."""
    return num_updates * (PLAIN_SECONDS - COMPILED_SECONDS + work * (PLAIN_SECONDS_OF_ONE - COMPILED_SECONDS_OF_ONE))


def pays_beside(num_updates: float, work: float) -> bool:
    """Returns whether a run shall compile in another process: compilation saves half of what it takes, or more.

    Args:
      num_updates: of the whole run.
      work: see `first_compiled_update`.
    """
    remaining = num_updates - first_compiled_update(work)
    return saved_seconds(remaining, work) >= 0.5 * COMPILATION_SECONDS


def pays_in_foreground(num_updates: float, work: float) -> bool:
    """Returns whether a run shall compile while it waits: compilation saves twice what it takes, or more."""
    return saved_seconds(num_updates, work) >= 2 * COMPILATION_SECONDS
