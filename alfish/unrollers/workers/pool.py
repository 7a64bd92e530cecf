"""The pool of worker processes: starts, supervises, restarts and ends them, and shares memory with them."""

import contextlib
import os
import selectors
import signal
import socket
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import gin
import numpy as np
import torch

from alfish.data import Experience
from alfish.errors import RunError, UsageError
from alfish.parameters import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, checked
from alfish.unrollers.unroller import StepRecords
from alfish.unrollers.workers.channel import Channel
from alfish.unrollers.workers.heartbeat import DUMP_SIGNAL, HEARTBEAT_BYTES, Heartbeat
from alfish.unrollers.workers.messages import (
    Died,
    EnvironmentFailed,
    Failed,
    FromWorker,
    Grant,
    Plan,
    Refused,
    Segment,
    Setup,
    Started,
)
from alfish.unrollers.workers.pickling import to_bytes
from alfish.unrollers.workers.server import SERVER
from alfish.unrollers.workers.shared_memory import SharedMemory, SharedWeights
from alfish.unrollers.workers.slots import Slots
from alfish.unrollers.workers.transport import Deaths, Transport

STACK_BYTES = 1 << 16
CHECK_SECONDS = 0.5  # between two checks of what workers are doing
MAX_DELAY = 10.0  # seconds before a restart, at most


class Worker:
    """One worker: its present process, and the state that outlives it.

    Attributes:
      index: of the worker in the pool.
      generation: number of processes before the present one.
      alive: whether the process runs, or has ended unnoticed so far.
      started: whether the process has built and reset its environments.
    """

    def __init__(self, index: int, heartbeat: Heartbeat, stacks: SharedMemory):
        self.index, self.heartbeat, self._stacks = index, heartbeat, stacks
        self.generation = -1
        self.alive = False
        self.started = False
        self.failures_in_row = 0  # deaths since the last segment
        self.retry_at = 0.0  # monotonic time of the restart; 0: none is due
        self.overdue: int | None = None  # `Heartbeat.began` of an activity that the last check found too long
        self.granted: deque[float] = deque()  # monotonic times of the grants that are not filled yet

    def spawn(self, setup: Setup, fds: dict[str, int]) -> None:
        """Starts a process, which receives copies of these file descriptors."""
        self.heartbeat.clear()
        self.granted.clear()
        ours, theirs = socket.socketpair()
        held, lifeline = os.pipe()
        with theirs:
            try:
                self.process = SERVER.launch(
                    to_bytes(setup, "the worker's setup"), {"channel": theirs.fileno(), "lifeline": held, **fds}
                )
            except BaseException:
                ours.close()
                os.close(lifeline)
                raise
            finally:
                os.close(held)
        self.channel, self._lifeline = Channel(ours), lifeline
        self.alive, self.started, self.last_words = True, False, ""

    def grant(self, grant: Grant) -> None:
        """Sends a grant. Raises OSError if the process has ended."""
        self.channel.send(grant)
        self.granted.append(time.monotonic())

    def activity(self) -> tuple[int, float]:
        """Returns the activity, a constant of `Heartbeat`, and its duration in seconds.

        A worker that is idle although it has a grant is TAKING it, from the moment of the grant.
        """
        activity, seconds = self.heartbeat.get()
        if activity == Heartbeat.IDLE and self.granted:
            return Heartbeat.TAKING, min(seconds, time.monotonic() - self.granted[0])
        return activity, seconds

    def stacks(self) -> str:
        """Returns the stack of each thread of the process; empty if the process does not answer."""
        self._stacks.write(bytes(STACK_BYTES))
        os.lseek(self._stacks.fd, 0, os.SEEK_SET)  # both processes share the position
        self.process.send_signal(DUMP_SIGNAL)
        time.sleep(0.3)
        return self._stacks.read().strip(b"\0").decode(errors="replace")

    def kill(self) -> None:
        """Kills the process group: the worker, and processes that its environments have started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def end(self, timeout: float) -> int:
        """Ends the process, kills it after `timeout` seconds, and returns its exit code."""
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


class UnimportableError(RunError):
    """A worker cannot import a module.

    Attributes:
      module: its name.
    """

    def __init__(self, text: str, module: str):
        super().__init__(text)
        self.module = module


@gin.configurable(module="alfish.unrollers")
@checked
class Workers(Transport):
    """Pool of worker processes on this machine.

    Receives messages of workers, kills workers that hang, and restarts workers that have died.

    Args:
      count: number of workers.
      start_timeout: seconds for imports, building environments and their first reset.
      step_timeout: seconds for one vector step, for one call of the policy, and for the answer to a grant.
      close_timeout: seconds for closing environments at the end.
      max_deaths: deaths within `death_window` that are answered by a restart; `on_failure` answers the next one. The
        end of the process that forks workers, and of all workers with it, counts as one.
      death_window: seconds.
      on_failure: 'raise' ends the run; 'shrink' continues with the other workers.
      cpus: processor cores to pin workers to, in turn; None: workers are not pinned.

    Attributes:
      settings: the arguments but `count`, from which another machine makes an equal pool.
    """

    def __init__(
        self,
        count: PositiveInt,
        *,
        start_timeout: PositiveFloat = 300.0,
        step_timeout: PositiveFloat = 60.0,
        close_timeout: NonNegativeFloat = 5.0,
        max_deaths: NonNegativeInt = 5,
        death_window: PositiveFloat = 600.0,
        on_failure: Literal["raise", "shrink"] = "raise",
        cpus: Sequence[NonNegativeInt] | None = None,
    ):
        super().__init__()
        self.settings: dict[str, Any] = {
            "start_timeout": start_timeout,
            "step_timeout": step_timeout,
            "close_timeout": close_timeout,
            "max_deaths": max_deaths,
            "death_window": death_window,
            "on_failure": on_failure,
            "cpus": cpus,
        }
        self._limits = {
            Heartbeat.STARTING: start_timeout,
            Heartbeat.RESETTING: start_timeout,
            Heartbeat.STEPPING: step_timeout,
            Heartbeat.ACTING: step_timeout,
            Heartbeat.TAKING: step_timeout,
        }
        self._close_timeout, self._deaths = close_timeout, Deaths(max_deaths, death_window)
        self.shrinks, self._cpus = "Workers.on_failure = 'shrink'" if on_failure == "shrink" else "", cpus
        self.heartbeats = SharedMemory(HEARTBEAT_BYTES * count)
        self._stacks = [SharedMemory(STACK_BYTES) for _ in range(count)]
        self.all = [Worker(i, Heartbeat(self.heartbeats, i), self._stacks[i]) for i in range(count)]
        self._checked_at = 0.0
        self._selector = selectors.DefaultSelector()
        self._plan: Plan
        self._slots: Slots
        self._weights: SharedWeights

    @property
    def num_left(self) -> int:
        return sum(worker.alive or worker.retry_at > 0 for worker in self.all)

    @property
    def newest(self) -> int:
        return self._weights.newest

    def start(
        self, plan: Plan, structure: Any, tensors: Sequence[torch.Tensor], version: int, number: int | None = None
    ) -> None:
        """See `Transport`; `number`: see `publish`."""
        self._plan, self._slots = plan, Slots(plan.forms, plan.num_slots, structure)
        self._weights = SharedWeights(tensors)
        self.publish(version, number)
        for worker in self.all:
            self._spawn(worker)

    def publish(self, version: int, number: int | None = None) -> None:
        """See `Transport`; `number`: of the publication, above `newest`; None: the next one."""
        self._weights.publish(version, number)

    def grant(self, worker: Worker, grant: Grant) -> bool:
        if not (worker.started and worker.alive):
            return False
        try:
            worker.grant(grant)
        except OSError:  # it has died; `wait` will report that
            return False
        return True

    def read(self, segment: Segment) -> tuple[Experience, StepRecords]:
        return self._slots.read(segment)

    def words(self, segment: Segment) -> np.ndarray:
        """Returns a view of the whole slot of a segment, for another machine; see `Slots.words`."""
        return self._slots.words(segment.slot)

    def fileno(self) -> int:
        """Returns a descriptor that is readable while workers have sent messages that `wait` has not yielded."""
        return self._selector.fileno()  # type: ignore[attr-defined]

    def wait(self, timeout: float) -> Iterator[tuple[Worker, FromWorker]]:
        for worker in self.all:
            if not worker.alive and worker.retry_at and time.monotonic() >= worker.retry_at:
                self.num_restarts += 1
                self._spawn(worker)
        for key, _ in self._selector.select(timeout):
            yield from self._receive(key.data)
        if time.monotonic() - self._checked_at >= CHECK_SECONDS:
            self._checked_at = time.monotonic()
            for worker in self.all:
                if worker.alive:
                    yield from self._check(worker)

    def activities(self) -> str:
        parts = []
        for worker in self.all:
            activity, seconds = worker.activity()
            doing = f"{Heartbeat.NAMES[activity]} for {seconds:.0f} s" if worker.alive else "dead"
            parts.append(f"worker {worker.index} {doing}")
        return ", ".join(parts)

    def close(self) -> None:
        for worker in self.all:
            worker.retry_at = 0.0
            if worker.alive:
                worker.heartbeat.stop()
                worker.channel.close()
        deadline = time.monotonic() + self._close_timeout
        try:
            for worker in self.all:
                if worker.alive:
                    with contextlib.suppress(TimeoutError):
                        worker.process.wait(max(0.0, deadline - time.monotonic()))
        finally:  # also if a signal interrupts the wait
            for worker in self.all:
                if worker.alive:
                    worker.end(0)
            self._selector.close()

    def _spawn(self, worker: Worker) -> None:
        header, weights = self._weights.fds
        fds = {
            "heartbeats": self.heartbeats.fd,
            "stacks": self._stacks[worker.index].fd,
            "weights_header": header,
            "weights": weights,
            "slots": self._slots.fd,
        }
        cpu = None if self._cpus is None else self._cpus[worker.index % len(self._cpus)]
        worker.generation += 1
        worker.spawn(self._plan.setup(worker.index, worker.generation, cpu), fds)
        self._selector.register(worker.channel, selectors.EVENT_READ, worker)

    def _receive(self, worker: Worker) -> Iterator[tuple[Worker, FromWorker]]:
        ended = worker.process.poll() is not None  # a process of its environments may hold the socket open
        messages, gone = worker.channel.drain()
        for message in messages:
            if isinstance(message, Refused):
                raise UsageError(message.sentence)
            if isinstance(message, Failed) or (isinstance(message, EnvironmentFailed) and not worker.started):
                text = f"worker {worker.index} failed:\n{message.traceback.rstrip()}"
                missing = isinstance(message, Failed) and message.missing
                raise UnimportableError(text, missing) if missing else RunError(text)
            if isinstance(message, EnvironmentFailed):
                worker.last_words = f":\n{message.traceback.rstrip()}"
                continue
            if isinstance(message, Started):
                worker.started = True
            elif isinstance(message, Segment):
                worker.failures_in_row = 0
                worker.granted.popleft()
            yield worker, message
        if gone or ended:
            yield from self._on_death(worker)

    def _check(self, worker: Worker) -> Iterator[tuple[Worker, FromWorker]]:
        """Notices that a worker has ended, and kills a worker that hangs.

        A worker hangs if two checks in a row find the same activity over its limit. After the first one it may still
        report progress: the trainer may have been stopped together with it, or may not have read its messages yet.
        """
        if worker.process.poll() is not None:
            yield from self._receive(worker)
            return
        activity, seconds = worker.activity()
        limit = self._limits.get(activity)
        overdue = worker.heartbeat.began if limit is not None and seconds > limit else None
        if overdue is None or overdue != worker.overdue:
            worker.overdue = overdue
            return
        self.log(
            f"worker {worker.index} has been {Heartbeat.NAMES[activity]} for {seconds:.0f} s (the limit is {limit:g}); "
            f"it is killed. It was here:\n{worker.stacks().rstrip()}"
        )
        worker.kill()
        yield from self._on_death(worker)

    def _on_death(self, worker: Worker) -> Iterator[tuple[Worker, FromWorker]]:
        self._selector.unregister(worker.channel)
        worker.retry_at = 0.0
        code = worker.end(self._close_timeout)
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        if worker.process.lost_server is not None:
            how = f"with the process {worker.process.lost_server} that forks workers"
        text = f"worker {worker.index} ended {how}{worker.last_words}"
        count = self._deaths.add(worker.process.lost_server)
        if count > self._deaths.most:
            if not self.shrinks or not self.num_left:
                raise RunError(
                    f"{text}\nThat is death {count} of workers within {self._deaths.seconds:g} s, more than "
                    f"Workers.max_deaths = {self._deaths.most}"
                )
            self.log(f"{text}\nToo many deaths of workers: the run continues without this one")
            self._deaths.clear()
        else:
            self.log(f"{text}\nIt is restarted")
            worker.retry_at = time.monotonic() + min(0.1 * 2.0 ** min(worker.failures_in_row, 10), MAX_DELAY)
            worker.failures_in_row += 1
        yield worker, Died()
