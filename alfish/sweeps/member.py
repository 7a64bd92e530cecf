"""Start of a process that trains one of many runs: it ends with its starter, and waits for its directory."""

import os
import signal
import threading
import time
from pathlib import Path

from alfish.runs import files

KILL_SECONDS = 600.0  # seconds from SIGTERM to SIGKILL of an abandoned run, enough to save a large replay buffer
LOOK_SECONDS = 0.2


def follow(lifeline: int, directory: str) -> None:
    """Makes this process save and end when its starter ends; waits until the run's directory is unlocked.

    Args:
      lifeline: read end of a pipe without data; the starter holds the other end.
      directory: directory of the run, to which a process of a killed starter may still be saving a checkpoint.
    """
    os.set_inheritable(lifeline, False)
    threading.Thread(target=_end_with, args=(lifeline,), name="lifeline", daemon=True).start()
    holder = threading.Event()  # any weakly referenceable object
    while (unlock := files.lock(Path(directory), holder)) is None:
        time.sleep(LOOK_SECONDS)
    unlock()


def _end_with(lifeline: int) -> None:
    os.read(lifeline, 1)  # returns when the pipe is closed
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(KILL_SECONDS)
    os.killpg(0, signal.SIGKILL)
