"""Memory that updates free stays with the process, and numbers below 1.2e-38 are taken as 0 where a run computes.

The caller's treatment of these numbers is restored.
"""

import os
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch

from alfish.configuration.opening import process_preserved
from alfish.learner.optimizers import Adam
from alfish.runs import process_settings
from alfish.runs.process_settings import flush_subnormals, subnormals_are_flushed


@pytest.fixture(autouse=True)
def kept():
    with process_settings.subnormals_preserved():
        torch.set_flush_denormal(False)
        yield


def test_subnormal_numbers_are_zero_in_torch_and_numpy_and_in_later_threads():
    tensor, array = torch.tensor([1e-40]), np.array([1e-40], np.float32)
    assert tensor * 1 > 0 and array * np.float32(1) > 0 and not subnormals_are_flushed()
    flush_subnormals()
    assert tensor * 1 == 0 and array * np.float32(1) == 0 and subnormals_are_flushed()
    found = []
    thread = threading.Thread(target=lambda: found.append(subnormals_are_flushed()))
    thread.start()
    thread.join()
    assert found == [True]


@pytest.mark.parametrize("before", [False, True])
def test_what_was_there_before_is_restored(before):
    torch.set_flush_denormal(before)
    for context in (process_settings.subnormals_preserved, process_preserved):
        with context():
            torch.set_flush_denormal(not before)
        assert subnormals_are_flushed() == before


def test_moments_without_gradient_end_at_zero():
    """In place of the smallest numbers, with which each further update would be slow."""
    ends = []
    for is_flushed in (False, True):
        torch.set_flush_denormal(is_flushed)
        parameters = torch.zeros(100, requires_grad=True)
        adam = Adam([parameters])
        for step in range(1100):
            parameters.grad = torch.full((100,), 1e-3 if step == 0 else 0.0)
            with torch.no_grad():
                adam.step(1e-3)
        ends.append(adam.tensors[0].max())
    torch.set_flush_denormal(False)
    assert 0 < ends[0] < 1e-40 and ends[1] == 0


# Five times 64 arrays of 1 MB are written and freed, the last one first, which leaves the end of the heap free; then
# again, after the process is told to keep what is freed. At the end, numpy looks up limits of its types.
PROGRAM = """
import ctypes
import resource
import sys
import numpy as np
from alfish.runs import process_settings

def fill():
    arrays = [np.ones(2**18, np.float32) for _ in range(64)]
    while arrays:
        arrays.pop()

def page_faults():
    fill()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        fill()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

if sys.platform == "linux":
    ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: one fault would bring 2 MB
    print(page_faults(), process_settings.keep_freed_memory(), page_faults())
process_settings.flush_subnormals()
for kind in (np.float16, np.float32, np.float64):
    np.finfo(kind).max
"""


@pytest.fixture(scope="module")
def program():
    """The program's end, in a process with the default settings."""
    env = {name: value for name, value in os.environ.items() if name not in process_settings.VARIABLES}
    command = [sys.executable, "-W", "error::UserWarning", "-c", PROGRAM]
    return subprocess.run(command, env=env, capture_output=True, text=True)


def test_numpy_does_not_warn_of_a_subnormal_that_is_zero(program):
    assert program.returncode == 0, program.stderr


@pytest.mark.skipif(not hasattr(os, "confstr") or "CS_GNU_LIBC_VERSION" not in os.confstr_names, reason="glibc only")
def test_memory_that_an_update_frees_stays_with_the_process(program):
    by_default, is_kept, kept = program.stdout.split()
    assert int(by_default) > 5 * 64 * 100  # of 4 KiB each: 256 for an array
    assert is_kept == "True" and int(kept) < 64 * 100 / 2


def test_a_heap_that_the_user_has_set_is_unchanged(monkeypatch):
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1000000")
    assert not process_settings.keep_freed_memory.__wrapped__()
