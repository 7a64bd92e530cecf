"""The beginning of a process of alfish's own, before its imports, which take seconds."""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>; the signal comes when the thread that started this process ends


def follow(parent: int) -> None:
    """Ignores SIGINT, which is the parent's to answer, and has this process killed when its parent dies.

    A thread of this process could not do the latter: it does not run during an import, nor while an environment is in C
    code that keeps the interpreter's lock.

    Args:
      parent: process id of the one whose main thread has started this process; 0: another thread has, whose end is not
        the end of its process.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if parent and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before that
            os._exit(1)
