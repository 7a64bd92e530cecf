"""Seconds of a call. Benchmarks measure calls in this loop only; it imports no library."""

import time
from collections.abc import Callable


def seconds_a_call(function: Callable[[int], object], num_calls: int = 1, first: int = 0) -> float:
    """Returns the mean seconds of consecutive calls.

    Args:
      function: to measure; receives the number of the call.
      num_calls: at least 1.
      first: number of the first call.
    """
    began = time.perf_counter()
    for number in range(first, first + num_calls):
        function(number)
    return (time.perf_counter() - began) / num_calls
