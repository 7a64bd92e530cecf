"""Compiles functions of tensors in another process while this process continues.

The other process is started as a new program, because a fork of a process with threads may hang. The process receives a
function and the layouts of the function's arguments, traces and compiles the function, and answers with the path of a
shared library. Loading the library takes milliseconds, and does not import torch's compiler.
"""

import contextlib
import io
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable
from typing import IO, Any, NamedTuple

import torch

from alfish import nest
from alfish.compiler import cache, kernels
from alfish.compiler.compiling_process import Answer, Request
from alfish.compiler.inductor import CompiledFunction, LoadedFunction, NotCompilable, TensorLayout
from alfish.compiler.torch_internals import storage_id
from alfish.errors import first_line
from alfish.nest import Nest
from alfish.parameters import gin_internals
from alfish.processes.channel import Channel
from alfish.processes.inheritance import WITHOUT_WORKING_DIRECTORY, import_path

PROGRAM = (
    f"{WITHOUT_WORKING_DIRECTORY}from alfish.compiler.compiling_process import main; "
    "main(int(sys.argv[1]), int(sys.argv[2]))"
)
LONGEST_SECONDS = 1800.0  # longest wait for an answer; torch may wait 600 s for a process that compiles the same graph
LOOK_SECONDS = 0.5  # seconds between two checks that the process is still running
END_SECONDS = 5.0  # seconds after which a process that was asked to end is killed


class NotSendable(Exception):
    """Raised for a function that cannot be sent to another process; the message says why."""


class Compiled(NamedTuple):
    """A compiled function.

    Attributes:
      function: compiled function.
      notes: attribute `notes` of the original function after tracing.
      seconds: seconds that compilation took.
    """

    function: CompiledFunction
    notes: Any
    seconds: float


class Compilation:
    """A function that another process compiles; the result of `BackgroundCompiler.request`."""

    def __init__(self, compiler: "BackgroundCompiler", make: Callable[[], CompiledFunction], index: int):
        self._compiler, self._make, self._index = compiler, make, index

    @property
    def is_ready(self) -> bool:
        """True if `result` would not wait for the other process."""
        return self._compiler.answer(self._index, wait=False) is not None

    def wait(self) -> None:
        """Waits until the function is compiled or has failed to compile."""
        self._compiler.answer(self._index)

    def result(self) -> Compiled:
        """Waits for the compiled function and returns it.

        Raises:
          NotCompilable: the function could not be compiled; the message says why.
        """
        answer = self._compiler.answer(self._index)
        assert answer is not None
        if answer.error:
            raise NotCompilable(answer.error)
        if answer.library is None:
            return Compiled(self._make(), answer.notes, answer.seconds)
        try:
            if answer.kernels is not None:
                kernels.use_library(answer.kernels)
            return Compiled(LoadedFunction(answer.library, answer.structure), answer.notes, answer.seconds)
        except (ImportError, OSError):  # another process has removed a file to keep the cache small
            return Compiled(self._make(), answer.notes, answer.seconds)


class BackgroundCompiler:
    """A process that compiles functions one after another. It runs from the first request until `close`."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel
        self._words: IO[bytes]  # file that receives the process's standard output and errors
        self._answers: list[Answer] = []
        self._num_requests = 0
        self._end: Callable[[], Any]

    def request(self, function: Any, arguments: Nest, precision: str) -> Compilation:
        """Begins to compile a function.

        Args:
          function: function to compile, see `CompiledFunction`; tracing may set its attribute `notes`.
          arguments: example arguments; only their layouts are used. Tensors of `function` that are also arguments are
            sent without values.
          precision: precision of large products and convolutions, see `CompiledFunction`.

        Raises:
          NotSendable: the function cannot be pickled, or the process cannot be started.
        """
        leaves = nest.leaves(arguments)
        layouts = nest.map(TensorLayout.of, arguments)
        settings = torch.get_num_threads(), torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()
        request = Request(function, layouts, precision, *settings, gin_internals.config_text())
        data = _to_bytes(request, {storage_id(leaf) for leaf in leaves})
        if self._process is None:
            self._start()
        with contextlib.suppress(OSError):  # if the process has ended, `answer` reports this
            self._channel.send((data,))
        self._num_requests += 1
        return Compilation(self, lambda: CompiledFunction(function, layouts, precision), self._num_requests - 1)

    def answer(self, index: int, wait: bool = True) -> Answer | None:
        """Returns the answer to the request with the given index; None if `wait` is False and no answer has arrived."""
        deadline = time.monotonic() + LONGEST_SECONDS
        while len(self._answers) <= index:
            messages, gone = self._channel.drain()
            self._answers += messages
            if len(self._answers) > index:
                break
            if gone or time.monotonic() > deadline:
                return Answer(0.0, self._last_words() if gone else f"it took longer than {LONGEST_SECONDS:g} s")
            if not wait:
                return None
            select.select([self._channel], [], [], LOOK_SECONDS)
        return self._answers[index]

    def _start(self) -> None:
        end, theirs = socket.socketpair()
        self._words = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", PROGRAM, str(os.getpid()), str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    env=cache.environment() | {"PYTHONPATH": os.pathsep.join(import_path())},
                    stdin=subprocess.DEVNULL,
                    stdout=self._words,
                    stderr=self._words,
                    start_new_session=True,  # Ctrl-C does not reach the process, and `_end` also ends its C++ compilers
                )
        except OSError as error:  # there are too many processes, or too little memory
            end.close()
            self._words.close()
            raise NotSendable(f"a process cannot be started ({first_line(error)})") from error
        self._channel = Channel(end)
        # If `close` is not called, the process ends with the program.
        self._end = weakref.finalize(self, _end, self._process, self._channel, self._words, os.getpid())

    def close(self) -> None:
        """Ends the process and drops unfinished compilations; the next request starts a new process."""
        if self._process is not None:
            self._end()
            self._process = None
            self._answers = []
            self._num_requests = 0

    def _last_words(self) -> str:
        assert self._process is not None
        try:
            code = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return "the process that compiles closed its socket"
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        self._words.seek(0)
        lines = self._words.read().decode(errors="replace").strip().splitlines()
        return f"the process that compiles ended {how}" + (f" ({lines[-1]})" if lines else "")


def _end(process: "subprocess.Popen[bytes]", channel: Channel, words: IO[bytes], owner: int) -> None:
    if os.getpid() != owner:  # this process is a fork whose parent still uses the compiling process
        return
    channel.close()
    words.close()
    if process.poll() is None:
        # With SIGTERM, C++ compilers remove incomplete files, which would otherwise stay in the cache.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _to_bytes(request: Request, storages: set[int]) -> bytes:
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, storages).dump(request)
    except Exception as error:  # the objects of an algorithm may raise anything when they are pickled
        raise NotSendable(first_line(error)) from error
    return buffer.getvalue()


class _Pickler(pickle.Pickler):
    """A pickler that omits the values of tensors that are also arguments of the function.

    Args:
      storages: storage ids of the arguments, see `storage_id`.
    """

    def __init__(self, file: Any, storages: set[int]):
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._storages = storages

    def reducer_override(self, thing: Any) -> Any:
        if isinstance(thing, torch.Tensor) and storage_id(thing) in self._storages:
            is_parameter = isinstance(thing, torch.nn.Parameter)
            return _empty, (TensorLayout.of(thing), is_parameter, thing.requires_grad)
        if getattr(thing, "__module__", None) == "__main__" and hasattr(thing, "__qualname__"):
            raise pickle.PicklingError(f"{thing.__qualname__} is defined in the main program; move it into a module")
        return NotImplemented


def _empty(layout: TensorLayout, is_parameter: bool, requires_grad: bool) -> torch.Tensor:
    tensor = torch.empty_strided(layout.shape, layout.stride(), dtype=layout.dtype, device=layout.device)
    return torch.nn.Parameter(tensor, requires_grad) if is_parameter else tensor.requires_grad_(requires_grad)
