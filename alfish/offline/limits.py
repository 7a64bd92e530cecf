"""Limits on the sizes that a file declares, checked before memory is allocated."""

import contextlib
import itertools
import os
from pathlib import Path
from typing import Any

import torch

from alfish.errors import UsageError

SMALL = 64 * 2**20  # bytes that a file of any size may declare
# Largest ratio of declared to stored bytes in a file that declares more than SMALL; compressed frames reach about 100.
MAX_EXPANSION = 250
MAX_PARTS = 1000  # maximum number of containers and leaves of a nest
MEMINFO, CGROUP_LIMIT = Path("/proc/meminfo"), Path("/sys/fs/cgroup/memory.max")


class NotEnoughMemory(UsageError):
    """Raised for data that are not damaged, but do not fit in the available memory."""


def check_expansion(declared: int, stored: int, name: str) -> None:
    """Checks that a file does not declare far more content than it stores.

    Args:
      declared: number of bytes of the uncompressed content, as the file declares it.
      stored: number of bytes of the file.
      name: name of the file.

    Raises:
      UsageError: the file declares far more than it stores; the message gives both sizes.
    """
    if declared > max(SMALL, MAX_EXPANSION * stored):
        raise UsageError(
            f"{name} declares {_size(declared)} of uncompressed content, but the file has only {_size(stored)}; the "
            "file is damaged, or was made to exhaust memory: download it again, or write it without compression"
        )


def check_memory(num_bytes: int, name: str) -> None:
    """Checks that data fit in the available memory.

    Args:
      num_bytes: number of bytes of the data in memory.
      name: name of the file, or of a part of the file, for the message.

    Raises:
      NotEnoughMemory: the data do not fit; the message gives both sizes.
    """
    at_hand = memory_at_hand()
    if num_bytes > at_hand:
        raise NotEnoughMemory(
            f"{name} needs {_size(num_bytes)} of memory, but only {_size(at_hand)} are available; free memory, or "
            "split the file"
        )


def stored_values(metadata: Any) -> list[tuple[str, int]]:
    """Returns path and number of values of each column in each row group of a parquet file, from its metadata.

    Each value of a list counts as one value, because the lists of a compressed file may have any length.
    """
    groups = [metadata.row_group(k) for k in range(metadata.num_row_groups)]
    columns = [group.column(k) for group in groups for k in range(group.num_columns)]
    return [(column.path_in_schema, column.num_values) for column in columns]


def check_nest(values: Any, name: str) -> None:
    """Checks that a nest has at most `MAX_PARTS` parts: containers and leaves.

    A part that the file refers to many times counts each time; such parts could otherwise expand without limit.

    Args:
      values: nest of dicts, tuples and lists.
      name: name of the nest and its file.

    Raises:
      UsageError: the nest has more than `MAX_PARTS` parts.
    """
    waiting, count = [values], 0
    while waiting:
        part = waiting.pop()
        count += 1
        if count > MAX_PARTS:
            raise UsageError(f"{name} has more than {MAX_PARTS} parts; it is damaged, or was made to exhaust memory")
        if isinstance(part, (dict, tuple, list)):
            waiting += itertools.islice(part.values() if isinstance(part, dict) else part, MAX_PARTS)


def check_tensor(value: Any, name: str) -> torch.Tensor:
    """Returns a tensor of a file after checking that it is dense and contiguous.

    Args:
      value: value from a file.
      name: name of the value and its file.

    Raises:
      UsageError: the value is not a tensor, or not dense and contiguous on the CPU, or is quantized.
    """
    if not isinstance(value, torch.Tensor):
        raise UsageError(f"{name} is a {type(value).__name__}, but a tensor is expected; write the file again")
    if value.layout != torch.strided or value.device.type != "cpu" or not value.is_contiguous() or value.is_quantized:
        raise UsageError(
            f"{name} is not a dense, contiguous tensor ({list(value.shape)}, {value.dtype}); write the file again"
        )
    return value.detach()


def memory_at_hand() -> int:
    """Returns the bytes that can be allocated: the machine's available memory, limited by the container's limit."""
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError, IndexError, StopIteration):  # only Linux has this file
        line = next(line for line in MEMINFO.read_text().splitlines() if line.startswith("MemAvailable:"))
        available = int(line.split()[1]) * 1024
    with contextlib.suppress(OSError, ValueError):  # 'max' means no limit
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
