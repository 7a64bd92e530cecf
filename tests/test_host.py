"""Reads of a device: what arrives is what was there, in one copy."""

import numpy as np
import pytest
import torch
from far_device import FarDevice

from alfish import host


def leaves(device):
    """One of each size of numbers, in an order in which packed bytes would not be aligned."""
    return {
        "flags": torch.tensor([True, False, True]).to(device),
        "pair": (torch.arange(6.0).view(2, 3).t().to(device), torch.tensor(7, dtype=torch.int64).to(device)),
        "bytes": torch.arange(5, dtype=torch.uint8).to(device),
        "nothing": torch.zeros(0, 2).to(device),
        "sum": torch.tensor(0.5, dtype=torch.float64).to(device),
        "array": np.arange(3),
        "number": 2.5,
    }


def check(found):
    assert found["flags"].tolist() == [True, False, True] and found["flags"].dtype == bool
    assert found["pair"][0].tolist() == [[0, 3], [1, 4], [2, 5]] and found["pair"][1] == 7
    assert found["bytes"].tolist() == [0, 1, 2, 3, 4] and found["nothing"].shape == (0, 2)
    assert found["sum"] == 0.5 and found["sum"].dtype == np.float64


@pytest.fixture
def far(monkeypatch):
    monkeypatch.setattr("far_device._cause", lambda: ("test_host.py", "", 0))
    with FarDevice() as far:
        yield far


def test_reading_copies_data_once(far):
    given = leaves(far.device)
    far.clear()
    found = host.read(given)
    assert len(far.waits) == 1
    check(found)
    assert found["array"] is given["array"] and found["number"] == 2.5
    far.clear()
    check(host.read(leaves("cpu")))
    assert not far.waits


def test_a_late_read_returns_the_current_value_without_waiting(far):
    for device in (far.device, "cpu"):
        given = {name: leaf for name, leaf in leaves(device).items() if name not in ("array", "number")}
        far.clear()
        result = host.read_later(given)
        for leaf in (*given["pair"], given["sum"], given["flags"]):
            leaf.zero_()
        check(result())
        assert not far.waits


def test_bfloat16_stays_a_tensor(far):
    found = host.read(torch.tensor([1.5], dtype=torch.bfloat16).to(far.device))
    assert type(found) is torch.Tensor and found.device.type == "cpu" and found.tolist() == [1.5]


def packed(device):
    """A reader of tensors on a device, these tensors, and tensors on the CPU that share one memory."""
    originals = of(device)
    copies = [
        torch.nn.Parameter(leaf) if leaf.is_floating_point() else leaf for leaf in map(torch.zeros_like, of("cpu"))
    ]
    return host.PackedReader(originals), originals, host.PackedMemory(copies), copies


def of(device):
    """Returns tensors of each size of numbers; the first is not contiguous."""
    given = leaves(device)
    return [*given["pair"], *(given[name] for name in ("flags", "sum", "bytes"))]


def test_packed_tensors_arrive_in_their_shapes_without_waiting(far):
    for device in (far.device, "cpu"):
        reader, originals, memory, copies = packed(device)
        far.clear()
        result = reader.read_later()
        for leaf in originals:
            leaf.zero_()
        later = reader.read_later()
        memory.write(result())
        assert not far.waits
        assert all(map(torch.equal, copies, of("cpu")))
        memory.write(later())
        assert not any(copy.any() for copy in copies)


def test_a_packed_reader_follows_tensors_to_new_memory():
    reader, originals, memory, copies = packed("cpu")
    reader.read_later()
    originals[0].data = originals[0] + 1
    originals[3].fill_(9)
    memory.write(reader.read_later()())
    assert torch.equal(copies[0], of("cpu")[0] + 1) and copies[3] == 9


def test_tensors_keep_their_values_and_identity_in_a_packed_memory():
    given = of("cpu")
    before = list(given)
    host.PackedMemory(given)
    assert all(a is b for a, b in zip(given, before)) and all(map(torch.equal, given, of("cpu")))
    assert len({tensor.untyped_storage().data_ptr() for tensor in given}) == 1
