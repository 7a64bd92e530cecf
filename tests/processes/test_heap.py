import os
import subprocess
import sys

import pytest

from alfish.processes import heap

# Ten times 64 arrays of 1 MB are written and freed, the last one first, which leaves the end of the heap free.
PROGRAM = """
import ctypes
import resource
import numpy as np
from alfish.processes import heap

def fill():
    arrays = [np.ones(2**18, np.float32) for _ in range(64)]
    while arrays:
        arrays.pop()

ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: one fault would bring 2 MB
if {kept}:
    assert heap.keep_freed_memory()
fill()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    fill()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(kept: bool) -> int:
    env = {name: value for name, value in os.environ.items() if name not in heap.VARIABLES}
    ran = subprocess.run([sys.executable, "-c", PROGRAM.format(kept=kept)], env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return int(ran.stdout)


@pytest.mark.skipif(not hasattr(os, "confstr") or "CS_GNU_LIBC_VERSION" not in os.confstr_names, reason="glibc only")
def test_memory_that_an_update_frees_stays_with_the_process():
    assert page_faults(kept=False) > 10 * 64 * 100  # of 4 KiB each: 256 for an array
    assert page_faults(kept=True) < 64 * 100


def test_a_heap_that_the_user_has_set_is_unchanged(monkeypatch):
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1000000")
    assert not heap.keep_freed_memory.__wrapped__()
