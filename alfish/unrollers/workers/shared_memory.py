"""Memory that the trainer and its workers share: segments of rows, and weights.

It has no name in any file system, so nothing is left of it when the last process that maps it is gone, whatever ended
that. No lock is shared either: who may write what is settled by messages (segments) or by counters (weights).
"""

import mmap
import os
import tempfile
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

ALIGNMENT = 64  # bytes, a cache line


class SharedMemory:
    """Bytes, zeros at first.

    Args:
      size: bytes.
      fd: file descriptor of a memory that another process made, inherited from it; None: make one.
    """

    def __init__(self, size: int, fd: int | None = None):
        self.size = max(size, 1)
        if fd is None:
            fd = _anonymous_file()
            os.ftruncate(fd, self.size)
        os.set_inheritable(fd, False)  # what was inherited is not handed on
        self.fd = fd
        self.close = weakref.finalize(self, os.close, fd)  # the bytes themselves go with the last tensor on them
        self._map = mmap.mmap(fd, self.size)

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor that lies here, `offset` bytes from the beginning."""
        count = int(np.prod(shape))
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=offset).view(shape)

    def write(self, data: bytes) -> None:
        """Copies bytes to the beginning."""
        self._map[: len(data)] = data

    def read(self) -> bytes:
        """A copy of all bytes."""
        return self._map[:]


class Block:
    """Copies of a list of tensors, `count` times over, in one shared memory.

    Args:
      forms: shape and dtype of each tensor.
      count: copies.
      fd: see `SharedMemory`.

    Attributes:
      copies: `[count]` lists of tensors.
      words: `[count]` int64 tensors, each of all bytes of a copy, those between tensors included, which are 0.
    """

    def __init__(self, forms: Sequence[tuple[tuple[int, ...], torch.dtype]], count: int, fd: int | None = None):
        offsets, stride = [], 0
        for shape, dtype in forms:
            offsets.append(stride)
            size = int(np.prod(shape)) * dtype.itemsize
            stride += -(-size // ALIGNMENT) * ALIGNMENT
        self.memory = SharedMemory(stride * count, fd)
        self.copies = [
            [self.memory.tensor(k * stride + offset, *form) for offset, form in zip(offsets, forms)]
            for k in range(count)
        ]
        self.words = [self.memory.tensor(k * stride, (stride // 8,), torch.int64) for k in range(count)]


class SharedWeights:
    """Where the trainer publishes tensors and workers read them, without a lock.

    There are two copies; the trainer writes the one that is not the newest, and then its number into the header. A
    processor may show these writes to another one in any order (ARM's do), and the trainer may come round to a copy
    while it is read; Python has no fence that orders them. So each copy ends with its number and with a word that makes
    the sum of all its words 0. A reader copies all of it into memory of its own, and copies again unless number and
    sum are right: the content tells what has not arrived yet or is overwritten, in whatever order it became visible.

    Args:
      tensors: whose values are published, or that are read into; the same list on both sides.
      header, fd: of the trainer's memories, in a worker; None: make them.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], header: int | None = None, fd: int | None = None):
        self._tensors = list(tensors)
        self._header_memory = SharedMemory(64, header)
        self._newest = self._header_memory.tensor(0, (1,), torch.int64).numpy()  # number of the newest publication
        # The last three words: number, version, and the one that makes the sum 0.
        forms = [*((tuple(tensor.shape), tensor.dtype) for tensor in tensors), ((3,), torch.int64)]
        self._block = Block(forms, 2, fd)
        self._own = Block(forms, 1)

    @property
    def fds(self) -> tuple[int, int]:
        """Descriptors of the two memories, header first, for a worker to inherit."""
        return self._header_memory.fd, self._block.memory.fd

    @property
    def newest(self) -> int:
        """The number of the newest publication."""
        return int(self._newest[0])

    @torch.no_grad()
    def publish(self, version: int) -> None:
        """Writes the tensors' values, with a number that says which they are."""
        number = self.newest + 1
        *targets, last = self._block.copies[number % 2]
        for target, tensor in zip(targets, self._tensors):
            target.copy_(tensor)
        last.copy_(torch.tensor([number, version, 0]))
        last[2] = -self._block.words[number % 2].sum()
        self._newest[0] = number

    @torch.no_grad()
    def read(self, number: int | None = None) -> int:
        """Writes values into the tensors.

        Args:
          number: of the publication, of which a message of the trainer's has told; None: the newest.

        Returns:
          Their version.

        Raises:
          LookupError: that publication has been overwritten.
        """
        *sources, last = self._own.copies[0]
        while True:
            wanted = self.newest if number is None else number
            self._take(wanted % 2)
            found, version, _ = last.tolist()
            is_whole = int(self._own.words[0].sum()) == 0
            if is_whole and (found == wanted or (number is None and found > wanted)):
                for tensor, source in zip(self._tensors, sources):
                    tensor.copy_(source)
                return version
            if number is not None:  # the message came after all of it
                raise LookupError(f"publication {number} has been overwritten")

    def _take(self, k: int) -> None:
        self._own.words[0].copy_(self._block.words[k])


def state_tensors(*modules: Any) -> list[torch.Tensor]:
    """Parameters and buffers, each once, in an order that does not vary."""
    seen: dict[int, torch.Tensor] = {}
    for module in modules:
        for _, tensor in (*module.named_parameters(), *module.named_buffers()):
            seen.setdefault(id(tensor), tensor)
    return list(seen.values())


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("alfish")
    with tempfile.TemporaryFile() as file:  # has no name from the start
        return os.dup(file.fileno())
