"""First calls of a process that trains one of many runs."""

import os
import signal
import threading
import time
from pathlib import Path

from alfish.runs import files

KILL_SECONDS = 600.0  # from SIGTERM until a member that nobody waits for is killed: time to save a large replay buffer
LOOK_SECONDS = 0.2


def follow(lifeline: int, directory: str) -> None:
    """Makes this process end, with a checkpoint, when its starter ends; returns when the run's directory is unlocked.

    Args:
      lifeline: read end of a pipe; the starter holds the other end, and nobody writes to it.
      directory: of the run. The process of a starter that was killed may still be saving its checkpoint there.
    """
    os.set_inheritable(lifeline, False)
    threading.Thread(target=_end_with, args=(lifeline,), name="lifeline", daemon=True).start()
    holder = threading.Event()  # any object that a weak reference may refer to
    while (unlock := files.lock(Path(directory), holder)) is None:
        time.sleep(LOOK_SECONDS)
    unlock()


def _end_with(lifeline: int) -> None:
    os.read(lifeline, 1)  # returns when the pipe is closed
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(KILL_SECONDS)
    os.killpg(0, signal.SIGKILL)
