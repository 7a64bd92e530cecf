"""Runs on the machines of a Ray cluster. The directories of runs must have the same path on all machines.

Ray is imported only in methods, so that sweeps work without Ray.
"""

import os
import platform
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from alfish.errors import RunError, UsageError, first_line
from alfish.runs.files import open_own
from alfish.sweeps.jobs import JobEnded, LocalJobs
from alfish.unrollers.ray.cluster import Cluster, requested

POLL_SECONDS = 1.0
STOP = "stop"  # file in a run's directory that asks its process to save a checkpoint and end
STOPPED = 128 + signal.SIGTERM  # exit status of a stopped process


class RayJobs:
    """`Jobs` on a Ray cluster: each process is a task.

    Ray repeats a task whose machine has died, as often as necessary. The repeated task continues the run, so at most
    the steps since the run's last checkpoint are lost. The file `STOP` in the directory of a run stops its task,
    because Ray's own cancellation could interrupt the saving of a checkpoint.

    Args:
      size: number of runs at the same time; None means as many as currently fit into the cluster.
      cpus, gpus: numbers of processor cores and GPUs for each run.

    Raises:
      UsageError: Ray is not installed, or there is no cluster, or no machine has enough cores and GPUs.
    """

    def __init__(self, size: int | None = None, cpus: float = 1.0, gpus: float = 0.0):
        self._cluster = Cluster("auto", "same", "--ray")
        self._cluster.connect()
        import ray

        places = self._cluster.num_places(cpus, gpus)
        if not places:
            wanted = f"{cpus:g} CPUs" + (f" and {gpus:g} GPUs" if gpus else "")
            flags = "--cpus_per_run" + (" or --gpus_per_run" if gpus else "")
            raise UsageError(f"no machine of the Ray cluster has {wanted}; lower {flags}, or add machines")
        self.size = size or places
        self._train = ray.remote(train).options(num_cpus=requested(cpus), num_gpus=requested(gpus), max_retries=-1)
        self._tasks: dict[Any, Path] = {}  # directories of runs, by Ray's reference to a task's result
        self._stopped: set[Path] = set()

    @property
    def running(self) -> Sequence[Path]:
        return list(self._tasks.values())

    def start(self, directory: Path, arguments: Sequence[str]) -> None:
        (directory / STOP).unlink(missing_ok=True)  # left by a killed command
        task = self._train.remote(str(directory.resolve()), [_absolute(argument) for argument in arguments])
        self._tasks[task] = directory

    def stop(self, directory: Path) -> None:
        import ray

        for task, own in self._tasks.items():
            if own == directory and directory not in self._stopped:
                self._stopped.add(directory)
                open_own(directory / STOP, "ab").close()
                ray.cancel(task)  # ends a task that still waits for free cores

    def wait(self, timeout: float) -> list[JobEnded]:
        import ray

        ready, _ = ray.wait(list(self._tasks), timeout=timeout)
        return [JobEnded(directory := self._tasks.pop(task), self._status(task, directory)) for task in ready]

    def close(self) -> None:
        import ray

        for directory in self.running:
            self.stop(directory)
        try:
            while self._tasks:
                self.wait(POLL_SECONDS)
        finally:
            for task in self._tasks:
                ray.cancel(task, force=True)
            self._tasks.clear()
            self._cluster.close()

    def _status(self, task: Any, directory: Path) -> int:
        """Returns the exit status of a run whose task has ended."""
        import ray

        was_stopped = directory in self._stopped
        self._stopped.discard(directory)
        (directory / STOP).unlink(missing_ok=True)
        try:
            return int(ray.get(task))
        except (ray.exceptions.TaskCancelledError, ray.exceptions.WorkerCrashedError, KeyboardInterrupt):
            return STOPPED if was_stopped else -signal.SIGKILL
        except ray.exceptions.RayTaskError as error:
            # If Ray was started with SIGINT ignored, as with `&` in a script, a cancelled task fails.
            if was_stopped:
                return STOPPED
            raise RunError(f"the run in {directory} could not be started: {first_line(error.cause)}") from error


def train(directory: str, arguments: Sequence[str]) -> int:
    """Runs `alfish train` on a machine of the cluster until it ends or is asked to stop; returns its exit status."""
    path = Path(directory)
    if not path.is_dir():
        raise UsageError(f"{platform.node()} does not see this directory; choose a --root_dir that all machines share")
    jobs, is_asked = LocalJobs(1), False
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ray cancels a task by this signal
    try:
        if (path / STOP).exists():
            return STOPPED
        jobs.start(path, arguments)
        while not (ended := jobs.wait(POLL_SECONDS)):
            if not is_asked and (path / STOP).exists():
                jobs.stop(path)
                is_asked = True
        return ended[0].status
    finally:
        jobs.close()
        signal.signal(signal.SIGINT, before)


def _absolute(argument: str) -> str:
    """Returns an argument with an absolute path of its gin file, because tasks have another working directory."""
    flag, _, file = argument.partition("=")
    return f"{flag}={os.path.abspath(file)}" if flag == "--gin_file" else argument
