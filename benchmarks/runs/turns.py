"""A side of a comparison in turns: a process that waits, works for some seconds when asked to, and waits again."""

import json
import sys
import time
from collections.abc import Callable

from benchmarks.runs.script import versions

READY = "ready"


def take_turns(work: Callable[[], int], *packages: str) -> None:
    """Works for as many seconds as each line of standard input says, and prints what was reached as a JSON object.

    Args:
      work: function that makes some environment steps and returns their number; called before the first turn as often
        as it must be for all graphs to exist.
      packages: names of the installed packages whose versions are printed.
    """
    print(READY, versions(*packages), flush=True)
    for line in sys.stdin:
        began, cpu, steps = time.perf_counter(), time.process_time(), 0
        while time.perf_counter() - began < float(line):
            steps += work()
        seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu
        print(json.dumps({"steps": steps, "seconds": seconds, "cpu_seconds": cpu_seconds}), flush=True)
