"""Messages between two processes over a socket."""

import contextlib
import pickle
import socket
import struct
from typing import Any

from alfish.processes.pickling import from_bytes

LENGTH = struct.Struct("<q")  # number of bytes of the message that follows


class Channel:
    """Whole messages in both directions between the trainer and one worker.

    No third process holds an end, so only the death of the peer ends the channel, and nothing can leave it locked.
    `multiprocessing.connection.Connection` has the same framing, but its `recv` blocks on a message of which only the
    first part has arrived: a worker that was stopped in the middle of a message would block the trainer. `drain` never
    blocks.

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
