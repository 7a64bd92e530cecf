"""Workers on the machines of a Ray cluster, as a transport of `AsyncUnroller`.

A host is an actor of Ray that has `per_host` workers. The trainer has one outstanding call to each host. The reply
contains everything that happened on the host, including segments. Another call sends grants and weights.

No segment arrives twice: Ray does not repeat calls, a reply is received once, and a grant names its worker process. If
a host is silent, or Ray raises for an outstanding call, the host counts as dead. Segments that it has not delivered are
then lost.
"""

import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Literal

import gin
import torch

from alfish.errors import RunError, UsageError, first_line
from alfish.errors.user_code import relayed
from alfish.parameters import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Range, checked
from alfish.processes.host import Greeting, Host, HostPlan, Refusal, Reply, versions
from alfish.processes.messages import Died, FromWorker, Grant, Plan, Segment, Started
from alfish.processes.pool import CHECK_SECONDS
from alfish.processes.worker_handle import Deaths
from alfish.unrollers.ray import cluster
from alfish.unrollers.ray.object_store import PublishedWeights, ReceivedSegments
from alfish.unrollers.ray.remote_host import Actors, Keeper, RemoteHost, RemoteWorker, end_all
from alfish.unrollers.workers.shared_tensors import Form
from alfish.unrollers.workers.slots import PolicyRows
from alfish.unrollers.workers.transport import Transport, Workers


@gin.configurable(module="alfish.unrollers")
@checked
class RayWorkers(Transport):
    """Pool of workers on the machines of a Ray cluster.

    Hosts are requested at the start. Without enough free cores, a host waits in Ray's queue until a machine joins. A
    host that dies is replaced by a new host on any machine.

    Args:
      count: number of workers.
      address: address of the cluster's head, HOST:PORT. 'auto' means RAY_ADDRESS, or the cluster that `ray start` made
        on this machine. None starts Ray on this machine only.
      per_host: number of workers of one host. This number divides `count`.
      cpus_per_worker: number of processor cores that a host requests for each worker.
      spare_hosts: number of spare hosts, which replace dead hosts without the seconds that an actor takes to start.
        They are requested when all hosts run; each takes as many cores as a host.
      min_hosts: number of hosts with which the run begins; further hosts join later. None means all.
      start_timeout: maximum seconds until `min_hosts` hosts have answered.
      host_timeout: seconds of silence after which a host counts as dead. A host that gets no call for twice as long
        ends itself.
      publish_seconds: minimum seconds between two transfers of weights to a host; ignored in lockstep, where each
        publication is sent.
      max_deaths: largest number of deaths of hosts within `death_window`; a further death ends the run.
      death_window: seconds of the window in which deaths are counted.
      code: origin of the user's modules. 'same': each machine has them. 'here': hosts receive the modules that the
        trainer has imported from the working directory.
      workers: class or factory of `Workers`, whose limits apply within each host; called with the number of the host's
        workers.

    Attributes:
      hosts: all hosts of the run.
      host_timeout: seconds of silence after which a host counts as dead.
    """

    place = "on a Ray cluster"

    # Set by `start`.
    _slots: int  # number of slots of each worker
    _plan: Any  # Ray's reference to the `HostPlan`
    _weights: PublishedWeights
    _segments: ReceivedSegments

    def __init__(
        self,
        count: PositiveInt,
        *,
        address: str | None = "auto",
        per_host: PositiveInt = 4,
        cpus_per_worker: Annotated[float, Range(0, above=True)] = 1.0,
        spare_hosts: NonNegativeInt = 0,
        min_hosts: NonNegativeInt | None = None,
        start_timeout: PositiveFloat = 300.0,
        host_timeout: PositiveFloat = 30.0,
        publish_seconds: NonNegativeFloat = 0.05,
        max_deaths: NonNegativeInt = 20,
        death_window: PositiveFloat = 600.0,
        code: Literal["same", "here"] = "same",
        workers: Callable[[int], Workers] = Workers,
    ):
        super().__init__()
        if count % per_host:
            below = count - count % per_host
            nearest = f"{below} or {below + per_host}" if below else str(per_host)
            raise UsageError(
                f"AsyncUnroller.num_workers is {count}, which RayWorkers.per_host = {per_host} does not divide; the "
                f"nearest number of workers that it divides is {nearest}"
            )
        num_hosts = count // per_host
        self._cluster, self._cpus = cluster.Cluster(address, code), cpus_per_worker * per_host
        self._min_hosts = num_hosts if min_hosts is None else min(min_hosts, num_hosts)
        self._start_timeout, self.host_timeout = start_timeout, host_timeout
        self._publish_seconds, self._deaths = publish_seconds, Deaths(max_deaths, death_window)
        template = workers(per_host)  # holds the limits of hosts; never started
        self._limits = template.limits
        self.shrinks = "RayWorkers.min_hosts" if self._min_hosts < num_hosts else template.shrinks
        self.hosts = [RemoteHost(i, per_host) for i in range(num_hosts)]
        self.all = [worker for host in self.hosts for worker in host.workers]
        self._actors, self._keeper = Actors(spare_hosts), Keeper(self.hosts, host_timeout / 2)
        self._deadline: float | None = None  # monotonic time by which `min_hosts` must answer; None once they have
        self._checked_at = 0.0

    @property
    def num_left(self) -> int:
        return len(self.all)

    @property
    def newest(self) -> int:
        return self._weights.publication.number

    def start(
        self, plan: Plan, forms: list[Form], structure: Any, tensors: Sequence[torch.Tensor], version: int
    ) -> None:
        """Connects to the cluster and requests the hosts, without waiting for them; see `Transport`.

        Raises:
          UsageError: there is no cluster, or it is too small.
        """
        self._cluster.connect()
        self._cluster.check_room(self._min_hosts, self._cpus)
        self._slots = plan.num_slots // plan.num_workers
        self._segments, self._weights = ReceivedSegments(forms, structure), PublishedWeights(tensors)
        self._warn_of_small_store(plan.num_slots)
        self.publish(version)
        hosts = len(self.all) // len(self.hosts), self._limits, plan, self._weights.num_words, 2 * self.host_timeout
        self._plan = self._cluster.put(HostPlan(*hosts))
        self._actors.actor_class = self._cluster.actor_class(Host, self._cpus)
        self._deadline = time.monotonic() + self._start_timeout if self._min_hosts else None
        for host in self.hosts:
            host.join(*self._actors.take())
        self._keeper.start()

    def publish(self, version: int) -> None:
        self._weights.publish(version)

    def grant(self, worker: RemoteWorker, grant: Grant) -> bool:
        """Collects a grant for `send`; see `Transport`. Returns False until `min_hosts` hosts have answered."""
        if not worker.started or self._deadline is not None:
            return False
        worker.host.grant(worker, grant._replace(slot=grant.slot - worker.host.first * self._slots))
        return True

    def send(self) -> None:
        for host in self.hosts:
            if host.has_orders:
                self._tell(host)

    def wait(self, timeout: float) -> Iterator[tuple[RemoteWorker, FromWorker]]:
        for host in self.hosts:
            if host.has_orders or self._is_due(host):
                self._tell(host)
        by_answer = {host.answer: host for host in self.hosts}
        answers = list(by_answer)
        ready = cluster.wait(answers, len(answers), 0)
        if not ready and timeout > 0:
            ready = cluster.wait(answers, 1, timeout)
        for answer in ready:
            yield from self._receive(by_answer[answer])
        if time.monotonic() - self._checked_at >= CHECK_SECONDS:
            self._checked_at = time.monotonic()
            self._check_start()
            for host in self.hosts:
                yield from self._check(host)

    def read(self, segment: Segment) -> list[PolicyRows]:
        return self._segments.read(segment)

    def activities(self) -> str:
        return ", ".join(f"{host} {host.activities()}" for host in self.hosts)

    def close(self) -> None:
        self._keeper.stop()
        try:
            end_all([host for host in self.hosts if host.greeting], self._limits.close_timeout)
        finally:  # kills hosts even if a signal interrupts the wait
            for host in self.hosts:
                host.kill()
            self._actors.close()
            self._cluster.close()

    # Weights.

    def _is_due(self, host: RemoteHost) -> bool:
        """Returns whether to send weights that no grant needs.

        They are sent at most every `publish_seconds`, and only after the host has received the previous weights.
        """
        return (
            host.greeting is not None
            and host.newest == host.sent < self.newest
            and time.monotonic() - host.sent_at >= self._publish_seconds
        )

    def _tell(self, host: RemoteHost) -> None:
        if host.needs > host.sent or self._is_due(host):
            host.send(self._weights.publication, self._weights.words())
        else:
            host.send(None, None)

    # Answers.

    def _receive(self, host: RemoteHost) -> Iterator[tuple[RemoteWorker, FromWorker]]:
        import ray

        try:
            answer = cluster.get(host.answer, self.host_timeout)
        except ray.exceptions.RayTaskError:  # a defect of the host's code
            raise
        except ray.exceptions.RayError as error:  # the process, its machine, the connection or the reply is lost
            if getattr(error, "actor_init_failed", False):
                raise _unable(str(error)) from error
            yield from self._on_death(host, error)
            return
        if isinstance(answer, Greeting):
            self._begin(host, answer)
        elif isinstance(answer, Refusal):
            raise _refused(host, answer)
        else:
            yield from self._on_reply(host, answer)

    def _begin(self, host: RemoteHost, greeting: Greeting) -> None:
        here = versions()
        differences = [name for name, version in greeting.versions.items() if version != here[name]]
        if differences:
            there = ", ".join(f"{name} {greeting.versions[name]} (here {here[name]})" for name in differences)
            raise UsageError(f"machine {greeting.machine} of the Ray cluster has {there}; install equal versions")
        host.begin(greeting, self._plan, self._weights.publication, self._weights.words())
        num_begun = sum(host.greeting is not None for host in self.hosts)
        if num_begun >= self._min_hosts:
            self._deadline = None
        if num_begun == len(self.hosts):  # before that, a spare could take the room of a host
            self._actors.replenish()

    def _on_reply(self, host: RemoteHost, reply: Reply) -> Iterator[tuple[RemoteWorker, FromWorker]]:
        host.poll()  # called at once, so that the next reply is made while the trainer trains
        host.newest = reply.newest
        for line in reply.lines:
            self.log(f"{host}: {line}")
        for place, message, words in reply.events:
            worker = host.workers[place]
            if isinstance(message, Started):
                worker.started = True
            elif isinstance(message, Died):
                worker.started = False
                worker.generation += 1
                self.num_restarts += 1
            elif isinstance(message, Segment):
                message = message._replace(worker_index=worker.index, slot=message.slot + host.first * self._slots)
                assert words is not None
                self._segments.add(message, words)
            yield worker, message

    # Deaths.

    def _check_start(self) -> None:
        if self._deadline is not None and time.monotonic() > self._deadline:
            answered = sum(host.greeting is not None for host in self.hosts)
            raise RunError(
                f"{answered} hosts of {self._cpus:g} CPUs answered within RayWorkers.start_timeout = "
                f"{self._start_timeout:g} s, but the run needs {self._min_hosts}; `ray status` shows the resources of "
                "the cluster and how many are in use"
            )

    def _check(self, host: RemoteHost) -> Iterator[tuple[RemoteWorker, FromWorker]]:
        """Abandons a host that two consecutive checks find silent for too long.

        Between the two checks, a delayed answer can still arrive, for example after the trainer was suspended.
        """
        limit = self.host_timeout if host.newest else self._start_timeout
        silent = time.monotonic() - host.asked_at
        was_overdue, host.is_overdue = host.is_overdue, host.greeting is not None and silent > limit
        if was_overdue and host.is_overdue:
            yield from self._on_death(host, TimeoutError(f"it has been silent for {silent:.0f} s"))

    def _on_death(self, host: RemoteHost, error: Exception) -> Iterator[tuple[RemoteWorker, FromWorker]]:
        """Replaces an actor that is, or may be, dead."""
        text = f"{host} is dead: {first_line(error)}"
        count = self._deaths.add()
        if count > self._deaths.most:
            raise RunError(
                f"{text}\nThat is death {count} of hosts within {self._deaths.seconds:g} s, more than "
                f"RayWorkers.max_deaths = {self._deaths.most}"
            )
        self.log(f"{text}\nAnother one is requested")
        host.leave()
        self.num_restarts += len(host.workers)
        host.join(*self._actors.take())
        for worker in host.workers:
            yield worker, Died()

    def _warn_of_small_store(self, num_slots: int) -> None:
        """Warns if all segments together do not fit into the object store, because Ray then writes them to disk."""
        needed, size = 8 * self._segments.layout.num_words * num_slots, self._cluster.store_bytes()
        if needed > size:
            self.log(
                f"{num_slots} segments need up to {needed / 1e6:,.0f} MB, but Ray's object store on this machine has "
                f"{size / 1e6:,.0f} MB; Ray writes the excess to disk, which is slow; lower AsyncUnroller.num_workers, "
                "slots or the length of segments, or start Ray with a larger --object-store-memory"
            )


def _refused(host: RemoteHost, refusal: Refusal) -> Exception:
    """Returns the error that ends the run."""
    if refusal.missing:
        assert host.greeting is not None
        return UsageError(
            f"workers on machine {host.greeting.machine} cannot import {refusal.missing!r}: "
            f"{refusal.text.splitlines()[-1]}; install it on each machine, or start the run in the directory that has "
            "it and bind RayWorkers.code = 'here'"
        )
    if refusal.by_user:
        return UsageError(refusal.text)
    text = f"{host}: {refusal.text}"
    return relayed(text, refusal.trace) if refusal.trace else RunError(text)


def _unable(text: str) -> UsageError:
    """Returns the error for a machine on which a host could not start, from the text of Ray's exception."""
    address = re.search(r"\bip=([^,\s]+)", text)
    where = f"the machine {address[1]}" if address else "a machine"
    return UsageError(
        f"{where} of the Ray cluster cannot run a host of workers: {text.strip().splitlines()[-1]}; install there what "
        "the trainer's machine has: pip install 'alfish[ray]'"
    )
