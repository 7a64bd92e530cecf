"""Limits on the sizes that a file declares, checked before memory is allocated."""

import contextlib
import itertools
import os
from pathlib import Path
from typing import Any

from alfish.errors import UsageError

SMALL = 64 * 2**20  # bytes; any file may declare as many
MAX_EXPANSION = 250  # declared bytes for each stored byte beyond SMALL; compressed frames reach about 100
MAX_PARTS = 1000  # of a nest
MEMINFO, CGROUP_LIMIT = Path("/proc/meminfo"), Path("/sys/fs/cgroup/memory.max")


class NotEnoughMemory(UsageError):
    """Data are not damaged, but do not fit in the available memory."""


def check_expansion(declared: int, stored: int, name: str) -> None:
    """Checks that a file does not declare far more content than it stores.

    Args:
      declared: bytes of its content in memory.
      stored: bytes of the file.
      name: of the file.

    Raises:
      UsageError: it does; gives both sizes.
    """
    if declared > max(SMALL, MAX_EXPANSION * stored):
        raise UsageError(
            f"{name} declares {_size(declared)} of content and has {_size(stored)}; it is damaged, or made to exhaust "
            "memory: fetch it again, or write it without compression"
        )


def check_memory(num_bytes: int, name: str) -> None:
    """Checks that data fit in the available memory.

    Args:
      num_bytes: of the data in memory.
      name: of the file, or of its part.

    Raises:
      NotEnoughMemory: they do not; gives both sizes.
    """
    at_hand = memory_at_hand()
    if num_bytes > at_hand:
        raise NotEnoughMemory(
            f"{name} takes {_size(num_bytes)} of memory, and {_size(at_hand)} are at hand; free memory, or split the "
            "file"
        )


def stored_values(metadata: Any) -> list[tuple[str, int]]:
    """Returns the path and the number of values of each column in each part of a parquet file, from its metadata.

    Values in lists count one by one, of which a compressed file may declare any number.
    """
    groups = [metadata.row_group(k) for k in range(metadata.num_row_groups)]
    columns = [group.column(k) for group in groups for k in range(group.num_columns)]
    return [(column.path_in_schema, column.num_values) for column in columns]


def check_nest(values: Any, name: str) -> None:
    """Checks that a nest has no more parts than data have; shared parts may multiply without end.

    Args:
      values: of dicts, tuples and lists.
      name: of the nest and its file.

    Raises:
      UsageError: it has more than `MAX_PARTS`.
    """
    waiting, count = [values], 0
    while waiting:
        part = waiting.pop()
        count += 1
        if count > MAX_PARTS:
            raise UsageError(f"{name} has more than {MAX_PARTS} parts; it is damaged, or made to exhaust memory")
        if isinstance(part, (dict, tuple, list)):
            waiting += itertools.islice(part.values() if isinstance(part, dict) else part, MAX_PARTS)


def memory_at_hand() -> int:
    """Returns the bytes that can be allocated: the machine's available memory, limited by the container's."""
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError, IndexError, StopIteration):  # other systems have no such file
        line = next(line for line in MEMINFO.read_text().splitlines() if line.startswith("MemAvailable:"))
        available = int(line.split()[1]) * 1024
    with contextlib.suppress(OSError, ValueError):  # there is no limit: 'max'
        available = min(available, int(CGROUP_LIMIT.read_text()))
    return available


def _size(num_bytes: int) -> str:
    """Returns a number of bytes with a unit."""
    value, unit = float(num_bytes), "bytes"
    for larger in ("KB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{num_bytes:,} bytes" if unit == "bytes" else f"{value:,.1f} {unit}"
