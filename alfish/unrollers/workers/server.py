"""A process that has imported what workers need, which takes seconds, and is forked for each of them.

The trainer starts it with its first worker. It imports neither the user's modules nor reads a configuration, and it has
one thread. It ends when the trainer does, and its workers end with it. A worker is as a program of its own would be:
environment variables, module path, working directory, standard streams and processor cores are those that the trainer
has when it asks for the worker. Only variables that are read while a program starts (`LD_*`) are of the first start.
"""

import atexit
import contextlib
import errno
import gc
import importlib
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
from typing import NamedTuple

from alfish.errors import RunError
from alfish.runs.processes import follow
from alfish.unrollers.workers.pickling import from_bytes, to_bytes
from alfish.unrollers.workers.shared_memory import SharedMemory

# Each of these would start threads of its own in every worker.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
# Without the working directory that `-c` puts first: a worker imports from where the trainer does.
PROGRAM = (
    "import sys; sys.path[:] = filter(None, sys.path); "
    "from alfish.runs.processes import follow; follow(int(sys.argv[1])); "
    "from alfish.unrollers.workers.server import main; main(int(sys.argv[2]))"
)
NUMBER = struct.Struct("<q")  # of what is told of a worker: its process id, or minus an errno; then its exit code
MAX_FDS = 64  # of one request


class Launch(NamedTuple):
    """What a new worker takes over from the trainer, besides descriptors."""

    environment: dict[str, str]  # variables
    path: list[str]  # of modules
    cpus: set[int] | None  # cores that it may run on; None: the system has no such setting
    names: list[str]  # of the descriptors
    setup: bytes  # read when all of the above is in force, since it imports the user's modules


class WorkerProcess:
    """A worker's process, whose parent is the server.

    Attributes:
      pid: process id, and the id of its process group.
      returncode: exit code, negative: killed by that signal; None: not known to have ended.
    """

    def __init__(self, status: socket.socket, pid: int):
        self._status, self.pid = status, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Returns `returncode` as it is now."""
        with contextlib.suppress(TimeoutError):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end of the process.

        Returns:
          Its exit code.

        Raises:
          TimeoutError: it runs after that many seconds.
        """
        if self.returncode is None:
            try:
                self.returncode = _read_number(self._status, timeout)
            except EOFError:  # the server has died, so nobody can tell, and the worker dies with it
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGKILL)
                self.returncode = -signal.SIGKILL
            self._status.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Sends a signal; nothing happens if the process has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


class Server:
    """The trainer's side of the process that workers are forked from."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket

    @property
    def pid(self) -> int | None:
        """Id of the server's process; None: it does not run."""
        return None if self._process is None or self._process.poll() is not None else self._process.pid

    def launch(self, setup: bytes, fds: dict[str, int]) -> WorkerProcess:
        """Starts a worker, and the server if it does not run.

        Args:
          setup: see `worker.main`.
          fds: descriptors for the worker, each of which it gets a copy of.

        Raises:
          RunError: the server ends before it has started a worker.
          OSError: the system has no room for another process.
        """
        path = [entry or os.getcwd() for entry in sys.path]
        environment = os.environ | dict.fromkeys(THREAD_VARIABLES, "1") | {"PYTHONPATH": os.pathsep.join(path)}
        cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
        data = to_bytes(Launch(environment, path, cpus, list(fds), setup), "the worker's setup")
        memory = SharedMemory(len(data))
        memory.write(data)
        with self._lock, contextlib.ExitStack() as files:
            if self.pid is None:
                self._start(environment)
            status, theirs = socket.socketpair()
            files.enter_context(theirs)
            own = [os.open(".", os.O_RDONLY), *(_copy_of_stream(fd) for fd in (1, 2))]
            for fd in own:
                files.callback(os.close, fd)
            try:
                socket.send_fds(self._socket, [b"\0"], [theirs.fileno(), memory.fd, *own, *fds.values()])
                theirs.close()
                pid = _read_number(status, None)
            except (EOFError, OSError) as error:
                status.close()
                code = self.close()
                raise RunError(f"the process that workers are forked from ended with exit code {code}") from error
            except BaseException:  # a signal asks to stop
                status.close()
                self.close()
                raise
        if pid < 0:
            status.close()
            raise OSError(-pid, f"a worker cannot be started: {os.strerror(-pid)}")
        return WorkerProcess(status, pid)

    def _start(self, environment: dict[str, str]) -> None:
        self.close()
        self._socket, theirs = socket.socketpair()
        # The signal would else follow the thread that started it, whose end is not the end of the trainer.
        trainer = os.getpid() if threading.current_thread() is threading.main_thread() else 0
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, str(trainer), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is the trainer's to answer
            )

    def close(self) -> int | None:
        """Ends the server, and so its workers; returns its exit code. It is started again when it is needed."""
        if self._process is None:
            return None
        self._socket.close()
        process, self._process = self._process, None
        try:
            return process.wait(1.0)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()

    def forget(self) -> None:
        """In a forked child, whose server it is not: the trainer's end must show in the socket."""
        self._lock = threading.Lock()
        if self._process is not None:
            self._socket.close()
            self._process.returncode = 0  # so that nobody waits for what is not a child
            self._process = None


SERVER = Server()
atexit.register(SERVER.close)
os.register_at_fork(after_in_child=SERVER.forget)


# In the server.


def main(trainer_fd: int) -> None:
    """Serves until the trainer is gone, or, in a forked process, works until that is done."""
    from alfish.unrollers.workers import worker

    gc.collect()
    gc.freeze()  # so that collections in workers leave the pages that they share alone
    fds = _serve(socket.socket(fileno=trainer_fd))
    if not fds:
        return
    (
        memory,
        directory,
        *streams,
    ) = fds[:4]
    launch: Launch = from_bytes(SharedMemory(os.fstat(memory).st_size, memory).read())
    os.fchdir(directory)
    os.close(directory)
    for target, fd in zip((1, 2), streams):
        os.dup2(fd, target)
        os.close(fd)
    if launch.cpus is not None:
        os.sched_setaffinity(0, launch.cpus)
    os.environ.clear()
    os.environ.update(launch.environment)
    sys.path[:] = launch.path
    importlib.invalidate_caches()
    worker.main(launch.setup, dict(zip(launch.names, fds[4:], strict=True)))


def _serve(trainer: socket.socket) -> list[int]:
    """Forks workers and tells of their ends.

    Returns:
      The descriptors of its request, in a worker; none, in the server, when the trainer is gone.
    """
    server = os.getpid()
    statuses: dict[int, socket.socket] = {}  # by process id
    ended, end = os.pipe()
    for fd in (ended, end):
        os.set_blocking(fd, False)
    signal.set_wakeup_fd(end, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)  # else there is nothing to wake up for
    with selectors.DefaultSelector() as selector:
        selector.register(trainer, selectors.EVENT_READ)
        selector.register(ended, selectors.EVENT_READ)
        while True:
            ready = {key.fileobj for key, _ in selector.select()}
            if ended in ready:
                os.read(ended, 1 << 16)
                for pid in [pid for pid in statuses if _tell_of_end(pid, statuses[pid])]:
                    statuses.pop(pid).close()
            if trainer in ready:
                byte, fds, _, _ = socket.recv_fds(trainer, 1, MAX_FDS)
                if not byte:
                    return []
                for fd in fds:
                    os.set_inheritable(fd, False)
                status = socket.socket(fileno=fds.pop(0))
                try:
                    pid = os.fork()
                except OSError as error:
                    pid = -(error.errno or errno.EAGAIN)
                if pid == 0:
                    break
                for fd in fds:
                    os.close(fd)
                if pid > 0:
                    os.setpgid(pid, pid)
                with contextlib.suppress(OSError):  # the trainer does not wait for it any more
                    status.sendall(NUMBER.pack(pid))
                if pid > 0:
                    statuses[pid] = status
                else:
                    status.close()
    # In a worker, which has nothing of the server's.
    os.setpgid(0, 0)
    follow(server)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for other in (trainer, status, *statuses.values()):
        other.close()
    os.close(ended)
    os.close(end)
    return fds


def _tell_of_end(pid: int, status: socket.socket) -> bool:
    ended, code = os.waitpid(pid, os.WNOHANG)
    if ended:
        with contextlib.suppress(OSError):  # nobody wants to know
            status.sendall(NUMBER.pack(os.waitstatus_to_exitcode(code)))
    return bool(ended)


def _read_number(status: socket.socket, timeout: float | None) -> int:
    """The next number. Raises TimeoutError after `timeout` seconds, EOFError where the other process is gone."""
    status.settimeout(timeout)
    try:
        data = status.recv(NUMBER.size)
    except BlockingIOError:
        raise TimeoutError from None
    except ConnectionError:
        data = b""
    if not data:
        raise EOFError
    return int(NUMBER.unpack(data)[0])


def _copy_of_stream(fd: int) -> int:
    try:
        return os.dup(fd)
    except OSError:  # it is closed
        return os.open(os.devnull, os.O_RDWR)
