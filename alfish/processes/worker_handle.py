"""The trainer's handle of a worker process, and the count of worker deaths."""

import contextlib
import os
import signal
import socket
import time
from collections import deque

from alfish.processes.channel import Channel, to_bytes
from alfish.processes.messages import EnvironmentFailed, Grant, Setup
from alfish.processes.server import SERVER
from alfish.processes.shared_memory import DUMP_SIGNAL, Heartbeat, SharedMemory


class Deaths:
    """Counts the deaths of workers within the last `seconds` seconds.

    Args:
      most: number of tolerated deaths.
      seconds: length of the window.
    """

    def __init__(self, most: int, seconds: float):
        self.most, self.seconds = most, seconds
        self._times: deque[float] = deque()
        self._newest: int | None = None  # newest cause that is not None

    def add(self, cause: int | None = None) -> int:
        """Adds a death at the current time; returns the number of deaths within the window.

        Args:
          cause: process id of the server if the worker died with it; all workers that die with one server count as one
            death. None means any other cause.
        """
        now = time.monotonic()
        if cause is None or cause != self._newest:
            self._times.append(now)
            self._newest = cause if cause is not None else self._newest
        while self._times and self._times[0] < now - self.seconds:
            self._times.popleft()
        return len(self._times)

    def clear(self) -> None:
        """Removes all deaths."""
        self._times.clear()


STACK_BYTES = 1 << 16


class Worker:
    """A worker: its current process, and the state that outlives the process.

    Attributes:
      index: index of the worker in the pool.
      generation: number of earlier processes.
      alive: whether the process is running, or its end has not been detected.
      started: whether the process has built and reset its environments.
    """

    def __init__(self, index: int, heartbeat: Heartbeat, stacks: SharedMemory):
        self.index, self.heartbeat, self._stacks = index, heartbeat, stacks
        self.generation = -1
        self.alive = False
        self.started = False
        self.failure: EnvironmentFailed | None = None  # failure of the current process
        self.failures_in_row = 0  # deaths since the last segment
        self.retry_at = 0.0  # monotonic time of the restart; 0 if no restart is due
        self.overdue: int | None = None  # `Heartbeat.began` of an activity that exceeded its limit at the last check
        self.granted: deque[float] = deque()  # monotonic times of grants that are not filled yet

    def spawn(self, setup: Setup, fds: dict[str, int]) -> None:
        """Starts a process, which receives copies of the file descriptors `fds` by name."""
        self.heartbeat.clear()
        self.granted.clear()
        ours, theirs = socket.socketpair()
        held, lifeline = os.pipe()
        with theirs:
            try:
                self.process = SERVER.launch(
                    setup.plan.program,
                    to_bytes(setup, "the worker's setup"),
                    {"channel": theirs.fileno(), "lifeline": held, **fds},
                )
            except BaseException:
                ours.close()
                os.close(lifeline)
                raise
            finally:
                os.close(held)
        self.channel, self._lifeline = Channel(ours), lifeline
        self.alive = True
        self.started = False
        self.failure = None

    def grant(self, grant: Grant) -> None:
        """Sends a grant. Raises OSError if the process has ended."""
        self.channel.send(grant)
        self.granted.append(time.monotonic())

    def activity(self) -> tuple[int, float]:
        """Returns the activity, a constant of `Heartbeat`, and its duration in seconds.

        An idle worker with a grant counts as TAKING, from the time of the grant.
        """
        activity, seconds = self.heartbeat.get()
        if activity == Heartbeat.IDLE and self.granted:
            return Heartbeat.TAKING, min(seconds, time.monotonic() - self.granted[0])
        return activity, seconds

    def stacks(self) -> str:
        """Returns the stack of each thread of the process; empty if the process does not answer."""
        self._stacks.write(bytes(STACK_BYTES))
        os.lseek(self._stacks.fd, 0, os.SEEK_SET)  # both processes share the file position
        self.process.send_signal(DUMP_SIGNAL)
        time.sleep(0.3)
        return self._stacks.read().strip(b"\0").decode(errors="replace")

    def kill(self) -> None:
        """Kills the process group: the worker, and processes that its environments have started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def end(self, timeout: float) -> int:
        """Asks the process to end, kills it if it still runs after `timeout` seconds, and returns its exit code.

        Afterwards, kills the processes that its environments have started.
        """
        self.heartbeat.stop()
        self.channel.close()
        try:
            code = self.process.wait(timeout)
        except TimeoutError:
            self.kill()
            code = self.process.wait()
        self.kill()
        os.close(self._lifeline)
        self.alive = False
        return code
