"""What the trainer sees of a worker without the worker's help: what it is doing, and for how long."""

import signal
import time

import torch

from alfish.unrollers.workers.shared_memory import SharedMemory

HEARTBEAT_BYTES = 64  # from one worker's words to the next one's, a cache line
DUMP_SIGNAL = signal.SIGUSR1  # answered by a worker with where each of its threads is


class Heartbeat:
    """What a worker is doing and since when: two integers that the trainer looks at, and one that it sets.

    Args:
      memory: of all workers, `HEARTBEAT_BYTES` each.
      index: of the worker.
    """

    IDLE, STARTING, RESETTING, STEPPING, ACTING, TAKING = range(6)
    NAMES = (
        "waiting for the trainer",
        "starting",
        "resetting environments",
        "stepping environments",
        "acting",
        "about to take up a slot",  # the trainer's name for a worker that is idle with a slot
    )

    def __init__(self, memory: SharedMemory, index: int):
        self._words = memory.tensor(HEARTBEAT_BYTES * index, (3,), torch.int64).numpy()

    def set(self, activity: int) -> None:
        """The worker is at something else from now on."""
        self._words[1] = time.monotonic_ns()
        self._words[0] = activity

    def get(self) -> tuple[int, float]:
        """The activity, and for how many seconds it has gone on."""
        return int(self._words[0]), (time.monotonic_ns() - int(self._words[1])) / 1e9

    @property
    def began(self) -> int:
        """When the activity began, by the monotonic clock."""
        return int(self._words[1])

    @property
    def stopped(self) -> bool:
        """Whether the worker was asked to come to an end."""
        return bool(self._words[2])

    def stop(self) -> None:
        """Asks the worker to come to an end at its next step."""
        self._words[2] = 1

    def clear(self) -> None:
        """Begins anew, for a process that is about to start."""
        self._words[2] = 0
        self.set(self.STARTING)
