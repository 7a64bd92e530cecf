"""How much of what a file declares is believed, before memory is allocated for it."""

import contextlib
import itertools
import os
from pathlib import Path
from typing import Any

from alfish.errors import UsageError

SMALL = 64 * 2**20  # bytes that any file may declare
MAX_EXPANSION = 250  # of more than that, the bytes declared for each byte stored; compressed frames reach some 100
MAX_PARTS = 1000  # of a nest
MEMINFO, CGROUP_LIMIT = Path("/proc/meminfo"), Path("/sys/fs/cgroup/memory.max")


def check_expansion(declared: int, stored: int, name: str) -> None:
    """Raises where a file declares far more than it stores: it is damaged, or made to exhaust memory.

    Args:
      declared: bytes that its content takes in memory.
      stored: bytes of the file.
      name: of the file.

    Raises:
      UsageError: says both.
    """
    if declared > max(SMALL, MAX_EXPANSION * stored):
        raise UsageError(
            f"{name} declares {_size(declared)} of content and has {_size(stored)}; it is damaged, or made to exhaust "
            "memory: fetch it again, or write it without compression"
        )


def check_memory(num_bytes: int, name: str) -> None:
    """Raises where something to be read is larger than the memory at hand.

    Args:
      num_bytes: that it takes in memory.
      name: of the file, and of the part where it is one.

    Raises:
      UsageError: says both.
    """
    at_hand = memory_at_hand()
    if num_bytes > at_hand:
        raise UsageError(
            f"{name} takes {_size(num_bytes)} of memory, and {_size(at_hand)} are at hand; free memory, or split the "
            "file"
        )


def check_nest(values: Any, name: str) -> None:
    """Raises where a nest has more parts than data have: parts that it shares may multiply it without end.

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
    """Bytes that may be allocated: the machine's available memory, within the limit of this process's container."""
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError, IndexError, StopIteration):  # other systems have no such file
        line = next(line for line in MEMINFO.read_text().splitlines() if line.startswith("MemAvailable:"))
        available = int(line.split()[1]) * 1024
    with contextlib.suppress(OSError, ValueError):  # there is no limit: 'max'
        available = min(available, int(CGROUP_LIMIT.read_text()))
    return available


def _size(num_bytes: int) -> str:
    """A number of bytes as people read it."""
    value, unit = float(num_bytes), "bytes"
    for larger in ("KB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{num_bytes:,} bytes" if unit == "bytes" else f"{value:,.1f} {unit}"
