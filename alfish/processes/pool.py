"""The pool of worker processes: starts, supervises, restarts and ends them."""

import contextlib
import selectors
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from absl import logging

from alfish.errors import RunError, UsageError, first_line
from alfish.errors.user_code import relayed
from alfish.processes.messages import (
    Died,
    EnvironmentFailed,
    Failed,
    FromWorker,
    Grant,
    Plan,
    Refused,
    Segment,
    Started,
)
from alfish.processes.shared_memory import HEARTBEAT_BYTES, Heartbeat, SharedMemory
from alfish.processes.worker_handle import STACK_BYTES, Deaths, Worker

CHECK_SECONDS = 0.5  # seconds between two checks of what workers are doing
MAX_DELAY = 10.0  # maximum seconds before a restart


class Limits(NamedTuple):
    """Limits of a pool of workers, and processor cores for pinning; see the arguments of `Workers`."""

    start_timeout: float
    step_timeout: float
    close_timeout: float
    max_deaths: int
    death_window: float
    on_failure: str
    cpus: Sequence[int] | None


class UnimportableError(RunError):
    """A worker cannot import a module.

    Attributes:
      module: name of the module.
    """

    def __init__(self, text: str, module: str):
        super().__init__(text)
        self.module = module


class Pool:
    """Worker processes of this machine.

    The pool receives messages, kills workers that hang, and restarts workers that have died.

    Args:
      count: number of workers.
      limits: limits and processor cores of the workers.

    Attributes:
      all: all workers, by index.
      num_left: number of workers that run or will be restarted.
      num_restarts: number of restarts.
      shrinks: text of the setting that allows the pool to continue with fewer workers; '' if the pool needs all
        workers.
      log: function that receives lines for the user.
    """

    all: Sequence[Worker]
    num_restarts = 0
    # Set by `launch`.
    _plan: Plan
    _memories: dict[str, int]

    def __init__(self, count: int, limits: Limits):
        self.log: Callable[[str], None] = logging.warning
        self._timeouts = {
            Heartbeat.STARTING: limits.start_timeout,
            Heartbeat.RESETTING: limits.start_timeout,
            Heartbeat.STEPPING: limits.step_timeout,
            Heartbeat.ACTING: limits.step_timeout,
            Heartbeat.TAKING: limits.step_timeout,
        }
        self.limits, self._deaths = limits, Deaths(limits.max_deaths, limits.death_window)
        self.shrinks = "Workers.on_failure = 'shrink'" if limits.on_failure == "shrink" else ""
        self.heartbeats = SharedMemory(HEARTBEAT_BYTES * count)
        self._stacks = [SharedMemory(STACK_BYTES) for _ in range(count)]
        self.all = [Worker(i, Heartbeat(self.heartbeats, i), self._stacks[i]) for i in range(count)]
        self._checked_at = 0.0
        self._selector = selectors.DefaultSelector()

    @property
    def num_left(self) -> int:
        return sum(worker.alive or worker.retry_at > 0 for worker in self.all)

    def launch(self, plan: Plan, memories: dict[str, int]) -> None:
        """Starts all workers.

        Args:
          plan: settings that the workers share.
          memories: descriptors of shared memories by name: 'slots', and 'weights_header' and 'weights' of
            `Publications`. The descriptors must stay open.
        """
        self._plan, self._memories = plan, memories
        for worker in self.all:
            self._spawn(worker)

    def grant(self, worker: Worker, grant: Grant) -> bool:
        """Sends a grant. Returns False if the worker has not started, or has ended."""
        if not (worker.started and worker.alive):
            return False
        try:
            worker.grant(grant)
        except OSError:  # the worker has died; `wait` reports it
            return False
        return True

    def fileno(self) -> int:
        """Returns a descriptor that is readable if there are messages for `wait`."""
        return self._selector.fileno()  # type: ignore[attr-defined]

    def wait(self, timeout: float) -> Iterator[tuple[Worker, FromWorker]]:
        """Yields messages of workers; see `Transport`."""
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
        """Returns a clause about what each worker is doing."""
        parts = []
        for worker in self.all:
            activity, seconds = worker.activity()
            doing = f"{Heartbeat.NAMES[activity]} for {seconds:.0f} s" if worker.alive else "dead"
            parts.append(f"worker {worker.index} {doing}")
        return ", ".join(parts)

    def close(self) -> None:
        """Ends all workers at the same time."""
        for worker in self.all:
            worker.retry_at = 0.0
            if worker.alive:
                worker.heartbeat.stop()
                worker.channel.close()
        deadline = time.monotonic() + self.limits.close_timeout
        try:
            for worker in self.all:
                if worker.alive:
                    with contextlib.suppress(TimeoutError):
                        worker.process.wait(max(0.0, deadline - time.monotonic()))
        finally:  # runs also if a signal interrupts the wait
            for worker in self.all:
                if worker.alive:
                    worker.end(0)
            self._selector.close()

    def _spawn(self, worker: Worker) -> None:
        fds = {**self._memories, "heartbeats": self.heartbeats.fd, "stacks": self._stacks[worker.index].fd}
        cpus = self.limits.cpus
        cpu = None if cpus is None else cpus[worker.index % len(cpus)]
        worker.generation += 1
        try:
            worker.spawn(self._plan.setup(worker.index, worker.generation, cpu), fds)
        except OSError as error:
            raise RunError(
                f"worker {worker.index} cannot be started ({first_line(error)}); lower the number of workers, or free "
                "memory and processes"
            ) from error
        self._selector.register(worker.channel, selectors.EVENT_READ, worker)

    def _receive(self, worker: Worker) -> Iterator[tuple[Worker, FromWorker]]:
        ended = worker.process.poll() is not None  # a process of an environment may keep the socket open
        messages, gone = worker.channel.drain()
        for message in messages:
            if isinstance(message, Refused):
                raise UsageError(message.sentence)
            if isinstance(message, Failed) or (isinstance(message, EnvironmentFailed) and not worker.started):
                missing = isinstance(message, Failed) and message.missing
                if message.sentence and not missing:
                    raise relayed(f"worker {worker.index}: {message.sentence}", message.traceback)
                text = f"worker {worker.index} failed:\n{message.traceback.rstrip()}"
                raise UnimportableError(text, missing) if missing else RunError(text)
            if isinstance(message, EnvironmentFailed):
                worker.failure = message
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
        """Handles the end of a worker; kills a worker that hangs.

        A worker hangs if two consecutive checks find the same activity over its limit. After the first check, the
        worker may still report progress, for example if the trainer and the worker were suspended together.
        """
        if worker.process.poll() is not None:
            yield from self._receive(worker)
            return
        activity, seconds = worker.activity()
        limit = self._timeouts.get(activity)
        overdue = worker.heartbeat.began if limit is not None and seconds > limit else None
        if overdue is None or overdue != worker.overdue:
            worker.overdue = overdue
            return
        self.log(
            f"worker {worker.index} has been {Heartbeat.NAMES[activity]} for {seconds:.0f} s (the limit is {limit:g}); "
            f"it is killed. Its stack: \n{worker.stacks().rstrip()}"
        )
        worker.kill()
        yield from self._on_death(worker)

    def _on_death(self, worker: Worker) -> Iterator[tuple[Worker, FromWorker]]:
        self._selector.unregister(worker.channel)
        worker.retry_at = 0.0
        code = worker.end(self.limits.close_timeout)
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        if worker.process.lost_server is not None:
            how = f"with the process {worker.process.lost_server} that forks workers"
        text = f"worker {worker.index} ended {how}"
        words = "" if worker.failure is None else f":\n{worker.failure.traceback.rstrip()}"
        count = self._deaths.add(worker.process.lost_server)
        if count > self._deaths.most:
            if not self.shrinks or not self.num_left:
                limit = f"death {count} of workers within {self._deaths.seconds:g} s, more than Workers.max_deaths"
                limit = f"That is {limit} = {self._deaths.most}"
                if worker.failure is None:
                    raise RunError(f"{text}\n{limit}")
                raise relayed(f"{text}: {worker.failure.sentence}\n{limit}", worker.failure.traceback)
            self.log(f"{text}{words}\nToo many deaths of workers: the run continues without this worker")
            self._deaths.clear()
        else:
            self.log(f"{text}{words}\nIt is restarted")
            worker.retry_at = time.monotonic() + min(0.1 * 2.0 ** min(worker.failures_in_row, 10), MAX_DELAY)
            worker.failures_in_row += 1
        yield worker, Died()
