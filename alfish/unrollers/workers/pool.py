"""The trainer's side of its worker processes: starting, hearing, watching, restarting and ending them."""

import contextlib
import os
import selectors
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import gin
import torch
from absl import logging

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

STACK_BYTES = 1 << 16
LOOK_SECONDS = 0.5  # between two looks at what workers are doing
MAX_DELAY = 10.0  # seconds before a worker is started again


class Worker:
    """One worker process, and what replaces it when it dies.

    Attributes:
      generation: how often it was started before.
      alive: whether there is a process that has not been given up.
    """

    def __init__(self, index: int, heartbeat: Heartbeat, stacks: SharedMemory):
        self.index, self.heartbeat, self._stacks = index, heartbeat, stacks
        self.generation = -1
        self.alive = False
        self.started = False  # it has told so itself
        self.failures_in_row = 0  # deaths since it last filled a segment
        self.retry_at = 0.0  # when to start it again, by the monotonic clock
        self.overdue: int | None = None  # when what it was found to be at for too long began
        self.granted: deque[float] = deque()  # when, by the monotonic clock; of the slots that it has not filled yet

    def spawn(self, setup: Setup, fds: dict[str, int]) -> None:
        """Starts the process, which gets copies of these descriptors."""
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

    def grant(self, fill: Grant) -> None:
        """Gives the process a slot to fill. Raises OSError where it is gone."""
        self.channel.send(fill)
        self.granted.append(time.monotonic())

    def activity(self) -> tuple[int, float]:
        """What the process is doing, as `Heartbeat` counts, and for how many seconds.

        It does not take a slot up from when it has been granted one and waits for the trainer nevertheless.
        """
        activity, seconds = self.heartbeat.get()
        if activity == Heartbeat.IDLE and self.granted:
            return Heartbeat.TAKING, min(seconds, time.monotonic() - self.granted[0])
        return activity, seconds

    def stacks(self) -> str:
        """Where each thread of the process is, asked of it; empty if it cannot say any more."""
        self._stacks.write(bytes(STACK_BYTES))
        os.lseek(self._stacks.fd, 0, os.SEEK_SET)  # the position is the process's too
        self.process.send_signal(DUMP_SIGNAL)
        time.sleep(0.3)
        return self._stacks.read().strip(b"\0").decode(errors="replace")

    def kill(self) -> None:
        """Kills the process and those that it has started, which are of its group and may outlive it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def end(self, timeout: float) -> int:
        """Ends the process, by force after `timeout` seconds; returns its exit code."""
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


@gin.configurable(module="alfish.unrollers")
@checked
class Workers:
    """Worker processes: starts them, hears what they tell, kills what hangs, and starts anew what has died.

    Args:
      count: how many.
      start_timeout: seconds to import, build environments and reset them for the first time.
      step_timeout: seconds that one vector step may take, or acting, or to take up a slot.
      close_timeout: seconds to close environments at the end.
      max_deaths: so many within `death_window` seconds are answered by a new process; one more by `on_failure`.
      death_window: see above.
      on_failure: 'raise' ends the run; 'shrink' goes on with the other workers.
      cpus: numbers of the processor cores to keep workers on, in turn; None: anywhere.

    Attributes:
      all: a `Worker` for each index.
      shrinks: whether the run goes on with fewer of them, see `on_failure`.
      num_restarts: processes that took the place of dead ones.
      log: takes a line for the user.
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
        self._limits = {
            Heartbeat.STARTING: start_timeout,
            Heartbeat.RESETTING: start_timeout,
            Heartbeat.STEPPING: step_timeout,
            Heartbeat.ACTING: step_timeout,
            Heartbeat.TAKING: step_timeout,
        }
        self._close_timeout, self._max_deaths, self._death_window = close_timeout, max_deaths, death_window
        self.shrinks, self._cpus = on_failure == "shrink", cpus
        self.pulses = SharedMemory(HEARTBEAT_BYTES * count)
        self._stacks = [SharedMemory(STACK_BYTES) for _ in range(count)]
        self.all = [Worker(i, Heartbeat(self.pulses, i), self._stacks[i]) for i in range(count)]
        self._deaths: deque[float] = deque()
        self.num_restarts = 0
        self._looked = 0.0
        self._selector = selectors.DefaultSelector()
        self._plan: Plan
        self._slots: Slots
        self._board: SharedWeights
        self.log: Callable[[str], None] = logging.warning

    @property
    def num_left(self) -> int:
        """How many workers run, or are to be started again."""
        return sum(worker.alive or worker.retry_at > 0 for worker in self.all)

    @property
    def newest(self) -> int:
        """Number of the newest publication of weights."""
        return self._board.newest

    def start(self, plan: Plan, structure: Any, tensors: Sequence[torch.Tensor], version: int) -> None:
        """Starts all workers.

        Args:
          plan: of the run.
          structure: of a segment, see `Slots`.
          tensors: weights, whose values `publish` tells the workers.
          version: of these values, see `publish`.
        """
        self._plan, self._slots = plan, Slots(plan.forms, plan.num_slots, structure)
        self._board = SharedWeights(tensors)
        self.publish(version)
        for worker in self.all:
            self._spawn(worker)

    def publish(self, version: int) -> None:
        """Tells workers the present values of the weights; `version` comes back in `Segment.version`."""
        self._board.publish(version)

    def grant(self, worker: Worker, fill: Grant) -> bool:
        """Gives a worker a slot to fill; returns whether the worker is there to take it."""
        if not (worker.started and worker.alive):
            return False
        try:
            worker.grant(fill)
        except OSError:  # it has died, and the next wait will say so
            return False
        return True

    def read(self, segment: Segment) -> tuple[Experience, StepRecords]:
        """Returns the rows of a segment and what arrived: views, until its slot is granted again."""
        return self._slots.read(segment)

    def wait(self, timeout: float) -> Iterator[tuple[Worker, FromWorker]]:
        """Messages of the workers, once there are any, or once `timeout` seconds are over.

        A death is a message of its own, `Died`, after the last of the worker's others. What has to be restarted is.

        Raises:
          RunError: what makes no sense to try again, with the worker's traceback; or too many deaths.
          UsageError: an environment was refused.
        """
        for worker in self.all:
            if not worker.alive and worker.retry_at and time.monotonic() >= worker.retry_at:
                self.num_restarts += 1
                self._spawn(worker)
        for key, _ in self._selector.select(timeout):
            yield from self._hear(key.data)
        if time.monotonic() - self._looked >= LOOK_SECONDS:
            self._looked = time.monotonic()
            for worker in self.all:
                if worker.alive:
                    yield from self._look(worker)

    def activities(self) -> str:
        """A clause that says what each worker is doing."""
        parts = []
        for worker in self.all:
            activity, seconds = worker.activity()
            doing = f"{Heartbeat.NAMES[activity]} for {seconds:.0f} s" if worker.alive else "dead"
            parts.append(f"worker {worker.index} {doing}")
        return ", ".join(parts)

    def close(self) -> None:
        """Ends all of them, together."""
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
        finally:  # also where a signal breaks this wait off
            for worker in self.all:
                if worker.alive:
                    worker.end(0)
            self._selector.close()

    def _spawn(self, worker: Worker) -> None:
        header, board = self._board.fds
        fds = {
            "pulses": self.pulses.fd,
            "stacks": self._stacks[worker.index].fd,
            "board_header": header,
            "board": board,
            "slots": self._slots.fd,
        }
        cpu = None if self._cpus is None else self._cpus[worker.index % len(self._cpus)]
        worker.generation += 1
        worker.spawn(self._plan.setup(worker.index, worker.generation, cpu), fds)
        self._selector.register(worker.channel, selectors.EVENT_READ, worker)

    def _hear(self, worker: Worker) -> Iterator[tuple[Worker, FromWorker]]:
        ended = worker.process.poll() is not None  # a process that it has started may hold its socket on
        messages, gone = worker.channel.drain()
        for message in messages:
            if isinstance(message, Refused):
                raise UsageError(message.sentence)
            if isinstance(message, Failed) or (isinstance(message, EnvironmentFailed) and not worker.started):
                raise RunError(f"worker {worker.index} failed:\n{message.traceback.rstrip()}")
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

    def _look(self, worker: Worker) -> Iterator[tuple[Worker, FromWorker]]:
        """Buries a worker that has ended, and kills one that has been at one thing for too long, in two looks: the
        trainer may have been stopped with it, or not have read what it sent."""
        if worker.process.poll() is not None:
            yield from self._hear(worker)
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
        now = time.monotonic()
        self._deaths.append(now)
        while self._deaths and self._deaths[0] < now - self._death_window:
            self._deaths.popleft()
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        text = f"worker {worker.index} ended {how}{worker.last_words}"
        count = len(self._deaths)
        if count > self._max_deaths:
            if not self.shrinks or not self.num_left:
                raise RunError(
                    f"{text}\nThat is death {count} of workers within {self._death_window:g} s, more than "
                    f"Workers.max_deaths = {self._max_deaths}"
                )
            self.log(f"{text}\nToo many deaths of workers: the run goes on without it")
            self._deaths.clear()
        else:
            self.log(f"{text}\nIt is started again")
            worker.retry_at = now + min(0.1 * 2.0 ** min(worker.failures_in_row, 10), MAX_DELAY)
            worker.failures_in_row += 1
        yield worker, Died()
