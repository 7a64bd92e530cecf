"""Copies tensors from a device to the host, in as few copies as possible, because a copy waits for the device.

A GPU works asynchronously while Python continues. When Python needs a value, it waits until the GPU has finished all
its work. Therefore values that are needed together are read together, in one copy, and values that are not urgent are
read later.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from alfish import nest
from alfish.nest import Nest


def read(leaves: Nest) -> Nest:
    """Returns tensors as arrays on the host, see `nest.as_array`; leaves of other kinds do not change.

    Tensors on a device are read in one copy, for which the call waits; all must be on the same device.
    """
    given, structure = nest.flatten(leaves)
    far = [leaf for leaf in given if isinstance(leaf, torch.Tensor) and leaf.device.type != "cpu"]
    found = iter(_unpacked(_packed(far).cpu(), far) if far else ())

    def on_host(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return nest.as_array(leaf) if leaf.device.type == "cpu" else next(found)

    return nest.unflatten(structure, [on_host(leaf) for leaf in given])


def read_later(leaves: Nest) -> Callable[[], Nest]:
    """Begins to copy tensors, all on one device, to the host; returns a function that returns them as arrays.

    The call does not wait, and the caller may overwrite the tensors afterwards. The returned function waits only if the
    device has not finished the copy yet.
    """
    given, structure = nest.flatten(leaves)
    result = _copied_later(_packed(given))
    return lambda: nest.unflatten(structure, _unpacked(result(), given))


class PackedReader:
    """Reads tensors of a device repeatedly, each time in one copy.

    Args:
      tensors: tensors, all on one device.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]):
        self._tensors = list(tensors)
        self._are_views = all(tensor.is_contiguous() for tensor in tensors)  # whether `_parts` may be kept
        self._addresses: list[int] = []  # of the tensors, because a learner may move them
        self._kept: list[torch.Tensor] = []

    def read_later(self) -> Callable[[], torch.Tensor]:
        """Begins to copy the tensors, like `host.read_later`; returns a function that returns one vector of bytes."""
        addresses = [tensor.data_ptr() for tensor in self._tensors]
        if addresses != self._addresses or not self._are_views:
            self._addresses, self._kept = addresses, _parts(self._tensors)
        return _copied_later(torch.cat(self._kept))


class PackedMemory:
    """One memory for several tensors on the CPU, so that one copy writes all of them.

    Args:
      tensors: tensors in the order, shapes and dtypes of the tensors of a `PackedReader`. Their values do not change.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]):
        self._bytes = _packed(list(tensors))
        for tensor, view in zip(tensors, _views(self._bytes, list(tensors))):
            tensor.data = view

    def write(self, values: torch.Tensor) -> None:
        """Writes a vector of bytes from `PackedReader` into the tensors."""
        self._bytes.copy_(values)


def _copied_later(packed: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Begins to copy a vector to the host; returns a function that waits for the copy and returns it."""
    device = packed.device
    if device.type == "cpu":
        return lambda: packed
    there = torch.empty(packed.shape, dtype=torch.uint8, pin_memory=True).copy_(packed, non_blocking=True)
    has_arrived: Any = None
    if device.type == "cuda":
        has_arrived = torch.cuda.Event()
        has_arrived.record(torch.cuda.current_stream(device))

    def result() -> torch.Tensor:
        if has_arrived is not None:
            has_arrived.synchronize()
        return there

    return result


def _packed(leaves: list[torch.Tensor]) -> torch.Tensor:
    """Returns the bytes of all leaves as one vector, leaves with the largest item size first."""
    return torch.cat(_parts(leaves))


def _parts(leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the bytes of each leaf, leaves with the largest item size first; views if leaves are contiguous."""
    return [leaves[i].detach().contiguous().reshape(-1).view(torch.uint8) for i in _order(leaves)]


def _unpacked(packed: torch.Tensor, leaves: list[torch.Tensor]) -> list[Any]:
    """Returns arrays with the values of `leaves`, read from a host copy of the vector that `_packed` returned."""
    return [nest.as_array(view) for view in _views(packed, leaves)]


def _views(packed: torch.Tensor, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    """Returns views of a vector that `_packed` returned, with the shapes and dtypes of `leaves`."""
    order, found = _order(leaves), {}
    parts = packed.split([leaves[i].numel() * leaves[i].element_size() for i in order])
    for i, part in zip(order, parts):
        found[i] = part.view(leaves[i].dtype).view(leaves[i].shape)
    return [found[i] for i in range(len(leaves))]


def _order(leaves: list[torch.Tensor]) -> list[int]:
    """Returns an order in which each leaf begins at a multiple of its item size."""
    return sorted(range(len(leaves)), key=lambda i: -leaves[i].element_size())
