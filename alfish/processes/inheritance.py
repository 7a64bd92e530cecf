"""Environment variables and first calls of processes that alfish starts.

This module imports little, because a process calls `follow` before other imports, which take seconds.
"""

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Iterator

# First statement of a program for `python -c`. Python puts the working directory first in sys.path, but the process
# must import only from its PYTHONPATH, which is `import_path()`.
WITHOUT_WORKING_DIRECTORY = "import sys; sys.path[:] = filter(None, sys.path); "

# Variables that set the sizes of thread pools; a process that alfish starts uses one core.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")

PR_SET_PDEATHSIG = 1  # constant of <sys/prctl.h>; the kernel sends the signal when the starting thread ends


def follow(parent: int) -> None:
    """Makes this process ignore SIGINT, and makes the kernel kill it when its parent dies (Linux).

    A thread could not watch the parent, because it would not run during an import, or while C code of an environment
    holds the interpreter's lock.

    Args:
      parent: id of the parent process, if its main thread started this process; 0 means that another thread did, and
        that the parent is not watched.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if parent and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent died before the call
            os._exit(1)


def import_path() -> list[str]:
    """Returns sys.path with '' replaced by the path of the working directory."""
    return [entry or os.getcwd() for entry in sys.path]


@contextlib.contextmanager
def variable_set(name: str, value: str) -> Iterator[None]:
    """Sets an environment variable within the context, in the whole process."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
