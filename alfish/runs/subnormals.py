"""Subnormal numbers, below 1.2e-38 in float32: processors compute many times slower with them than with others.

Where a gradient is 0, as at units of ReLU that are never active, Adam's moments shrink with each update until they are
subnormal. They stay there, because 0.9 times the smallest number is rounded to that number again.
"""

import contextlib
from collections.abc import Iterator

import numpy as np
import torch


def flush_subnormals() -> None:
    """Makes this thread take subnormal numbers as 0; threads that it starts later do so, too."""
    for kind in (np.float16, np.float32, np.float64):
        np.finfo(kind)  # numpy keeps the answer; older releases warn if the smallest number is 0 when first asked
    torch.set_flush_denormal(True)


def are_flushed() -> bool:
    """Returns whether this thread takes subnormal numbers as 0."""
    return bool(torch.full((), 1e-40) * 1 == 0)


@contextlib.contextmanager
def preserved() -> Iterator[None]:
    """Restores at the end how this thread takes subnormal numbers."""
    before = are_flushed()
    try:
        yield
    finally:
        torch.set_flush_denormal(before)
