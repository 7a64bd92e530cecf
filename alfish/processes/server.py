"""The server: a process that imports the modules of workers once, which takes seconds, and forks every worker.

The trainer starts the server with its first worker. The server imports no module of the user, reads no configuration
and has one thread. The server ends with the trainer, and workers end with the server.

A worker behaves like a new program: it has the environment variables, module path, working directory, standard streams
and processor cores that the trainer has at the time of the request. Variables that a program reads while it starts,
such as LD_LIBRARY_PATH, are an exception: they take effect with the values that they have when the server starts.
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
import weakref
from typing import NamedTuple

from alfish.errors import RunError
from alfish.processes.channel import from_bytes, to_bytes
from alfish.processes.inheritance import THREAD_VARIABLES, WITHOUT_WORKING_DIRECTORY, follow, import_path
from alfish.processes.shared_memory import SharedMemory

PROGRAM = (
    f"{WITHOUT_WORKING_DIRECTORY}from alfish.processes.inheritance import follow; follow(int(sys.argv[1])); "
    "from alfish.processes.server import main; main(int(sys.argv[2]), sys.argv[3])"
)
NUMBER = struct.Struct("<q")  # the two answers to a request: the process id (or -errno), and later the exit code
MAX_FDS = 64  # maximum number of file descriptors of one request


class Launch(NamedTuple):
    """State of the trainer that a new worker inherits, in addition to file descriptors."""

    environment: dict[str, str]  # environment variables
    path: list[str]  # sys.path
    cpus: set[int] | None  # processor cores to run on; None if the system has no such setting
    names: list[str]  # names of the descriptors in the request, in their order
    setup: bytes  # pickled separately, because unpickling it imports the user's modules


class WorkerProcess:
    """Handle of a worker's process, whose parent is the server.

    Attributes:
      pid: process id, which is also the id of the worker's process group.
      returncode: exit code, or -n if signal n killed the process; None until the end of the process is detected.
      lost_server: process id of the server, if the process has ended together with the server; None otherwise.
    """

    def __init__(self, status: socket.socket, pid: int, server_pid: int):
        self._status, self.pid, self._server_pid = status, pid, server_pid
        self.returncode: int | None = None
        self.lost_server: int | None = None

    def poll(self) -> int | None:
        """Returns `returncode` without waiting."""
        with contextlib.suppress(TimeoutError):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the process to end and returns its exit code.

        Args:
          timeout: seconds to wait; None means no limit.

        Raises:
          TimeoutError: the process still runs after `timeout` seconds.
        """
        if self.returncode is None:
            try:
                self.returncode = _read_number(self._status, timeout)
            except EOFError:  # the server has died, and the worker with it
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGKILL)
                self.returncode, self.lost_server = -signal.SIGKILL, self._server_pid
            self._status.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Sends a signal. Does nothing if the process has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


class Server:
    """Handle of the server in the trainer."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket

    @property
    def pid(self) -> int | None:
        """Process id of the server; None if it does not run."""
        return None if self._process is None or self._process.poll() is not None else self._process.pid

    def start(self, program: str) -> None:
        """Starts the server if it is not running, without waiting. The first worker then waits less for imports.

        Args:
          program: module that the server imports; its `main` runs in each worker. All workers have the same module.
        """
        with self._lock:
            if self.pid is None:
                self._start(program, _environment())

    def launch(self, program: str, setup: bytes, fds: dict[str, int]) -> WorkerProcess:
        """Starts a worker; starts the server first if it is not running.

        Args:
          program: module, as for `start`.
          setup: first argument of `main`.
          fds: file descriptors by name, the second argument of `main`. The worker receives copies.

        Raises:
          RunError: the server ended before it forked the worker.
          OSError: fork failed.
        """
        path, environment = import_path(), _environment()
        cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
        data = to_bytes(Launch(environment, path, cpus, list(fds), setup), "the worker's setup")
        memory = SharedMemory(len(data))
        memory.write(data)
        with self._lock, contextlib.ExitStack() as files:
            if self.pid is None:
                self._start(program, environment)
            assert self._process is not None
            server_pid = self._process.pid
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
                raise RunError(
                    f"the process that forks workers ended with exit code {code}; its output above shows the reason"
                ) from error
            except BaseException:  # a signal interrupted the launch; the worker ends when it finds its channel closed
                status.close()
                raise
        if pid < 0:
            status.close()
            raise OSError(-pid, f"cannot fork a worker: {os.strerror(-pid)}")
        return WorkerProcess(status, pid, server_pid)

    def _start(self, program: str, environment: dict[str, str]) -> None:
        self.close()
        self._socket, theirs = socket.socketpair()
        # The server would die with the thread that starts it; 0 prevents this outside the main thread, see `follow`.
        trainer = os.getpid() if threading.current_thread() is threading.main_thread() else 0
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, str(trainer), str(theirs.fileno()), program],
                pass_fds=[theirs.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C does not reach the server; the trainer handles it
            )

    def close(self) -> int | None:
        """Ends the server and all workers; returns the server's exit code. The next `launch` starts a new server."""
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
        """Closes a forked child's copy of the socket, so that the socket closes when the trainer ends."""
        self._lock = threading.Lock()
        if self._process is not None:
            self._socket.close()
            self._process.returncode = 0  # not a child of this process, so it cannot be waited for
            self._process = None


SERVER = Server()
atexit.register(SERVER.close)
os.register_at_fork(after_in_child=SERVER.forget)


# The server's side.


def main(trainer_fd: int, program: str) -> None:
    """Runs the server until the trainer ends. In each forked process, runs the `main` of the module `program`."""
    worker = importlib.import_module(program)
    gc.collect()
    gc.freeze()  # garbage collection in workers does not copy shared pages
    for finalizer in list(getattr(weakref.finalize, "_registry", ())):  # a name that Python may change
        finalizer.atexit = False  # torch's would unregister its operations at the end of each worker
    fds = _serve(socket.socket(fileno=trainer_fd))
    if not fds:
        os._exit(0)  # skips the interpreter's clean-up, which would delay the end of the workers
    memory, directory, *streams = fds[:4]
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
    try:
        worker.main(launch.setup, dict(zip(launch.names, fds[4:], strict=True)))
    except SystemExit as end:
        if not isinstance(end.code, int):  # the interpreter prints the message in `code`
            raise
        _end(end.code)
    _end(0)


def _end(code: int) -> None:
    """Ends a worker without the interpreter's clean-up, which would copy all pages that the worker shares."""
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.main_thread():
            thread.join()
    gc.collect()  # closes files in reference cycles; shared objects are exempt
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # the stream is closed
            stream.flush()
    os._exit(code)


def _serve(trainer: socket.socket) -> list[int]:
    """Forks a worker for each request, and reports the exit codes of workers.

    Returns:
      In a worker, the descriptors of the request. In the server, an empty list when the trainer has ended.
    """
    server = os.getpid()
    statuses: dict[int, socket.socket] = {}  # status sockets by process id
    ended, end = os.pipe()
    for fd in (ended, end):
        os.set_blocking(fd, False)
    signal.set_wakeup_fd(end, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)  # only signals with a handler write to the descriptor
    with selectors.DefaultSelector() as selector:
        selector.register(trainer, selectors.EVENT_READ)
        selector.register(ended, selectors.EVENT_READ)
        while True:
            ready = {key.fileobj for key, _ in selector.select()}
            if ended in ready:
                os.read(ended, 1 << 16)
                for pid in [pid for pid in statuses if _report_end(pid, statuses[pid])]:
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
                with contextlib.suppress(OSError):  # the trainer has abandoned the request
                    status.sendall(NUMBER.pack(pid))
                if pid > 0:
                    statuses[pid] = status
                else:
                    status.close()
    # The worker reverts the settings of the server.
    os.setpgid(0, 0)
    follow(server)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for other in (trainer, status, *statuses.values()):
        other.close()
    os.close(ended)
    os.close(end)
    return fds


def _environment() -> dict[str, str]:
    """Returns the environment variables of the server and of workers."""
    return os.environ | dict.fromkeys(THREAD_VARIABLES, "1") | {"PYTHONPATH": os.pathsep.join(import_path())}


def _report_end(pid: int, status: socket.socket) -> bool:
    ended, code = os.waitpid(pid, os.WNOHANG)
    if ended:
        with contextlib.suppress(OSError):  # the trainer has given up the worker
            status.sendall(NUMBER.pack(os.waitstatus_to_exitcode(code)))
    return bool(ended)


def _read_number(status: socket.socket, timeout: float | None) -> int:
    """Returns the next number. Raises TimeoutError after `timeout` seconds, EOFError if the server has ended."""
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
    except OSError:  # the stream is closed
        return os.open(os.devnull, os.O_RDWR)
