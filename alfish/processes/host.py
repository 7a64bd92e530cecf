"""The host: an actor of Ray that has workers on one machine.

The actor has one event loop, in which all its methods run. No user's code runs in it: environments and policies are in
the workers, which are processes that the actor's server forks, as on the trainer's machine.

The actor imports no torch. So the server, which does, starts as soon as the actor has a process.
"""

import asyncio
import contextlib
import os

import numpy as np

from alfish.errors import RunError, UsageError
from alfish.processes.host_messages import Event, Greeting, HostPlan, Order, Publication, Refusal, Reply, greeting
from alfish.processes.messages import Segment
from alfish.processes.pool import Pool, UnimportableError
from alfish.processes.server import SERVER
from alfish.processes.shared_memory import Publications, SharedMemory
from alfish.user_code import Elsewhere

REPLY_SECONDS = 2.0  # between two replies of a host that has nothing to report
CHECK_SECONDS = 0.1  # between two looks at workers that are to be restarted or hang


class Host:
    """Workers of one machine. Ray makes an actor of it; all methods are called by the trainer."""

    def __init__(self) -> None:
        self._pool: Pool
        self._weights: Publications
        self._slots: list[np.ndarray]  # `[slot_words]` int64 each
        self._orders: list[Order] = []
        self._published: list[tuple[Publication, np.ndarray]] = []
        self._events: list[Event] = []
        self._lines: list[str] = []
        self._awake = asyncio.Event()  # there is something to do
        self._news = asyncio.Event()  # there is something to report

    async def greet(self) -> Greeting:
        """Returns machine and versions. The first call; workers that start later need not wait for imports."""
        SERVER.start()
        return greeting()

    async def start(
        self, plan: HostPlan, first: int, generation: int, publication: Publication, words: np.ndarray
    ) -> Reply | Refusal:
        """Starts the workers, and returns the first reply.

        Args:
          plan: what hosts share.
          first: index in the run of the host's first worker.
          generation: see `Plan.part`.
          publication, words: the present weights.
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
        self._called_at = self._now  # the start took seconds, in which no call was received
        asyncio.get_running_loop().add_reader(self._pool.fileno(), self._awake.set)
        self._attending = asyncio.create_task(self._attend())
        return await self.poll()

    async def tell(
        self, orders: list[Order], publication: Publication | None = None, words: np.ndarray | None = None
    ) -> None:
        """Receives grants, and weights if there are new ones."""
        self._called_at = self._now
        self._orders += orders
        if publication is not None and words is not None:
            self._published.append((publication, words))
        self._awake.set()

    async def poll(self) -> Reply | Refusal:
        """Returns what happened since the reply before: at once if something did, or after `REPLY_SECONDS`."""
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
        """Tells the host that the trainer lives, also while it does not poll."""
        self._called_at = self._now

    async def activities(self) -> str:
        """Returns a clause that says what each worker is doing."""
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
        """Carries messages between the trainer and the workers until one of them fails for good."""
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
            if number > self._weights.held(number % 2):  # else newer ones have overtaken it
                self._weights.publish(words, number, version)

    def _grant(self) -> None:
        """Grants what is ordered, except for orders whose weights have not arrived yet.

        Ray may deliver two calls in another order: one with large weights waits until they are on this machine.
        """
        orders, self._orders = self._orders, []
        for order in orders:
            worker, number = self._pool.all[order.worker_index], order.grant.publication
            if number is not None and number > self._weights.held(number % 2):
                self._orders.append(order)
            elif worker.generation == order.generation:  # else the trainer has not received `Died`, and grants again
                self._pool.grant(worker, order.grant)

    def _receive(self) -> None:
        for worker, message in self._pool.wait(0):
            words = self._slots[message.slot] if isinstance(message, Segment) else None
            self._events.append(Event(worker.index, message, words))
            self._news.set()

    def _end(self) -> None:
        """Ends the host: the trainer has ended, or another host has taken its place."""
        self._pool.close()
        os._exit(0)
