"""Settings of the process that make updates faster: for freed memory, and for subnormal numbers."""

import contextlib
import ctypes
import functools
import os
import sys
from collections.abc import Iterator

import numpy as np
import torch

# Parameters of mallopt in glibc's malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KEPT_BYTES = 1 << 28  # free bytes that the heap keeps at its end; an update of wide networks frees less
MAPPED_BYTES = 1 << 25  # size from which freed arrays are returned to the system; the largest size that glibc accepts
VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


@functools.cache
def keep_freed_memory() -> bool:
    """Makes the C library keep freed memory instead of returning it to the system; returns whether that succeeded.

    By default, glibc returns freed memory to the system if it is at the end of the heap, or belongs to an array above a
    size limit. Each update allocates and frees the same arrays. The system then handles a page fault for each 4 KiB of
    these arrays, and fills the page with zeros, which can take longer than the update.

    Does nothing with other C libraries, or if one of the `VARIABLES`, which can set these limits, is set.
    """
    if not sys.platform.startswith("linux") or any(name in os.environ for name in VARIABLES):
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    return bool(library.mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES) and library.mallopt(M_TRIM_THRESHOLD, KEPT_BYTES))


def flush_subnormals() -> None:
    """Makes this thread, and threads that it starts later, treat subnormal numbers as 0.

    Subnormal numbers are below 1.2e-38 in float32. Processors compute many times more slowly with them. If a gradient
    is 0, as for a ReLU unit that is never active, Adam's moments shrink with each update until they are subnormal. The
    moments stay subnormal, because 0.9 times the smallest number is rounded to the same number.
    """
    for kind in (np.float16, np.float32, np.float64):
        np.finfo(kind)  # numpy caches the smallest number; older releases warn if it is 0 at the first query
    torch.set_flush_denormal(True)


def subnormals_are_flushed() -> bool:
    """Returns whether this thread treats subnormal numbers as 0."""
    return bool(torch.full((), 1e-40) * 1 == 0)


@contextlib.contextmanager
def subnormals_preserved() -> Iterator[None]:
    """Restores this thread's treatment of subnormal numbers on exit."""
    before = subnormals_are_flushed()
    try:
        yield
    finally:
        torch.set_flush_denormal(before)
