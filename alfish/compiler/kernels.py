"""Builds and loads the library of alfish's own kernels, and configures the helper threads of the kernels.

Helpers are threads that do a part of a kernel's work on cores that other processes do not use (`thread_pool.h`).
Helpers do not change results. They are used only if torch has one thread, because torch's threads wait in busy loops
and would occupy these cores.
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

# All kernels are in one library, so that they share one thread pool. Each file may use the files that precede it.
SOURCES = ("thread_pool.h", "matmul.cpp")
# Linux's file with the processor time that the container may use in each period (or "max"), and the period, in us.
QUOTA = Path("/sys/fs/cgroup/cpu.max")

_given: int | Literal["auto"] = "auto"  # argument of `set_num_threads`
_wanted = (0, True)  # arguments of `use_helpers`
_file = ""  # path of the library; empty if torch's compiler builds it


class HelperCounts(NamedTuple):
    """Statistics of helpers since the library was loaded.

    Attributes:
      allowed: number of helpers that may work now.
      calls: number of kernel calls that had helpers.
      tasks: number of tasks into which these calls were divided.
      helped: number of these tasks that helpers did.
      waited: time that calls waited for helpers, in nanoseconds.
      pauses: number of times that helpers paused because they did not make calls faster.
    """

    allowed: int = 0
    calls: int = 0
    tasks: int = 0
    helped: int = 0
    waited: int = 0
    pauses: int = 0


@functools.cache
def library() -> ctypes.CDLL:
    """Returns the library and registers its operators in torch; builds the library if torch's cache lacks it.

    Raises:
      RuntimeError, OSError: the library cannot be built.
      TorchChanged: this release of torch cannot build the library.
    """
    loaded: ctypes.CDLL = ctypes.CDLL(_file) if _file else _being_built()()
    loaded.alfish_configure_helpers(*_wanted)
    return loaded


def begin_to_build() -> None:
    """Starts building the library in a thread, if it is not built yet; raises the same errors as `library`."""
    if not _file:
        _being_built()


@functools.cache
def _being_built() -> Callable[[], ctypes.CDLL]:
    """Starts building the library if needed, and returns a function that waits for the library and loads it."""
    source = "".join(Path(__file__).with_name(name).read_text() for name in SOURCES)
    thread = ThreadPoolExecutor(1)
    with cache.in_use(), torch_internals.build_settings():
        load: Callable[[], ctypes.CDLL] = torch_internals.CppCodeCache.load_async(source, submit_fn=thread.submit)
    thread.shutdown(wait=False)
    return load


def library_file() -> str | None:
    """Returns the file of the library; None if the library is not loaded."""
    return library()._name if library.cache_info().currsize else None


def use_library(file: str) -> None:
    """Loads the library from a file that another process built, unless the library is already loaded.

    Raises:
      OSError: the file cannot be loaded.
    """
    global _file
    if not library.cache_info().currsize:
        ctypes.CDLL(file)  # if this raises, `_file` stays empty, and `library` builds the library
        _file = file
        library()


def use_helpers(number: int, adapts: bool = True) -> None:
    """Sets the number of threads that help the calling thread with large products.

    Args:
      number: maximum number of helpers.
      adapts: whether helpers pause while other processes use the cores; False is for measurements and tests.
    """
    global _wanted
    _wanted = number, adapts
    if library.cache_info().currsize:
        library().alfish_configure_helpers(*_wanted)


def set_num_threads(number: int | Literal["auto"]) -> None:
    """Sets the number of torch's threads; 'auto' means one thread, plus a helper for each other core."""
    global _given
    _given = number
    torch.set_num_threads(1 if number == "auto" else number)
    use_helpers(available_cores() - 1 if number == "auto" else 0)


def keep_num_threads(saved: int) -> None:
    """Sets the number of torch's threads to that of a saved run, unless `set_num_threads` was called with a number."""
    if _given == "auto":
        torch.set_num_threads(saved)


def num_threads() -> int | Literal["auto"]:
    """Returns the number of torch's threads, or 'auto' if kernels have helpers."""
    count = torch.get_num_threads()
    return "auto" if count == 1 and _wanted[0] else count


def helper_counts() -> HelperCounts:
    """Returns the counts of helpers; all are 0 before the library is loaded."""
    counts = (ctypes.c_int64 * len(HelperCounts._fields))()
    if library.cache_info().currsize:
        library().alfish_read_helpers(counts)
    return HelperCounts(*counts)


def available_cores() -> int:
    """Returns the number of cores that this process may use, at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, period = QUOTA.read_text().split() if QUOTA.is_file() else ("max", "1")
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))
