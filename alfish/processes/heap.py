"""Makes the C library keep freed memory instead of returning it to the system after each update.

By default, glibc returns freed memory to the system if it is at the end of the heap, or belongs to an array above a
size limit. Each update allocates and frees the same arrays. The system then handles a page fault for each 4 KiB of
these arrays, and fills the page with zeros, which can take longer than the update.
"""

import ctypes
import functools
import os
import sys

# Parameters of mallopt in glibc's malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KEPT_BYTES = 1 << 28  # free bytes that the heap keeps at its end; an update of wide networks frees less
MAPPED_BYTES = 1 << 25  # size from which freed arrays are returned to the system; the largest size that glibc accepts
VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


@functools.cache
def keep_freed_memory() -> bool:
    """Sets the two limits of glibc's heap for this process; returns whether that succeeded.

    Does nothing with other C libraries, or if one of the `VARIABLES`, which can set these limits, is set.
    """
    if not sys.platform.startswith("linux") or any(name in os.environ for name in VARIABLES):
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    return bool(library.mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES) and library.mallopt(M_TRIM_THRESHOLD, KEPT_BYTES))
