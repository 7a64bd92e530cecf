"""The library of alfish's own kernels: how it is built, and the threads that help them.

Helpers take part in a kernel's work while other processes leave cores for them (`thread_pool.h`). They change no
result. They are used with one thread of torch only, because torch's own threads wait in loops.
"""

import ctypes
import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from alfish.compiler import cache, torch_internals

# One library, so that its kernels share one pool of threads. Each file needs those before it.
SOURCES = ("thread_pool.h", "matmul.cpp")
QUOTA = Path("/sys/fs/cgroup/cpu.max")  # microseconds of processor time in a period, or "max", and the period

_given: int | Literal["auto"] = "auto"  # by `set_num_threads`
_wanted = (0, True)  # helpers, and whether they give way
_file = ""  # of the library; empty: torch's compiler builds it


class HelperCounts(NamedTuple):
    """Counts of helpers since the library was loaded.

    Attributes:
      allowed: helpers that may work now.
      calls: calls of kernels that had helpers.
      tasks, helped: tasks of these calls, and those of them that helpers did.
      waited: nanoseconds that calls waited for helpers.
      pauses: number of times at which helpers were sent away because they did not make calls faster.
    """

    allowed: int = 0
    calls: int = 0
    tasks: int = 0
    helped: int = 0
    waited: int = 0
    pauses: int = 0


@functools.cache
def library() -> ctypes.CDLL:
    """Returns the library, whose operators torch then knows; builds it if torch's cache does not have it.

    Raises:
      RuntimeError, OSError: it cannot be built.
      TorchChanged: this release of torch cannot build it.
    """
    loaded: ctypes.CDLL = ctypes.CDLL(_file) if _file else _being_built()()
    loaded.alfish_configure_helpers(*_wanted)
    return loaded


def begin_to_build() -> None:
    """Builds the library in a thread, if it has to be built; raises what `library` raises."""
    if not _file:
        _being_built()


@functools.cache
def _being_built() -> Callable[[], ctypes.CDLL]:
    """Returns a function that waits for the library and loads it."""
    source = "".join(Path(__file__).with_name(name).read_text() for name in SOURCES)
    thread = ThreadPoolExecutor(1)
    with cache.in_use(), torch_internals.build_settings():
        load: Callable[[], ctypes.CDLL] = torch_internals.CppCodeCache.load_async(source, submit_fn=thread.submit)
    thread.shutdown(wait=False)
    return load


def library_file() -> str | None:
    """Returns the file of the library; None: it is not loaded."""
    return library()._name if library.cache_info().currsize else None


def use_library(file: str) -> None:
    """Loads a `library_file` of another process, unless the library is loaded.

    Raises:
      OSError: the file cannot be loaded.
    """
    global _file
    if not library.cache_info().currsize:
        ctypes.CDLL(file)  # if it fails, the library is still to be built
        _file = file
        library()


def use_helpers(number: int, adapts: bool = True) -> None:
    """Sets the number of threads that help with large products, beside the calling one.

    Args:
      number: the largest number of helpers.
      adapts: whether helpers give way to other processes; False is for measurements and tests.
    """
    global _wanted
    _wanted = number, adapts
    if library.cache_info().currsize:
        library().alfish_configure_helpers(*_wanted)


def set_num_threads(number: int | Literal["auto"]) -> None:
    """Sets torch's threads; 'auto' is one, and a helper for each other core."""
    global _given
    _given = number
    torch.set_num_threads(1 if number == "auto" else number)
    use_helpers(available_cores() - 1 if number == "auto" else 0)


def keep_num_threads(saved: int) -> None:
    """Sets torch's threads to those of a saved run, unless `set_num_threads` was given a number for this process."""
    if _given == "auto":
        torch.set_num_threads(saved)


def num_threads() -> int | Literal["auto"]:
    """Returns torch's threads, or 'auto' if kernels have helpers."""
    count = torch.get_num_threads()
    return "auto" if count == 1 and _wanted[0] else count


def helper_counts() -> HelperCounts:
    """Returns what helpers did; zeros before the library is loaded."""
    counts = (ctypes.c_int64 * len(HelperCounts._fields))()
    if library.cache_info().currsize:
        library().alfish_read_helpers(counts)
    return HelperCounts(*counts)


def available_cores() -> int:
    """Returns the number of cores that this process may use, at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, period = QUOTA.read_text().split() if QUOTA.is_file() else ("max", "1")
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))
