"""Connection of the trainer to a Ray cluster.

Ray is imported only inside functions, so that alfish works without Ray.
"""

import contextlib
import importlib.util
import logging
import math
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from alfish.errors import UsageError, first_line
from alfish.runs.stop_signals import SIGNALS, Interrupted

PROBE_SECONDS = 5.0  # seconds for a TCP connection to a cluster; Ray itself tries for a minute
START = "`RAY_USAGE_STATS_ENABLED=0 ray start --head --num-cpus=0 --include-dashboard=false`"


def requested(amount: float) -> float:
    """Returns the number of cores or GPUs to request from Ray, which accepts only whole numbers above 1."""
    return amount if amount <= 1 else math.ceil(amount)


class Cluster:
    """A Ray cluster that this process connects to.

    Args:
      address, code: settings of the cluster, see `RayWorkers`.
      setting: parameter or command-line flag by which the user asked for the cluster, for messages.

    Raises:
      UsageError: Ray is not installed.
    """

    def __init__(self, address: str | None, code: str, setting: str = "RayWorkers.address"):
        if importlib.util.find_spec("ray") is None:
            raise UsageError(f"{setting.partition('.')[0]} needs the extra 'ray': pip install 'alfish[ray]'")
        self._address = address
        self._sends_code = code == "here"
        self._setting = setting

    def connect(self) -> None:
        """Connects the process, unless it is already connected.

        Raises:
          UsageError: there is no cluster; this machine lacks the cluster's token, or has another version of Python or
            Ray than the cluster; or the process is already connected, so its modules can no longer be sent.
        """
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        import ray

        if ray.is_initialized():
            if self._sends_code:
                raise UsageError(
                    "RayWorkers.code = 'here' sends modules when it connects to Ray, but this process is already "
                    "connected; list them in the call of ray.init(runtime_env={'py_modules': [...]})"
                )
            if _USERS:
                _USERS.add(self)
            return
        address = self._address
        if address == "auto":
            address = os.environ.get("RAY_ADDRESS") or address
        if address is not None:
            _check_address(address, self._setting)
        settings: dict[str, Any] = {"runtime_env": {"py_modules": modules_here()}} if self._sends_code else {}
        if address is None:
            settings["include_dashboard"] = False
        try:
            with handlers_kept():
                ray.init(address or "local", log_to_driver=False, logging_level=logging.WARNING, **settings)
        except (ConnectionError, RuntimeError, ValueError) as error:
            if address == "auto" and isinstance(error, ConnectionError):
                here = f", or bind {self._setting} = None to start Ray here" if "." in self._setting else ""
                raise UsageError(
                    f"{self._setting} finds no Ray cluster on this machine; start one with {START}, or set RAY_ADDRESS "
                    f"to its head{here}"
                ) from error
            raise UsageError(f"Ray cannot be used at {self._setting} = {address!r}: {error}") from error
        except ray.exceptions.RayError as error:
            if type(error).__name__ != "AuthenticationError":  # older versions of Ray lack it
                raise
            raise UsageError(
                f"the Ray cluster at {self._setting} = {address!r} requires a token that this machine does not have "
                f"({first_line(error)}); copy ~/.ray/auth_token from the head to each machine, or set "
                "RAY_AUTH_TOKEN_PATH to a copy"
            ) from error
        _USERS.add(self)

    def check_room(self, num_hosts: int, cpus: float) -> None:
        """Checks that the machines of the cluster have enough processor cores for all hosts when they are idle.

        Args:
          num_hosts: number of hosts.
          cpus: number of processor cores that each host needs on a single machine.

        Raises:
          UsageError: the machines have too few cores.
        """
        fitting = self.num_places(cpus)
        if fitting < num_hosts:
            machines = " + ".join(f"{node.get('CPU', 0.0):g}" for node in _nodes().values())
            raise UsageError(
                f"{num_hosts} hosts need {requested(cpus):g} CPUs each (RayWorkers.per_host x cpus_per_worker), but "
                f"the cluster has room for {fitting}: its machines have {machines} CPUs; "
                "add machines with `ray start --address=HEAD:6379`, lower AsyncUnroller.num_workers, "
                "RayWorkers.per_host or cpus_per_worker, or begin with fewer hosts with RayWorkers.min_hosts"
            )

    def num_places(self, cpus: float, gpus: float = 0.0) -> int:
        """Returns the number of processes with `cpus` cores and `gpus` GPUs each that fit on the idle machines."""
        places, cpus, gpus = 0, requested(cpus), requested(gpus)
        for node in _nodes().values():
            of_cpus = math.floor(node.get("CPU", 0.0) / cpus)
            places += min(of_cpus, math.floor(node.get("GPU", 0.0) / gpus)) if gpus else of_cpus
        return places

    def store_bytes(self) -> float:
        """Returns the size of this machine's object store in bytes."""
        import ray

        return _nodes()[ray.get_runtime_context().get_node_id()].get("object_store_memory", 0.0)

    def put(self, thing: Any) -> Any:
        """Stores a value that is passed to several calls; returns Ray's reference to the value."""
        import ray

        return ray.put(thing)

    def actor_class(self, of: type, cpus: float) -> Any:
        """Returns a class of actors that run on any machine; Ray does not restart them, or repeat their calls."""
        import ray

        return ray.remote(of).options(
            num_cpus=requested(cpus),
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy="SPREAD",
        )

    def close(self) -> None:
        """Disconnects the process if alfish made the connection and no other `Cluster` uses it."""
        if self in _USERS:
            import ray

            _USERS.remove(self)
            if not _USERS:
                ray.shutdown()


_USERS: set[Cluster] = set()  # objects that use this process's connection


def wait(answers: Sequence[Any], count: int, timeout: float) -> list[Any]:
    """Returns the references of Ray that are ready, once `count` are ready or after `timeout` seconds."""
    import ray

    with _exceptions_of_handlers():
        return ray.wait(list(answers), num_returns=count, timeout=timeout)[0] if answers else []


def get(answer: Any, timeout: float) -> Any:
    """Returns the value of a reference of Ray. Raises the error that the call raised, or GetTimeoutError."""
    import ray

    with _exceptions_of_handlers():
        return ray.get(answer, timeout=timeout)


def kill(actor: Any) -> None:
    """Kills an actor, which may already be dead."""
    import ray

    with contextlib.suppress(ray.exceptions.RayError, ValueError):
        ray.kill(actor)


@contextlib.contextmanager
def _exceptions_of_handlers() -> Iterator[None]:
    """Raises exceptions of signal handlers unchanged; Ray's C code turns these into a SystemError."""
    try:
        yield
    except SystemError as error:
        if isinstance(error.__cause__, (Interrupted, KeyboardInterrupt)):
            raise error.__cause__ from None
        raise


def _check_address(address: str, setting: str) -> None:
    """Raises UsageError for an invalid address or if no cluster answers. Ray itself resolves 'auto' and 'local'."""
    if address.startswith("ray://"):
        raise UsageError(
            f"{setting} is {address!r}, an address of Ray Client; start the run on a machine of the cluster, and give "
            "the head as HOST:6379"
        )
    host, colon, port = address.rpartition(":")
    if not colon:
        return
    try:
        socket.create_connection((host, int(port)), PROBE_SECONDS).close()
    except (OSError, ValueError) as error:
        raise UsageError(
            f"no Ray cluster answers at {setting} (or RAY_ADDRESS) = {address!r} ({first_line(error)}); start its head "
            f"with {START}"
        ) from error


@contextlib.contextmanager
def handlers_kept() -> Iterator[None]:
    """Restores the signal handlers that `ray.init` replaces.

    Ray's handler of SIGTERM raises SystemExit. If it runs within the context, the signal is raised again for the
    restored handler, and `Interrupted` is raised. Outside the main thread, Ray replaces no handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    interrupted = False
    try:
        yield
    except SystemExit:
        interrupted = True
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if interrupted:
        signal.raise_signal(signal.SIGTERM)
        raise Interrupted


def modules_here() -> list[str]:
    """Returns files and directories of the modules that this process has imported from the working directory.

    A package is represented by its directory. The whole working directory is not sent, because it may contain runs.
    """
    here = Path.cwd().resolve()
    found = set()
    for name, module in list(sys.modules.items()):
        if "." not in name and name != "__main__":
            found |= {path for path in _paths(module) if path.parent == here}
    return sorted(map(str, found))


def _paths(module: ModuleType) -> list[Path]:
    """Returns the directories of a package, or the file of a module; empty for modules without files."""
    packages = getattr(module, "__path__", None)
    if packages is not None:
        return [Path(path).resolve() for path in packages]
    file = getattr(module, "__file__", None)
    return [Path(file).resolve()] if file and file.endswith(".py") else []


def _nodes() -> dict[str, dict[str, float]]:
    """Returns the resources of each machine that is alive, by Ray's id of the machine."""
    import ray

    return {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}
