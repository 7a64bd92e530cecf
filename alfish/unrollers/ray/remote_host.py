"""The trainer's side of a host, which is an actor of Ray that has several workers."""

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from alfish.processes.host import Greeting, Order, Publication
from alfish.processes.messages import Grant
from alfish.unrollers.ray import cluster
from alfish.unrollers.workers import worker_process

ANSWER_SECONDS = 2.0  # seconds to wait for the answer to `activities` or `close`
UNHEARD = 1000  # number of processes that a worker of a dead host may have had without a report to the trainer


class RemoteWorker:
    """A worker in a host.

    Attributes:
      index: index of the worker in the run.
      generation: number of earlier processes of the worker, including processes on earlier hosts.
      started: whether the process has built and reset its environments.
    """

    def __init__(self, index: int, host: "RemoteHost"):
        self.index, self.host = index, host
        self.generation = 0
        self.started = False


class Actors:
    """Requests the actors of hosts, and keeps spare actors to replace actors that die.

    The process of a spare has done its imports, which take seconds, but has not started its workers.

    Args:
      num_spares: number of spares.

    Attributes:
      actor_class: class of `Host` that Ray has made; set it before the first request.
    """

    actor_class: Any

    def __init__(self, num_spares: int):
        self._num_spares = num_spares
        self._spares: deque[tuple[Any, Any]] = deque()

    def take(self) -> tuple[Any, Any]:
        """Returns an actor and Ray's reference to its greeting.

        A new actor starts when a machine has enough free cores.
        """
        return self._spares.popleft() if self._spares else self._request()

    def replenish(self) -> None:
        """Requests the spares that are missing."""
        while len(self._spares) < self._num_spares:
            self._spares.append(self._request())

    def close(self) -> None:
        """Ends the spares."""
        while self._spares:
            cluster.kill(self._spares.pop()[0])

    def _request(self) -> tuple[Any, Any]:
        actor = self.actor_class.remote()
        return actor, actor.greet.remote(worker_process.__name__)


class RemoteHost:
    """The trainer's view of a host: its workers, its current actor, and the state that outlives the actor.

    Attributes:
      index: index of the host in the run.
      workers: workers of the host, by index in the host.
      answer: Ray's reference to the result of the outstanding call.
      asked_at: monotonic time of the outstanding call.
      greeting: first reply of the host; None if the actor has not answered yet, for example because no cores are free.
      sent, sent_at: number of the last publication of weights that was sent, and the monotonic time of sending.
      newest: number of the newest publication that the host had when it last replied.
      is_overdue: whether the last check found the host silent for too long.
    """

    def __init__(self, index: int, count: int):
        self.index = index
        self.workers = [RemoteWorker(index * count + place, self) for place in range(count)]
        self.actor: Any = None  # None before `join`
        self.greeting: Greeting | None = None
        self._first_generation = 0  # first generation of the current actor's workers
        self._orders: list[Order] = []

    def __str__(self) -> str:
        return f"host {self.index}" + (f" on {self.greeting.machine}" if self.greeting else "")

    @property
    def first(self) -> int:
        """Index of this host's first worker among all workers of the run."""
        return self.workers[0].index

    @property
    def has_orders(self) -> bool:
        """True if there are grants to send."""
        return bool(self._orders)

    @property
    def needs(self) -> int:
        """Number of the newest publication that a waiting grant requires; 0 if none requires one."""
        return max((order.grant.publication or 0 for order in self._orders), default=0)

    def join(self, actor: Any, answer: Any) -> None:
        """Sets the actor of the host, and Ray's reference to the greeting that the actor will send."""
        self.greeting = None
        self.sent = self.newest = 0
        self.actor = actor
        self._expect(answer)

    def begin(self, greeting: Greeting, plan: Any, publication: Publication, words: Any) -> None:
        """Starts the workers; see `Host.start`. The plan is Ray's reference to a `HostPlan`."""
        self.greeting = greeting
        self._note(publication)
        self._expect(self.actor.start.remote(plan, self.first, self._first_generation, publication, words))

    def poll(self) -> None:
        """Asks for the next reply."""
        self._expect(self.actor.poll.remote())

    def grant(self, worker: RemoteWorker, grant: Grant) -> None:
        """Collects a grant for the next `send`."""
        place = worker.index - self.first
        self._orders.append(Order(place, worker.generation - self._first_generation, grant))

    def send(self, publication: Publication | None, words: Any) -> None:
        """Sends the collected grants, and the weights of `publication` if it is not None; see `Host.tell`."""
        orders, self._orders = self._orders, []
        if publication is not None:
            self._note(publication)
        self.actor.tell.remote(orders, publication, words)

    def keep(self) -> None:
        """Tells the host that the trainer is alive."""
        if self.greeting is not None:
            self.actor.keep.remote()

    def activities(self) -> str:
        """Returns a clause about what the host's workers are doing."""
        if self.greeting is None:
            return "has not started; it may wait for room in the cluster"
        import ray

        try:
            return str(cluster.get(self.actor.activities.remote(), ANSWER_SECONDS))
        except ray.exceptions.RayError:
            return "does not answer"

    def kill(self) -> None:
        """Kills the actor, if there is one. The workers end with the actor."""
        if self.actor is not None:
            cluster.kill(self.actor)

    def leave(self) -> None:
        """Abandons the actor: its answers are no longer received, and its workers count as dead."""
        self.kill()
        self._orders.clear()
        self._first_generation = max(worker.generation for worker in self.workers) + UNHEARD
        for worker in self.workers:
            worker.generation, worker.started = self._first_generation, False

    def _note(self, publication: Publication) -> None:
        self.sent, self.sent_at = publication.number, time.monotonic()

    def _expect(self, answer: Any) -> None:
        self.answer = answer
        self.asked_at = time.monotonic()
        self.is_overdue = False


class Keeper:
    """Thread that tells hosts that the trainer is alive, even while the trainer evaluates or trains for minutes.

    Args:
      hosts: hosts to call.
      period: seconds between two calls.
    """

    def __init__(self, hosts: Sequence[RemoteHost], period: float):
        self._hosts, self._period = hosts, period
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts the thread."""
        self._thread = threading.Thread(target=self._run, name="keeper of Ray hosts", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread if it is running."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(self._period):
            for host in self._hosts:
                host.keep()


def end_all(hosts: Sequence[RemoteHost], timeout: float) -> None:
    """Asks hosts to end their workers, and waits for them slightly longer than `timeout` seconds."""
    cluster.wait([host.actor.close.remote() for host in hosts], len(hosts), timeout + ANSWER_SECONDS)
