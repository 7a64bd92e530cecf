"""Pickled messages between two processes of a run, over a socket."""

import contextlib
import io
import pickle
import socket
import struct
import sys
from typing import TYPE_CHECKING, Any

from alfish.errors import UsageError

if TYPE_CHECKING:
    import torch

NOT_IMPORTABLE = (
    "{name} needs {thing}, which is defined in the main program, so a worker process cannot import it; move it into a "
    "module (a file of its own that is imported), or bind Trainer.unroller = @SyncUnroller"
)


def to_bytes(thing: Any, name: str) -> bytes:
    """Pickles an object for another process. Tensors are copied to the CPU, without unused parts of their storage.

    Raises:
      UsageError: another process could not import a part of the object; the message names the part.
    """
    buffer = io.BytesIO()
    try:
        _Pickler(buffer).dump(thing)
    except _NotImportable as error:
        raise UsageError(NOT_IMPORTABLE.format(name=name, thing=error)) from None
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UsageError(
            f"{name} cannot be sent to a worker process ({error}); build it from functions and classes at the top "
            "level of a module, without lambdas, or bind Trainer.unroller = @SyncUnroller"
        ) from error
    return buffer.getvalue()


def from_bytes(data: bytes) -> Any:
    """Returns an object from `to_bytes`. Use it only for bytes from this run: unpickling can execute any code."""
    return pickle.loads(data)


class _NotImportable(Exception):
    pass


class _Pickler(pickle.Pickler):
    def __init__(self, file: Any):
        super().__init__(file, pickle.HIGHEST_PROTOCOL)

    def reducer_override(self, thing: Any) -> Any:
        torch = sys.modules.get("torch")  # a process that has not imported torch has no tensors
        if torch is not None and isinstance(thing, torch.Tensor):
            data = thing.detach().cpu().contiguous()
            raw = data.reshape(-1).view(torch.uint8).numpy().tobytes()
            return _tensor, (
                raw,
                tuple(data.shape),
                data.dtype,
                isinstance(thing, torch.nn.Parameter),
                thing.requires_grad,
            )
        if torch is not None and isinstance(thing, torch.device):
            return torch.device, ("cpu",)
        if getattr(thing, "__module__", None) == "__main__" and hasattr(thing, "__qualname__"):
            raise _NotImportable(f"{thing.__qualname__!r}")
        return NotImplemented


def _tensor(
    raw: bytes, shape: tuple[int, ...], dtype: "torch.dtype", is_parameter: bool, requires_grad: bool
) -> "torch.Tensor":
    import torch

    empty = torch.empty(0, dtype=torch.uint8)
    flat = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else empty
    tensor = flat.view(dtype).view(shape)
    return torch.nn.Parameter(tensor, requires_grad) if is_parameter else tensor.requires_grad_(requires_grad)


LENGTH = struct.Struct("<q")  # number of bytes of the next message


class Channel:
    """Sends and receives whole messages between the trainer and one worker.

    Only these two processes have ends of the channel. The death of one process therefore closes it, and no third
    process can block it. `multiprocessing.connection.Connection` has the same framing, but its `recv` blocks on an
    incomplete message: a worker that is suspended while it sends would block the trainer. `drain` does not block.

    Args:
      end: connected stream socket.
    """

    def __init__(self, end: socket.socket):
        self._socket = end
        self._received = bytearray()

    def fileno(self) -> int:
        """Returns the descriptor of the socket, for a selector."""
        return self._socket.fileno()

    def send(self, message: tuple) -> None:
        """Sends a message. Raises OSError if the peer has ended."""
        body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        self._socket.sendall(LENGTH.pack(len(body)) + body)

    def receive(self) -> Any:
        """Waits for the next message and returns it. Raises EOFError if the peer has ended."""
        while (message := self._take()) is None:
            self._fill()
        return message

    def drain(self) -> tuple[list[Any], bool]:
        """Returns the messages that have arrived, and whether the peer has ended. An incomplete message is kept."""
        self._socket.setblocking(False)
        gone = False
        try:
            while True:
                self._fill()
        except BlockingIOError:
            pass
        except (EOFError, OSError):
            gone = True
        finally:
            self._socket.setblocking(True)
        messages = []
        while (message := self._take()) is not None:
            messages.append(message)
        return messages, gone

    def close(self) -> None:
        """Closes the channel on both sides."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(
                socket.SHUT_RDWR
            )  # ends the connection even if a forked process holds a copy of this end
        self._socket.close()

    def _fill(self) -> None:
        data = self._socket.recv(1 << 16)
        if not data:
            raise EOFError("the other process has ended")
        self._received += data

    def _take(self) -> tuple | None:
        if len(self._received) < LENGTH.size:
            return None
        end = LENGTH.size + LENGTH.unpack_from(self._received)[0]
        if len(self._received) < end:
            return None
        body = bytes(self._received[LENGTH.size : end])
        del self._received[:end]
        return from_bytes(body)
