"""The process that compiles functions for a training process, one after another.

The process and its C++ compilers end when the training process ends.
"""

import os
import signal
import socket
import threading
import time
from typing import Any, NamedTuple

from alfish.errors import first_line
from alfish.processes.channel import Channel, from_bytes

LOOK_SECONDS = 0.2  # seconds between checks that the training process still runs
NICENESS = 5  # priority below training, for machines with few cores


class Request(NamedTuple):
    """A function to compile, and settings of the training process that change the graph."""

    function: Any
    arguments: Any  # nest of `TensorLayout`
    precision: str
    num_threads: int
    default_dtype: Any
    is_deterministic: bool
    configuration: str = ""  # gin's bindings in force, as text


class Answer(NamedTuple):
    """The result of a request.

    Attributes:
      seconds: seconds that compilation took.
      error: reason why there is no graph; empty if there is a graph.
      library: file of the graph; None means that only torch's compiler can load the graph, which is in the cache.
      kernels: file of alfish's own kernels; None if they are not in use.
      structure: structure of the function's results.
      notes: attribute `notes` of the function after tracing.
    """

    seconds: float
    error: str = ""
    library: str | None = None
    kernels: str | None = None
    structure: Any = None
    notes: Any = None


def main(parent: int, fd: int) -> None:
    """Answers requests until the socket is closed.

    Args:
      parent: id of the training process.
      fd: file descriptor of a socket that receives pickled requests.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    os.nice(NICENESS)
    channel = Channel(socket.socket(fileno=fd))
    while True:
        try:
            (request,) = channel.receive()
        except EOFError:
            return
        began = time.monotonic()
        try:
            answer = _answer(request)
        except Exception as error:
            answer = Answer(0.0, _sentence(error))
        channel.send(answer._replace(seconds=time.monotonic() - began))


def _end_with(parent: int) -> None:
    """Ends this process and its child processes when the parent ends for any reason."""
    while os.getppid() == parent:
        time.sleep(LOOK_SECONDS)
    os.killpg(0, signal.SIGTERM)  # this process leads its process group; compilers remove incomplete files


def _answer(data: bytes) -> Answer:
    import gin
    import torch

    from alfish.compiler import kernels
    from alfish.compiler.inductor import CompiledFunction

    request: Request = from_bytes(data)
    torch.set_num_threads(request.num_threads)
    torch.set_default_dtype(request.default_dtype)
    torch.use_deterministic_algorithms(request.is_deterministic)
    if request.configuration:  # hooks may call configurable functions, which need their settings
        gin.parse_config(request.configuration, skip_unknown=True)
    function = CompiledFunction(request.function, request.arguments, request.precision)
    notes = request.function.notes
    return Answer(0.0, "", function.library(), kernels.library_file(), function.structure, notes)


def _sentence(error: Exception) -> str:
    from alfish.compiler.inductor import NotCompilable

    text = first_line(error)
    return text if isinstance(error, NotCompilable) else f"the process that compiles failed: {text}"
