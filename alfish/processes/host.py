"""The host: a Ray actor that runs workers on one machine.

All methods of the actor run in one event loop. The actor runs no code of the user. Environments and policies run in
worker processes that the actor's server forks, as on the trainer's machine.

The actor does not import torch. The server, which imports torch, therefore starts as soon as the actor has a process.
"""

import asyncio
import contextlib
import importlib.metadata
import os
import platform
import socket
from typing import NamedTuple

import numpy as np

import alfish
from alfish.errors import RunError, UsageError
from alfish.errors.user_code import Elsewhere
from alfish.processes.messages import FromWorker, Grant, Plan, Segment
from alfish.processes.pool import Limits, Pool, UnimportableError
from alfish.processes.server import SERVER
from alfish.processes.shared_memory import Publications, SharedMemory


class Greeting(NamedTuple):
    """First answer of a host, after its process has started."""

    machine: str  # name of the host's machine
    pid: int
    versions: dict[str, str]  # versions of packages, which must equal the trainer's


class Publication(NamedTuple):
    """Number and version of a publication of weights; the weights, `[weight_words]` int64, are sent separately."""

    number: int  # number of the publication, the same on all machines; see `Grant.publication`
    version: int  # `policy_version` of the weights


class HostPlan(NamedTuple):
    """Settings that all hosts share."""

    num_workers: int  # number of workers on each host
    limits: Limits
    plan: Plan  # plan of the run
    weight_words: int  # size of the weights in words of 8 bytes
    patience: float  # seconds without a call from the trainer after which a host ends itself


class Order(NamedTuple):
    """A grant to one process of a host."""

    worker_index: int  # index of the worker on its host
    generation: int  # generation of the process; a later process does not receive the grant
    grant: Grant  # grant of one of the host's slots


class Event(NamedTuple):
    """A message from a worker."""

    worker_index: int  # index of the worker on its host
    message: FromWorker
    words: np.ndarray | None = None  # contents of the slot of a `Segment`, `[slot_words]` int64; None otherwise


class Reply(NamedTuple):
    """Events of a host since its previous reply."""

    events: list[Event]
    lines: list[str]  # lines for the user
    newest: int  # number of the newest publication that workers can read


class Refusal(NamedTuple):
    """Sent when the host ends because a worker has failed in a way that a restart cannot repair."""

    text: str
    by_user: bool  # whether the user made a mistake
    missing: str = ""  # name of the module that could not be imported
    trace: str = ""  # traceback of an error in code outside alfish


def versions() -> dict[str, str]:
    """Returns the versions of the packages on which pickles and results depend; they must be equal on all machines."""
    torch = importlib.metadata.version("torch").partition("+")[0]  # read without importing torch
    python = ".".join(platform.python_version_tuple()[:2])
    return {"Python": python, "alfish": alfish.__version__, "torch": torch}


def greeting() -> Greeting:
    """Returns the greeting of this process."""
    return Greeting(socket.gethostname(), os.getpid(), versions())


REPLY_SECONDS = 2.0  # seconds between two replies of a host that has nothing to report
CHECK_SECONDS = 0.1  # seconds between two checks for workers that hang or must be restarted


class Host:
    """Workers of one machine. Ray makes the class an actor; the trainer calls all methods."""

    def __init__(self) -> None:
        self._pool: Pool
        self._weights: Publications
        self._slots: list[np.ndarray]  # `[slot_words]` int64 each
        self._orders: list[Order] = []
        self._published: list[tuple[Publication, np.ndarray]] = []
        self._events: list[Event] = []
        self._lines: list[str] = []
        self._awake = asyncio.Event()  # set if there is something to do
        self._news = asyncio.Event()  # set if there is something to report

    async def greet(self, program: str) -> Greeting:
        """Returns machine and versions; starts the server, so that workers need not wait for imports later.

        The trainer calls this method first.

        Args:
          program: module whose `main` runs in each worker process.
        """
        SERVER.start(program)
        return greeting()

    async def start(
        self, plan: HostPlan, first: int, generation: int, publication: Publication, words: np.ndarray
    ) -> Reply | Refusal:
        """Starts the workers, and returns the first reply.

        Args:
          plan: settings that hosts share.
          first: index of this host's first worker among all workers of the run.
          generation: number of earlier processes of each worker, see `Plan.part`.
          publication: number and version of the current weights.
          words: current weights, `[weight_words]` int64.
        """
        self._patience = plan.patience
        part = plan.plan.part(first, plan.num_workers, generation)
        self._memory = SharedMemory(8 * part.slot_words * part.num_slots)
        self._slots = [self._memory.words(k * part.slot_words, part.slot_words) for k in range(part.num_slots)]
        self._weights = Publications(plan.weight_words)
        self._weights.publish(words, *publication)
        header, weights = self._weights.fds
        self._pool = Pool(plan.num_workers, plan.limits)
        self._pool.log = self._log
        self._pool.launch(part, {"slots": self._memory.fd, "weights_header": header, "weights": weights})
        self._called_at = self._now  # no calls were received during the start, which took seconds
        asyncio.get_running_loop().add_reader(self._pool.fileno(), self._awake.set)
        self._attending = asyncio.create_task(self._attend())
        return await self.poll()

    async def tell(
        self, orders: list[Order], publication: Publication | None = None, words: np.ndarray | None = None
    ) -> None:
        """Receives grants, and new weights if there are any."""
        self._called_at = self._now
        self._orders += orders
        if publication is not None and words is not None:
            self._published.append((publication, words))
        self._awake.set()

    async def poll(self) -> Reply | Refusal:
        """Returns the events and lines since the previous reply; waits up to `REPLY_SECONDS` if there are none.

        Returns a `Refusal` instead if a worker has failed permanently, and all events and lines were returned.
        """
        self._called_at = self._now
        news = asyncio.create_task(self._news.wait())
        await asyncio.wait({news, self._attending}, timeout=REPLY_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        news.cancel()
        if self._attending.done() and not self._events and not self._lines:
            return self._attending.result()
        self._news.clear()
        events, self._events = self._events, []
        lines, self._lines = self._lines, []
        return Reply(events, lines, self._weights.newest)

    async def keep(self) -> None:
        """Tells the host that the trainer is alive, even if it does not call `poll`."""
        self._called_at = self._now

    async def activities(self) -> str:
        """Returns a clause about what each worker is doing."""
        return self._pool.activities()

    async def close(self) -> None:
        """Ends the workers."""
        self._attending.cancel()
        asyncio.get_running_loop().remove_reader(self._pool.fileno())
        self._pool.close()

    @property
    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _log(self, line: str) -> None:
        self._lines.append(line)
        self._news.set()

    async def _attend(self) -> Refusal:
        """Carries messages between trainer and workers until a worker fails permanently; returns the `Refusal`."""
        try:
            while True:
                self._awake.clear()
                self._publish()
                self._grant()
                self._receive()
                if self._now - self._called_at > self._patience:
                    self._end()
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._awake.wait(), CHECK_SECONDS)
        except UnimportableError as error:
            return Refusal(str(error), by_user=True, missing=error.module)
        except (RunError, UsageError) as error:
            trace = str(error.__cause__) if isinstance(error.__cause__, Elsewhere) else ""
            return Refusal(str(error), by_user=isinstance(error, UsageError), trace=trace)

    def _publish(self) -> None:
        published, self._published = self._published, []
        for (number, version), words in published:
            if number > self._weights.held(number % 2):  # newer weights may have arrived first
                self._weights.publish(words, number, version)

    def _grant(self) -> None:
        """Sends the grants of all orders, except for orders whose weights have not arrived yet.

        Ray may reorder two calls: a call with large weights waits until the weights are on this machine.
        """
        orders, self._orders = self._orders, []
        for order in orders:
            worker, number = self._pool.all[order.worker_index], order.grant.publication
            if number is not None and number > self._weights.held(number % 2):
                self._orders.append(order)
            elif worker.generation == order.generation:  # otherwise the trainer receives `Died`, and sends a new grant
                self._pool.grant(worker, order.grant)

    def _receive(self) -> None:
        for worker, message in self._pool.wait(0):
            words = self._slots[message.slot] if isinstance(message, Segment) else None
            self._events.append(Event(worker.index, message, words))
            self._news.set()

    def _end(self) -> None:
        """Ends the host, which the trainer no longer calls: the trainer has ended, or has replaced the host."""
        self._pool.close()
        os._exit(0)
