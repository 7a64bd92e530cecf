"""First calls of a process that alfish starts, before its imports, which take seconds."""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>; the kernel sends the signal when the starting thread ends


def follow(parent: int) -> None:
    """Makes this process ignore SIGINT, and makes the kernel kill it when its parent dies (Linux).

    A thread of this process could not watch the parent: it does not run during an import, nor while an environment
    holds the interpreter's lock in C code.

    Args:
      parent: id of the parent process, whose main thread started this process; 0: another thread started it, so the
        parent is not watched.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if parent and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent died before the call
            os._exit(1)
