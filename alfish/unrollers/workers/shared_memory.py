"""Memory that the trainer and its workers share: segments of rows, and weights.

The memory has no name in any file system, so the system frees it when the last process that maps it has ended, even by
SIGKILL. No lock is shared: messages decide who may write a segment, and readers of weights check what they have read.
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
    """Shared bytes, initially 0.

    Args:
      size: number of bytes.
      fd: descriptor of the memory that another process made; None: makes a new memory.
    """

    def __init__(self, size: int, fd: int | None = None):
        self.size = max(size, 1)
        if fd is None:
            fd = _anonymous_file()
            os.ftruncate(fd, self.size)
        os.set_inheritable(fd, False)  # programs that environments start must not hold it
        self.fd = fd
        self.close = weakref.finalize(self, os.close, fd)  # the bytes are freed with the last tensor on them
        self._map = mmap.mmap(fd, self.size)

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Returns a view of the memory as a tensor, `offset` bytes from the beginning."""
        count = int(np.prod(shape))
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=offset).view(shape)

    def write(self, data: bytes) -> None:
        """Copies bytes to the beginning."""
        self._map[: len(data)] = data

    def read(self) -> bytes:
        """Returns a copy of all bytes."""
        return self._map[:]


class Layout:
    """Places of a list of tensors in one buffer.

    Args:
      forms: shape and dtype of each tensor.

    Attributes:
      num_words: length of the buffer in words of 8 bytes.
    """

    def __init__(self, forms: Sequence[tuple[tuple[int, ...], torch.dtype]]):
        self._parts, size = [], 0
        for shape, dtype in forms:
            end = size + int(np.prod(shape)) * dtype.itemsize
            self._parts.append((size, end, dtype, shape))
            size += -(-(end - size) // ALIGNMENT) * ALIGNMENT
        self.num_words = size // 8

    def split(self, words: torch.Tensor) -> list[torch.Tensor]:
        """Returns the tensors as views of a buffer `[num_words]` int64."""
        data = words.view(torch.uint8)
        return [data[begin:end].view(dtype).view(shape) for begin, end, dtype, shape in self._parts]


class Block:
    """`count` copies of a list of tensors in one shared memory.

    Args:
      forms: shape and dtype of each tensor.
      count: number of copies.
      fd: see `SharedMemory`.

    Attributes:
      copies: `count` lists of tensors.
      words: `count` int64 tensors, each a view of one whole copy; bytes between tensors are 0.
    """

    def __init__(self, forms: Sequence[tuple[tuple[int, ...], torch.dtype]], count: int, fd: int | None = None):
        layout = Layout(forms)
        stride = 8 * layout.num_words
        self.memory = SharedMemory(stride * count, fd)
        self.words = [self.memory.tensor(k * stride, (layout.num_words,), torch.int64) for k in range(count)]
        self.copies = [layout.split(words) for words in self.words]


class SharedWeights:
    """Values of tensors that the trainer publishes and workers read, without a lock.

    There are two copies. The trainer writes the older copy, and then the number of the publication into a header.
    Another processor may see these writes in any order (ARM reorders them), and the trainer may overwrite a copy while
    it is read; Python has no memory fence against that. Each copy therefore ends with its number and a checksum, a word
    that makes the sum of all words 0. A reader first copies everything into private memory. It repeats that until
    number and checksum are right.

    Args:
      tensors: source of `publish`, or target of `read`; the same list in both processes.
      header, fd: descriptors of the trainer's memories, in a worker; None: makes new memories.
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
        """Descriptors of the two memories, header first."""
        return self._header_memory.fd, self._block.memory.fd

    @property
    def newest(self) -> int:
        """Number of the newest publication."""
        return int(self._newest[0])

    @torch.no_grad()
    def publish(self, version: int, number: int | None = None) -> None:
        """Publishes the values of the tensors under a number above `newest`; None: the next one."""
        if number is None:
            number = self.newest + 1
        *targets, last = self._block.copies[number % 2]
        for target, tensor in zip(targets, self._tensors):
            target.copy_(tensor)
        last.copy_(torch.tensor([number, version, 0]))
        last[2] = -self._block.words[number % 2].sum()
        self._newest[0] = number

    @torch.no_grad()
    def read(self, number: int | None = None) -> int:
        """Copies a publication into the tensors and returns its version.

        Args:
          number: of the publication; a message must have announced it. None: the newest.

        Raises:
          LookupError: the publication has been overwritten.
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
            if number is not None:  # the publication was complete before its message was sent
                raise LookupError(f"publication {number} has been overwritten")

    def _take(self, k: int) -> None:
        self._own.words[0].copy_(self._block.words[k])


def state_tensors(algorithm: Any, transforms: Any) -> list[torch.Tensor]:
    """Returns the parameters and buffers that training changes, each once, in a fixed order.

    Those of encoders in the transforms never change, so workers have them from the start.
    """
    seen: dict[int, torch.Tensor] = {}
    for module in (algorithm, *transforms.others):
        for _, tensor in (*module.named_parameters(), *module.named_buffers()):
            seen.setdefault(id(tensor), tensor)
    return list(seen.values())


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("alfish")
    with tempfile.TemporaryFile() as file:  # has no name from the start
        return os.dup(file.fileno())
