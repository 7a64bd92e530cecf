"""Subnormal numbers, below 1.2e-38 in float32, with which processors compute many times more slowly.

If a gradient is 0, as for a ReLU unit that is never active, Adam's moments shrink with each update until they are
subnormal. The moments stay subnormal, because 0.9 times the smallest number is rounded to the same number.
"""

import contextlib
from collections.abc import Iterator

import numpy as np
import torch


def flush_subnormals() -> None:
    """Makes this thread, and threads that it starts later, treat subnormal numbers as 0."""
    for kind in (np.float16, np.float32, np.float64):
        np.finfo(kind)  # numpy caches the smallest number; older releases warn if it is 0 at the first query
    torch.set_flush_denormal(True)


def are_flushed() -> bool:
    """Returns whether this thread treats subnormal numbers as 0."""
    return bool(torch.full((), 1e-40) * 1 == 0)


@contextlib.contextmanager
def preserved() -> Iterator[None]:
    """Restores this thread's treatment of subnormal numbers on exit."""
    before = are_flushed()
    try:
        yield
    finally:
        torch.set_flush_denormal(before)
