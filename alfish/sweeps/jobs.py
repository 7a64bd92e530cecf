"""Processes of `alfish train`, several at a time, and what each of them calls first."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from alfish.processes.inheritance import THREAD_VARIABLES, WITHOUT_WORKING_DIRECTORY, import_path
from alfish.runs.files import lock, open_own, writing

OUTPUT = "output.txt"  # file in a run's directory with the output of its newest process
PROGRAM = WITHOUT_WORKING_DIRECTORY + (  # imports from the working directory last, like the command
    "import runpy; from alfish.sweeps.jobs import follow; follow(int(sys.argv.pop(1)), sys.argv.pop(1)); "
    "runpy.run_module('alfish', run_name='__main__', alter_sys=True)"
)
POLL_SECONDS = 0.05
KILL_SECONDS = 600.0  # seconds from SIGTERM to SIGKILL of an abandoned run, enough to save a large replay buffer
LOOK_SECONDS = 0.2  # seconds between looks at the lock of a directory


class JobEnded(NamedTuple):
    """The end of a run's process.

    Attributes:
      directory: directory of the run.
      status: exit status of the process; -n means killed by signal n.
    """

    directory: Path
    status: int


class Jobs(Protocol):
    """Processes of `alfish train`, at most `size` at a time; each trains the run in one directory.

    Attributes:
      size: largest number of processes that run at the same time.
      running: directories of runs whose processes have not been reported as ended.
    """

    size: int

    @property
    def running(self) -> Sequence[Path]: ...

    def start(self, directory: Path, arguments: Sequence[str]) -> None:
        """Starts `alfish train --root_dir=DIRECTORY ARGUMENTS`; the directory must exist."""

    def stop(self, directory: Path) -> None:
        """Asks a run to save a checkpoint and end; `wait` then reports its end. Does nothing if the run has ended."""

    def wait(self, timeout: float) -> list[JobEnded]:
        """Returns the runs whose processes have ended; waits at most `timeout` seconds for the first one."""

    def close(self) -> None:
        """Asks all runs to save and end, and waits for them. KeyboardInterrupt kills the processes."""


class LocalJobs:
    """`Jobs` on this machine.

    Each process uses one thread, and has its own process group, so that Ctrl-C in the terminal does not reach it. When
    this process ends for any reason, all runs save a checkpoint and end, because they read from a pipe that closes
    with this process.

    Args:
      size: largest number of processes that run at the same time.
    """

    def __init__(self, size: int):
        self.size = size
        self._processes: dict[Path, subprocess.Popen[bytes]] = {}
        self._lifeline, self._held = os.pipe()

    @property
    def running(self) -> Sequence[Path]:
        return list(self._processes)

    def start(self, directory: Path, arguments: Sequence[str]) -> None:
        variables = {"PYTHONPATH": os.pathsep.join(import_path()), **dict.fromkeys(THREAD_VARIABLES, "1")}
        command = [str(self._lifeline), str(directory), "train", f"--root_dir={directory}", *arguments]
        with writing(directory / OUTPUT), open_own(directory / OUTPUT, "wb") as output:
            self._processes[directory] = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, *command],
                pass_fds=[self._lifeline],
                env=os.environ | variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def stop(self, directory: Path) -> None:
        # Only the trainer gets the signal: processes of environments would end before the last rows are collected.
        if directory in self._processes:
            self._processes[directory].terminate()

    def wait(self, timeout: float) -> list[JobEnded]:
        until = time.monotonic() + timeout
        while True:
            status = {directory: process.poll() for directory, process in self._processes.items()}
            ended = [JobEnded(directory, code) for directory, code in status.items() if code is not None]
            for one in ended:
                _kill_group(self._processes.pop(one.directory).pid)  # ends processes that a killed trainer left
            if ended or time.monotonic() >= until:
                return ended
            time.sleep(POLL_SECONDS)

    def close(self) -> None:
        for directory in self.running:
            self.stop(directory)
        try:
            while self._processes:
                self.wait(1.0)
        finally:
            for process in self._processes.values():
                _kill_group(process.pid)
                process.wait()
            self._processes.clear()
            os.close(self._held)
            os.close(self._lifeline)


def follow(lifeline: int, directory: str) -> None:
    """Makes this process save and end when its starter ends; waits until the run's directory is unlocked.

    Args:
      lifeline: read end of a pipe without data; the starter holds the other end.
      directory: directory of the run, to which a process of a killed starter may still be saving a checkpoint.
    """
    os.set_inheritable(lifeline, False)
    threading.Thread(target=_end_with, args=(lifeline,), name="lifeline", daemon=True).start()
    holder = threading.Event()  # any weakly referenceable object
    while (unlock := lock(Path(directory), holder)) is None:
        time.sleep(LOOK_SECONDS)
    unlock()


def num_cores() -> int:
    """Returns the number of processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: EPERM for a group of zombies
        os.killpg(group, signal.SIGKILL)


def _end_with(lifeline: int) -> None:
    os.read(lifeline, 1)  # returns when the pipe is closed
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(KILL_SECONDS)
    os.killpg(0, signal.SIGKILL)
