"""Transfer of weights to hosts and of segments to the trainer, each as one int64 array."""

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from alfish.processes.host import Publication
from alfish.processes.messages import Segment
from alfish.unrollers.workers.shared_tensors import Form, Layout, form_of
from alfish.unrollers.workers.slots import PolicyRows, rows_and_records

INLINE_BYTES = 100_000  # size of the largest array that is passed by value; each call would store a larger one again


class PublishedWeights:
    """The newest publication of the weights.

    Args:
      tensors: tensors of the weights.

    Attributes:
      num_words: size of the weights in words of 8 bytes.
      publication: number and version of the newest publication; numbers begin at 1.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]):
        self._tensors = list(tensors)
        layout = Layout([form_of(tensor) for tensor in tensors])
        self.num_words = layout.num_words
        self._words = np.zeros(layout.num_words, np.int64)
        self._values = layout.split(self._words)
        self.publication = Publication(0, 0)
        self._stored: Any = None  # Ray's reference to the newest values

    @torch.no_grad()
    def publish(self, version: int) -> None:
        """Copies the values of the tensors."""
        self.publication = Publication(self.publication.number + 1, version)
        for target, tensor in zip(self._values, self._tensors):
            target.copy_(tensor)
        self._stored = None

    def words(self) -> Any:
        """Returns the values as an argument of a call: an array `[W]` int64, or Ray's reference to it if it is large.

        Ray copies an array that is passed to a call, so the next `publish` does not change it.
        """
        if self._words.nbytes <= INLINE_BYTES:
            return self._words
        if self._stored is None:
            import ray

            self._stored = ray.put(self._words)
        return self._stored


class ReceivedSegments:
    """Rows and records of received segments that were not yet read.

    Args:
      forms: shape and dtype of each leaf of a segment.
      structure: structure of the leaves.

    Attributes:
      layout: layout of a segment.
    """

    def __init__(self, forms: list[Form], structure: Any):
        self.layout, self._structure = Layout(forms), structure
        self._words: dict[int, np.ndarray] = {}  # segments by slot

    def add(self, segment: Segment, words: np.ndarray) -> None:
        """Keeps a segment until it is read."""
        self._words[segment.slot] = words

    def read(self, segment: Segment) -> list[PolicyRows]:
        """Removes a segment, and returns views of it. Do not write to views: other processes may share the memory."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            leaves = self.layout.split(self._words.pop(segment.slot))
        return rows_and_records(segment, self._structure, leaves)
