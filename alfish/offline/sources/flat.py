"""Tables of consecutive transitions, as in D4RL and many other formats."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from alfish import nest
from alfish.errors import UsageError
from alfish.nest import Nest
from alfish.offline.episode import Episode, Unreadable, without_final_observation
from alfish.offline.limits import check_memory
from alfish.offline.sources.source_files import BLOCK_BYTES, BLOCK_ROWS, HDF5_DAMAGE, blocks, inside, read_rows, said

NUMBERS = "fiub"  # kinds of numeric dtypes
SAME = 1e-6  # largest difference between observations that count as equal


class TransitionTable(NamedTuple):
    """Table of N transitions. Leaves are arrays, or objects that return an array when they are sliced."""

    observations: Nest  # [N, ...]
    actions: Nest  # [N, ...]
    rewards: Any  # [N]
    terminated: np.ndarray  # [N] bool
    truncated: np.ndarray | None  # [N] bool; None if not recorded
    next_observations: Nest = None  # [N, ...], with the true final observations; None if not recorded


def flags(stored: Any, label: str) -> np.ndarray:
    """Returns flags of 0 and 1 as `[N]` bool.

    Args:
      stored: recorded flags, `[N]` or `[N, 1]`, of any numeric dtype.
      label: name of the flags and their file, for messages.

    Raises:
      UsageError: the shape is neither [N] nor [N, 1], or a value is neither 0 nor 1.
    """
    check_rows(stored, label)
    if stored.shape[1:] not in ((), (1,)):
        raise UsageError(f"{label} has shape {list(stored.shape)}, but [N], one flag for each row, is expected")
    check_memory(stored.nbytes, label)
    values = np.asarray(stored[:]).reshape(-1)
    other = values[(values != 0) & (values != 1)]
    if len(other):
        raise UsageError(f"{label} has {other[0]:g}, but a flag must be 0 or 1")
    return values.astype(bool)


def check_shapes(table: TransitionTable, name: str) -> None:
    """Checks that the arrays of a table fit together.

    Raises:
      UsageError: an array is not numeric, arrays differ in their number of rows, or the next observations differ from
        the observations in structure or shape.
    """
    named = [leaf for field, values in zip(table._fields, table) for leaf in nest.named_leaves(values, field)]
    for label, leaf in named:
        check_rows(leaf, f"{name}: {label}")
    count = len(table.rewards)
    for label, leaf in named:
        if len(leaf) != count:
            raise UsageError(
                f"{name}: {label} has {len(leaf):,} rows but rewards has {count:,}; a table must have one row of each "
                "for every transition: write the file again"
            )
    if table.next_observations is None:
        return
    there, here = nest.paths(table.next_observations), nest.paths(table.observations)
    if there != here:
        one, other = (", ".join(path or "one array" for path in paths) for paths in (there, here))
        raise UsageError(f"{name}: next_observations are {one}, but {other}, as for observations, is expected")
    for (label, leaf), like in zip(
        nest.named_leaves(table.next_observations, "next_observations"), nest.leaves(table.observations)
    ):
        if leaf.shape != like.shape:
            raise UsageError(
                f"{name}: {label} has shape {list(leaf.shape)}, but {list(like.shape)}, as in observations, is expected"
            )


def check_rows(values: Any, label: str) -> None:
    """Checks that values are an array `[N, ...]` of numbers, whose rows are not empty.

    Raises:
      UsageError: the values are not such an array; the message says what they are.
    """
    shape, dtype = getattr(values, "shape", None), getattr(values, "dtype", None)
    if shape is None or dtype is None:
        raise UsageError(f"{label} is a group, but an array is expected")
    if not shape:
        raise UsageError(f"{label} has shape [], but [N, ...], one row for each transition, is expected")
    if dtype.kind not in NUMBERS:
        raise UsageError(f"{label} has dtype {dtype}, but numbers are expected")
    if 0 in shape[1:]:
        raise UsageError(f"{label} has shape {list(shape)}, but rows must not be empty")


def cut(table: TransitionTable) -> tuple[np.ndarray, int]:
    """Finds the ends of episodes.

    An episode ends at a row with a flag, at the last row of the table, and at a row whose `next_observations` differ
    from the `observations` of the following row.

    Returns:
      Index of the row after the last row of each episode, `[E]` int64; and the number of ends without a flag.
    """
    count = len(table.rewards)
    flagged = marked(table)
    broken = np.zeros(count, bool)
    if table.next_observations is not None:
        size = block_size(table)
        for start in range(0, count - 1, size):
            rows = slice(start, min(start + size, count - 1))
            after = read_rows(table.observations, slice(rows.start + 1, rows.stop + 1))
            arrived = read_rows(table.next_observations, rows)
            for one, other in zip(nest.leaves(after), nest.leaves(arrived)):
                if one.dtype.kind == other.dtype.kind == "f":
                    # A difference from NaN is not a cut; the validator reports NaN. If the two arrays have different
                    # precisions, both are compared in the lower one.
                    kind = min(one.dtype, other.dtype, key=lambda dtype: dtype.itemsize)
                    one, other = (part.astype(kind).astype(np.float64) for part in (one, other))
                    apart = np.abs(one - other) > SAME
                else:
                    apart = one != other
                broken[rows] |= apart.reshape(len(apart), -1).any(1)
    broken[-1:] = True
    return np.flatnonzero(flagged | broken) + 1, int((broken & ~flagged).sum())


def block_size(table: TransitionTable) -> int:
    """Returns the number of rows to read at a time, which is smaller for large rows."""
    row_bytes = sum(leaf.dtype.itemsize * math.prod(leaf.shape[1:]) for leaf in nest.leaves(table.observations))
    return max(1, min(BLOCK_ROWS, BLOCK_BYTES // row_bytes))


def marked(table: TransitionTable) -> np.ndarray:
    """Returns a mask `[N]` of rows at which a flag ends an episode."""
    return table.terminated if table.truncated is None else table.terminated | table.truncated


def episodes(table: TransitionTable, ends: np.ndarray) -> Iterator[Episode | Unreadable]:
    """Yields the episodes of a table, with their final observations if these were recorded."""
    number = 0
    for block in blocks(ends, size=block_size(table)):
        rows = slice(block[0].start, block[-1].stop)
        try:
            observations, actions, rewards, following = (
                read_rows(part, rows)
                for part in (table.observations, table.actions, table.rewards, table.next_observations)
            )
        except UsageError:  # the data do not fit in memory, or a checksum is wrong
            raise
        except HDF5_DAMAGE as error:
            for episode in block:
                yield Unreadable(
                    str(number), f"rows {episode.start:,} to {episode.stop - 1:,} cannot be read ({said(error)})"
                )
                number += 1
            continue
        for episode in block:
            at = inside(episode, block)
            terminated = table.terminated[episode]
            truncated = np.zeros(len(terminated), bool) if table.truncated is None else table.truncated[episode].copy()
            if not terminated[-1]:
                truncated[-1] = True
            seen, taken = nest.at(observations, at), nest.at(actions, at)
            if following is None:
                yield without_final_observation(str(number), seen, taken, rewards[at], terminated, truncated)
            else:
                final = nest.at(following, slice(at.stop - 1, at.stop))
                whole = nest.map(lambda leaf, last: np.concatenate([leaf, last]), seen, final)
                yield Episode(str(number), whole, taken, rewards[at], terminated, truncated)
            number += 1


def notes(table: TransitionTable, num_unmarked: int) -> Iterator[str]:
    """Yields sentences on how a table was cut into episodes."""
    if table.next_observations is None:
        yield (
            "final observations were not recorded: the last step of an episode that did not terminate is dropped, and "
            "the last observation of a terminated episode is used as its final observation"
        )
    elif table.truncated is None:
        yield "no time-outs were recorded: episodes are split at terminations and where observations are not continuous"
    if num_unmarked > (not marked(table)[-1:].all()):  # the last episode may have been unfinished when it was saved
        which = "1 episode ends" if num_unmarked == 1 else f"{num_unmarked:,} episodes end"
        yield f"{which} without a flag, where observations are not continuous: they count as truncated"


def warnings(table: TransitionTable, flag: str, num_unmarked: int = 0) -> Iterator[str]:
    """Yields warnings about a table without time-outs and next observations, or whose rows are mostly not consecutive.

    Args:
      table: table to read.
      flag: name of the time-out flag in this format.
      num_unmarked: number of ends without a flag, see `cut`.
    """
    if table.truncated is None and table.next_observations is None:
        yield f"no time-outs were recorded: transitions across resets are trained on; give {flag}"
    count = len(table.rewards)
    if table.next_observations is not None and num_unmarked > count / 2:
        rows = min(count - 1, block_size(table))
        pairs = zip(
            nest.leaves(read_rows(table.observations, slice(1, rows + 1))),
            nest.leaves(read_rows(table.next_observations, slice(0, rows))),
        )
        largest = [np.abs(a.astype(np.float64) - b.astype(np.float64)).reshape(rows, -1).max(1) for a, b in pairs]
        typical = np.median(np.max(largest, axis=0))
        yield (
            f"{num_unmarked:,} of {count:,} rows end an episode because the next observation is not the observation of "
            f"the next row (typical difference {typical:.1g}), so n-step returns, memory and returns of episodes are "
            "meaningless; if rounding is the cause, write both columns in the same precision"
        )
