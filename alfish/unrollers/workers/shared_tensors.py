"""Tensors in buffers that processes share or send: segments and weights. Buffers consist of words of 8 bytes."""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch

from alfish.processes.shared_memory import Publications, SharedMemory

ALIGNMENT = 64  # alignment in bytes, a cache line
Form: TypeAlias = tuple[tuple[int, ...], torch.dtype]  # shape and dtype of a tensor


def form_of(tensor: torch.Tensor) -> Form:
    """Returns the shape and dtype of a tensor."""
    return tuple(tensor.shape), tensor.dtype


class Layout:
    """Positions of a list of tensors in one buffer.

    Args:
      forms: shape and dtype of each tensor.

    Attributes:
      num_words: length of the buffer in words of 8 bytes.
    """

    def __init__(self, forms: Sequence[Form]):
        self._parts, size = [], 0
        for shape, dtype in forms:
            end = size + int(np.prod(shape)) * dtype.itemsize
            self._parts.append((size, end, dtype, shape))
            size += -(-(end - size) // ALIGNMENT) * ALIGNMENT
        self.num_words = size // 8

    def split(self, words: np.ndarray) -> list[torch.Tensor]:
        """Returns the tensors as views of a buffer `[num_words]` int64."""
        data = torch.from_numpy(words).view(torch.uint8)
        return [data[begin:end].view(dtype).view(shape) for begin, end, dtype, shape in self._parts]


class Block:
    """One shared memory with space for `count` copies of a list of tensors.

    Args:
      forms: shape and dtype of each tensor.
      count: number of copies.
      fd: file descriptor of the memory, see `SharedMemory`.

    Attributes:
      copies: `count` lists of tensors.
      words: `count` arrays of int64, each a view of a whole copy; bytes between tensors are 0.
    """

    def __init__(self, forms: Sequence[Form], count: int, fd: int | None = None):
        layout = Layout(forms)
        self.memory = SharedMemory(8 * layout.num_words * count, fd)
        starts = (k * layout.num_words for k in range(count))
        self.words = [self.memory.words(start, layout.num_words) for start in starts]
        self.copies = [layout.split(words) for words in self.words]


class SharedWeights:
    """Values of tensors that the trainer publishes and workers read.

    Args:
      tensors: tensors that `publish` reads or `read` writes, in the same order in the trainer and in workers.
      header, fd: descriptors of the memories, see `Publications`.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], header: int | None = None, fd: int | None = None):
        layout = Layout([form_of(tensor) for tensor in tensors])
        self._tensors, self._publications = list(tensors), Publications(layout.num_words, header, fd)
        self._copies = [layout.split(words) for words in self._publications.copies]
        self._own = layout.split(self._publications.own)

    @property
    def fds(self) -> tuple[int, int]:
        """File descriptors of the memories, see `Publications`."""
        return self._publications.fds

    @property
    def newest(self) -> int:
        """Number of the newest publication."""
        return self._publications.newest

    @torch.no_grad()
    def publish(self, version: int) -> None:
        """Publishes the values of the tensors under the next number."""
        number = self.newest + 1
        for target, tensor in zip(self._copies[number % 2], self._tensors):
            target.copy_(tensor)
        self._publications.commit(number, version)

    @torch.no_grad()
    def read(self, number: int | None = None) -> int:
        """Copies a publication into the tensors and returns its version; see `Publications.read`."""
        version = self._publications.read(number)
        for tensor, source in zip(self._tensors, self._own):
            tensor.copy_(source)
        return version
