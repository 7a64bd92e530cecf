"""Numbers below 1.2e-38 are taken as 0 where a run computes, and the caller's way is restored where none does."""

import subprocess
import sys
import threading

import numpy as np
import pytest
import torch

from alfish.configuration.opening import process_preserved
from alfish.learner.optimizers import Adam
from alfish.runs import subnormals
from alfish.runs.subnormals import are_flushed, flush_subnormals


@pytest.fixture(autouse=True)
def kept():
    with subnormals.preserved():
        torch.set_flush_denormal(False)
        yield


def test_subnormal_numbers_are_zero_in_torch_and_numpy_and_in_later_threads():
    tensor, array = torch.tensor([1e-40]), np.array([1e-40], np.float32)
    assert tensor * 1 > 0 and array * np.float32(1) > 0 and not are_flushed()
    flush_subnormals()
    assert tensor * 1 == 0 and array * np.float32(1) == 0 and are_flushed()
    found = []
    thread = threading.Thread(target=lambda: found.append(are_flushed()))
    thread.start()
    thread.join()
    assert found == [True]


@pytest.mark.parametrize("before", [False, True])
def test_what_was_there_before_is_restored(before):
    torch.set_flush_denormal(before)
    for context in (subnormals.preserved, process_preserved):
        with context():
            torch.set_flush_denormal(not before)
        assert are_flushed() == before


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


def test_numpy_does_not_warn_of_a_subnormal_that_is_zero():
    code = (
        "import numpy as np; from alfish.runs.subnormals import flush_subnormals; flush_subnormals(); "
        "[np.finfo(kind).max for kind in (np.float16, np.float32, np.float64)]"
    )
    ran = subprocess.run([sys.executable, "-W", "error::UserWarning", "-c", code], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
