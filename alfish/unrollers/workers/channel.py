"""How messages cross between the trainer and a worker process."""

import contextlib
import pickle
import socket
import struct
from typing import Any

from alfish.unrollers.workers.pickling import from_bytes

LENGTH = struct.Struct("<q")  # of a message's bytes, which stand behind it


class Channel:
    """Whole messages in both directions between two processes. Nobody else holds an end of it, so no other death can
    leave it locked; the death of the peer ends it.

    Args:
      end: a connected stream socket.
    """

    def __init__(self, end: socket.socket):
        self._socket = end
        self._received = bytearray()

    def fileno(self) -> int:
        """Descriptor of the socket, by which a selector waits for messages."""
        return self._socket.fileno()

    def send(self, message: tuple) -> None:
        """Sends a message whole. Raises OSError where the peer is gone."""
        body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        self._socket.sendall(LENGTH.pack(len(body)) + body)

    def receive(self) -> Any:
        """The next message, waited for. Raises EOFError where the peer is gone."""
        while (message := self._take()) is None:
            self._fill()
        return message

    def drain(self) -> tuple[list[Any], bool]:
        """The messages that are there, and whether the peer is gone; a message it had begun is dropped."""
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
        """Ends the channel for both sides."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # the peer hears of it, whatever copies of this end there may be
        self._socket.close()

    def _fill(self) -> None:
        data = self._socket.recv(1 << 16)
        if not data:
            raise EOFError("the other process is gone")
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
