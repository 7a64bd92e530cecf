"""A Ray cluster of several nodes on this machine, and a driver that breaks it while a run collects on it.

Each node has a raylet and an object store of its own, so all that alfish does between machines happens here, too,
except for the network.
"""

import contextlib
import os
import random
import shutil
import signal
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import alfish
from alfish.processes.server import SERVER
from alfish.unrollers.ray import RayWorkers
from alfish.unrollers.ray.remote_host import RemoteHost

STORE_BYTES = 80 << 20  # of a node; Ray takes no less than 75 MiB
TAG = "ALFISH_NODES"  # environment variable of all processes of a cluster


class Nodes:
    """A head without processor cores, and nodes with some.

    RAY_ADDRESS names the cluster while it runs, so that nobody connects to another one of this machine.

    Args:
      cpus: processor cores of each node, as Ray counts them.
      paths: directories of modules that nodes can import, besides alfish.
      settings: internal settings of Ray, such as those of health checks; default: Ray's own.

    Attributes:
      nodes: number of processor cores of each node that runs, without the head.
    """

    def __init__(self, cpus: Sequence[int], paths: Sequence[Path] = (), settings: dict[str, int] | None = None):
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        from ray.cluster_utils import Cluster

        self._tag = uuid.uuid4().hex
        directories = [Path(alfish.__file__).parents[1], *paths]
        self._before = dict(os.environ)
        os.environ |= {TAG: self._tag, "PYTHONPATH": os.pathsep.join(map(str, directories))}
        self._directory = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
        head: dict[str, Any] = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": STORE_BYTES}
        head |= {"temp_dir": self._directory, "_system_config": settings or {}}
        head |= {"no_monitor": True, "include_log_monitor": False}  # nobody scales the cluster or prints its logs
        Path("/tmp/ray").mkdir(exist_ok=True)  # where the head writes its address; only the monitor would make it
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        os.environ["RAY_ADDRESS"] = self._cluster.address
        self.nodes: dict[Any, int] = {}
        for count in cpus:
            self.add(count)

    @property
    def address(self) -> str:
        """Address of the head."""
        return self._cluster.address

    def add(self, cpus: int) -> None:
        """Starts one more node."""
        self.nodes[self._cluster.add_node(num_cpus=cpus, object_store_memory=STORE_BYTES)] = cpus

    def kill(self, node: Any) -> None:
        """Kills a node's raylet, as the loss of a machine does. Its actors go on until they notice."""
        del self.nodes[node]
        self._cluster.remove_node(node, allow_graceful=False)

    def processes(self, of: str = "") -> list[int]:
        """Returns ids of the cluster's processes, and of those that they have started.

        This process and its own workers are not among them.

        Args:
          of: text in the command line.
        """
        marker = f"{TAG}={self._tag}".encode()
        found = []
        for directory in _processes():
            with contextlib.suppress(OSError):  # it has ended
                environment, command = ((directory / name).read_bytes().split(b"\0") for name in ("environ", "cmdline"))
                if marker in environment and of.encode() in b" ".join(command):
                    found.append(int(directory.name))
        own = os.getpid(), SERVER.pid
        return [pid for pid in found if pid not in own and _parent(pid) != SERVER.pid]

    def close(self) -> None:
        """Ends all processes."""
        import ray
        from ray.exceptions import RaySystemError, RpcError

        ray.shutdown()  # after an error this process may still be connected
        with contextlib.suppress(RaySystemError, RpcError):  # the GCS may end before it has answered
            self._cluster.shutdown()
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self._directory, ignore_errors=True)  # the last of these processes may still write a log
        os.environ.clear()
        os.environ.update(self._before)


class Chaos:
    """Breaks the hosts of a run, one way after another. Call it often.

    - 'worker': kills a worker process.
    - 'actor': kills the actor of a host.
    - 'raylet': kills a node, and adds another one `AWAY_SECONDS` later.
    - 'stop': stops the actor of a host, and lets it go on after it has been given up.

    Args:
      nodes: the cluster.
      workers: the transport of the run.
      seconds: from now, in which something is broken.
      kinds: of breaking, in turn.
      pause: least and most seconds between two.

    Attributes:
      until: monotonic time of the end.
      broken: number of times of each kind.
      waits: kind, and seconds from the breaking to the first new rows.
    """

    AWAY_SECONDS = 5.0

    def __init__(
        self,
        nodes: Nodes,
        workers: RayWorkers,
        seconds: float,
        kinds: Sequence[str] = ("worker", "actor", "worker", "stop", "actor", "raylet"),
        pause: tuple[float, float] = (2.0, 6.0),
    ):
        self._nodes, self._workers, self._kinds, self._pause = nodes, workers, kinds, pause
        self._random = random.Random(0)
        self.until = time.monotonic() + seconds
        self._next = 0.0
        self.broken = dict.fromkeys(kinds, 0)
        self.waits: list[tuple[str, float]] = []
        self._later: list[tuple[float, Any, tuple]] = []  # time, function, arguments
        self._generations: dict[int, list[int]] = {}  # by a host's index: of its workers at the last breaking
        self._awaited: dict[int, tuple[str, float]] = {}  # by a host's index: kind and time of the breaking

    def __str__(self) -> str:
        return ", ".join(f"{count} x {kind}" for kind, count in self.broken.items())

    def __call__(self) -> None:
        now = time.monotonic()
        for due in [one for one in self._later if one[0] <= now]:
            self._later.remove(due)
            due[1](*due[2])
        if self._next <= now < self.until:
            self._next = now + self._random.uniform(*self._pause)
            self._break(self._kinds[sum(self.broken.values()) % len(self._kinds)])

    def saw_new_process(self, worker_index: int) -> None:
        """Notes the first rows of a new process of a worker."""
        host = self._workers.all[worker_index].host.index
        if host in self._awaited:
            kind, began = self._awaited.pop(host)
            self.waits.append((kind, time.monotonic() - began))

    def end(self) -> None:
        """Does at once what is to be done later, such as letting a stopped process go on."""
        for _, function, arguments in self._later:
            function(*arguments)
        self._later = []

    def _break(self, kind: str) -> None:
        now = time.monotonic()
        hosts = [host for host in self._workers.hosts if self._is_whole(host)]
        if not hosts:
            return
        host = self._random.choice(hosts)
        assert host.greeting is not None
        hit = [host]
        if kind == "worker":
            pids = workers_of(host.greeting.pid)
            if len(pids) < len(host.workers):
                return
            os.kill(self._random.choice(pids), signal.SIGKILL)
        elif kind == "actor":
            os.kill(host.greeting.pid, signal.SIGKILL)
        elif kind == "stop":
            os.kill(host.greeting.pid, signal.SIGSTOP)
            self._later.append((now + 3 * self._workers.host_timeout, _resume, (host.greeting.pid,)))
        else:
            node, cpus = next(one for one in self._nodes.nodes.items() if _is_in(host.greeting.pid, one[0]))
            hit = [one for one in hosts if one.greeting and _is_in(one.greeting.pid, node)]
            self._nodes.kill(node)
            self._later.append((now + self.AWAY_SECONDS, self._nodes.add, (cpus,)))
        self.broken[kind] += 1
        self._awaited |= {one.index: (kind, now) for one in hit}
        self._generations |= {one.index: _generations(one) for one in hit}

    def _is_whole(self, host: RemoteHost) -> bool:
        """Whether all workers of a host run, and what was broken last has been noticed."""
        is_noticed = self._generations.get(host.index) != _generations(host)
        return is_noticed and all(worker.started for worker in host.workers)


def _generations(host: RemoteHost) -> list[int]:
    return [worker.generation for worker in host.workers]


def workers_of(host: int) -> list[int]:
    """Returns ids of the worker processes of a host on this machine, whose own id is given."""
    return [worker for server in _children(host) for worker in _children(server)]


def _is_in(pid: int, node: Any) -> bool:
    """Whether a process is a child of the node's raylet."""
    raylets = {process.process.pid for process in node.all_processes.get("raylet", [])}
    return _parent(pid) in raylets


def _resume(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # Ray has killed it
        os.kill(pid, signal.SIGCONT)


def _processes() -> Iterator[Path]:
    return (path for path in Path("/proc").iterdir() if path.name.isdigit())


def _children(pid: int) -> list[int]:
    return [int(path.name) for path in _processes() if _parent(int(path.name)) == pid]


def _parent(pid: int) -> int:
    """Returns the id of the parent process; 0: there is no such process."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0
