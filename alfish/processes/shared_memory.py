"""Memory that the trainer and its workers share: bytes, publications of the weights, and activities of workers.

The memory has no name in a file system, so the system frees it when the last process that maps it ends, even by
SIGKILL. There are no locks: messages determine who may write a segment, and readers of weights verify what they have
read.
"""

import mmap
import os
import signal
import tempfile
import time
import weakref

import numpy as np

TRAILER_WORDS = 8  # words after each copy of the weights: one cache line, of which the last three words are used
HEARTBEAT_BYTES = 64  # bytes for each worker: one cache line
DUMP_SIGNAL = signal.SIGUSR1  # signal that a worker answers with the stacks of its threads


class SharedMemory:
    """Shared bytes, initially 0.

    Args:
      size: number of bytes.
      fd: descriptor of the memory that another process made; None makes a new memory.
    """

    def __init__(self, size: int, fd: int | None = None):
        self.size = max(size, 1)
        if fd is None:
            fd = _anonymous_file()
            os.ftruncate(fd, self.size)
        os.set_inheritable(fd, False)  # programs that environments start do not inherit the memory
        self.fd = fd
        self.close = weakref.finalize(self, os.close, fd)  # the bytes are freed with the last view of them
        self._map = mmap.mmap(fd, self.size)

    def words(self, begin: int, count: int) -> np.ndarray:
        """Returns a view of `count` words of 8 bytes, from word `begin` on: `[count]` int64."""
        return np.frombuffer(self._map, np.int64, count, 8 * begin)

    def write(self, data: bytes) -> None:
        """Copies bytes to the beginning of the memory."""
        self._map[: len(data)] = data

    def read(self) -> bytes:
        """Returns a copy of all bytes."""
        return self._map[:]


class Publications:
    """Weights that the trainer publishes and workers read, without a lock.

    There are two copies of the weights. The trainer overwrites the older copy, and then writes the number of the
    publication to a header. Other processors may see these writes in any order (ARM reorders them), because Python has
    no memory fence. The trainer may also overwrite a copy while it is read. Each copy therefore ends with its number,
    its version and a checksum, a word that makes the sum of all words 0. A reader copies everything to private memory,
    and repeats the copy until number and checksum are correct.

    Args:
      num_words: length of the weights in words of 8 bytes.
      header, fd: descriptors of the trainer's memories, in a worker; None makes new memories.

    Attributes:
      copies: two views `[num_words]` int64; a writer fills the older copy.
      own: weights that were read last, `[num_words]` int64.
    """

    def __init__(self, num_words: int, header: int | None = None, fd: int | None = None):
        length = num_words + TRAILER_WORDS
        self._header_memory = SharedMemory(64, header)
        self._newest = self._header_memory.words(0, 1)  # number of the newest publication
        self._memory = SharedMemory(2 * 8 * length, fd)
        self._whole = [self._memory.words(k * length, length) for k in range(2)]
        self._taken = np.zeros(length, np.int64)
        self.copies, self.own = [whole[:num_words] for whole in self._whole], self._taken[:num_words]

    @property
    def fds(self) -> tuple[int, int]:
        """Descriptors of the two memories, header first."""
        return self._header_memory.fd, self._memory.fd

    @property
    def newest(self) -> int:
        """Number of the newest publication."""
        return int(self._newest[0])

    def publish(self, words: np.ndarray, number: int, version: int) -> None:
        """Publishes weights `[num_words]` int64; see `commit`."""
        self.copies[number % 2][:] = words
        self.commit(number, version)

    def commit(self, number: int, version: int) -> None:
        """Publishes the weights that were written into `copies[number % 2]`.

        Args:
          number: number of the publication, higher than that of the copy that it replaces; it can be `newest - 1` if
            two publications are written in reverse order.
          version: `policy_version` of the weights.
        """
        whole = self._whole[number % 2]
        whole[-3:] = number, version, 0
        whole[-1:] = -whole.sum(keepdims=True)  # integer arrays wrap around at overflow
        self._newest[0] = max(number, self.newest)

    def held(self, parity: int) -> int:
        """Returns the number of the publication in `copies[parity]`; 0 without one. Only the publisher may call it."""
        return int(self._whole[parity][-3])

    def read(self, number: int | None = None) -> int:
        """Copies a publication into `own` and returns its version.

        Args:
          number: number of a publication that a message has announced; None means the newest.

        Raises:
          LookupError: the publication has been overwritten.
        """
        while True:
            wanted = self.newest if number is None else number
            self._take(wanted % 2)
            found, version, _ = self._taken[-3:].tolist()
            is_whole = int(self._taken.sum()) == 0
            if is_whole and (found == wanted or (number is None and found > wanted)):
                return version
            if number is not None:  # the publication was complete before the message was sent
                raise LookupError(f"publication {number} has been overwritten")

    def _take(self, k: int) -> None:
        self._taken[:] = self._whole[k]


class Heartbeat:
    """Activity of a worker in shared memory, so that the trainer can read it at any time.

    Three integers: the activity and its start time, written by the worker, and the trainer's request to stop.

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


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("alfish")
    with tempfile.TemporaryFile() as file:  # the file has no name from the start
        return os.dup(file.fileno())
