"""Decides whether `Learner.compile = 'auto'` compiles, and from which update on, from the configuration only.

Times are those of one core of a server processor of 2024 (`python -m benchmarks.growth`). They need not be right for
another machine, because they decide nothing but the number of an update, and which budgets are long. No clock, no cache
and no machine takes part, so the same configuration gives the same bits everywhere.
"""

import math

# An update's seconds: those of its calls, and those of each of its rows x parameters.
PLAIN_SECONDS, PLAIN_SECONDS_OF_ONE = 0.8e-3, 0.18e-9
COMPILED_SECONDS, COMPILED_SECONDS_OF_ONE = 0.1e-3, 0.09e-9
# Of another process on a second core, from its start to the graph's file; and if the cache has the graph.
COMPILATION_SECONDS, CACHED_SECONDS = 12.0, 5.0


def first_compiled_update(work: float) -> int:
    """Returns the number of plain updates that take as long as a compilation whose graph the cache has.

    A run whose graph must be made waits there for the rest of the compilation. Plain updates would not use that time
    well, because compiled ones make up for most of it, and each later run with the same configuration would make the
    same number of plain ones.

    Args:
      work: rows of an update x parameters.
    """
    return math.ceil(CACHED_SECONDS / (PLAIN_SECONDS + work * PLAIN_SECONDS_OF_ONE))


def saved_seconds(num_updates: float, work: float) -> float:
    """Returns the seconds that compiled updates save."""
    return num_updates * (PLAIN_SECONDS - COMPILED_SECONDS + work * (PLAIN_SECONDS_OF_ONE - COMPILED_SECONDS_OF_ONE))


def pays_beside(num_updates: float, work: float) -> bool:
    """Returns whether a run shall compile in another process: a run whose graph must be made ends as early or earlier.

    Args:
      num_updates: of the whole run.
      work: see `first_compiled_update`.
    """
    remaining = num_updates - first_compiled_update(work)
    return saved_seconds(remaining, work) >= COMPILATION_SECONDS - CACHED_SECONDS


def pays_in_foreground(num_updates: float, work: float) -> bool:
    """Returns whether a run shall compile while it waits: compilation saves twice what it takes, or more."""
    return saved_seconds(num_updates, work) >= 2 * COMPILATION_SECONDS
