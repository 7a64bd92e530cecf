"""Activity of a worker and its start time, in shared memory, so that the trainer can read them at any time."""

import signal
import time

from alfish.processes.shared_memory import SharedMemory

HEARTBEAT_BYTES = 64  # bytes for each worker: one cache line
DUMP_SIGNAL = signal.SIGUSR1  # signal that a worker answers with the stacks of its threads


class Heartbeat:
    """Three integers: an activity and its start time, written by the worker, and the trainer's request to stop.

    Args:
      memory: memory with `HEARTBEAT_BYTES` for each worker.
      index: index of the worker.
    """

    IDLE, STARTING, RESETTING, STEPPING, ACTING, TAKING = range(6)
    NAMES = (
        "waiting for the trainer",
        "starting",
        "resetting environments",
        "stepping environments",
        "acting",
        "about to fill a slot",  # an idle worker that has a grant, see `Worker.activity`
    )

    def __init__(self, memory: SharedMemory, index: int):
        self._words = memory.words(HEARTBEAT_BYTES // 8 * index, 3)

    def set(self, activity: int) -> None:
        """Records that the worker begins an activity."""
        self._words[1] = time.monotonic_ns()
        self._words[0] = activity

    def get(self) -> tuple[int, float]:
        """Returns the activity and its duration in seconds."""
        return int(self._words[0]), (time.monotonic_ns() - int(self._words[1])) / 1e9

    @property
    def began(self) -> int:
        """Monotonic time at which the activity began, in nanoseconds."""
        return int(self._words[1])

    @property
    def stopped(self) -> bool:
        """True if the worker was asked to stop."""
        return bool(self._words[2])

    def stop(self) -> None:
        """Asks the worker to stop before its next step."""
        self._words[2] = 1

    def clear(self) -> None:
        """Resets the three integers for a new process."""
        self._words[2] = 0
        self.set(self.STARTING)
