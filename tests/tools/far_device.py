"""A device that does not exist: it counts the places at which a program waits for a GPU, on a machine without one.

    with FarDevice() as far:
        algorithm.to(far.device)
        ...
        print(far.waits)  # [Wait('_local_scalar_dense', 'learner/learner.py', 'train', 177), ...]

Tensors of torch's device `meta` have shapes but no numbers. `FarDevice` gives the storage of each such tensor a twin on
the CPU and runs every operation there. So these tensors behave like those of a GPU: autograd, modules and views work,
`tensor.device.type` is not 'cpu', numpy cannot view them, and reading a value is an operation that can be counted.

Differences from a GPU: random numbers come from the CPU's generator, every copy is complete when its call returns, and
a call is made of the same operations as on the CPU. `torch.cuda` is not replaced.
"""

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple
from unittest import mock

import optree
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import alfish
from alfish import nest

PACKAGE = Path(alfish.__file__).parent
LIBRARIES = (Path(torch.__file__).parent, Path(optree.__file__).parent, Path(__file__))
SHARED = ("nest.py", "host.py")  # modules whose functions read what others ask them to read
ENVIRONMENTS = "environments/toy.py"

# Operations whose result the host reads, or whose result has a shape that the host must know.
READS = {
    *("_local_scalar_dense", "nonzero", "masked_select", "equal", "bincount"),
    *("_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive"),
}


class Wait(NamedTuple):
    """An operation, and the line of alfish that called it."""

    operation: str
    path: str  # file below the package
    function: str
    line: int


class FarDevice(TorchDispatchMode):
    """Runs operations on tensors of the device `meta` within its context, and counts them.

    Attributes:
      device: torch's device `meta`.
      waits: operations for which alfish's own code waits until the device has done all of its work, in their order.
        Operations of environments and tests are left out.
      unpinned: copies from memory of the CPU that is not pinned, likewise; on a GPU each of them may wait.
      num_launches: number of operations except views, called by any code.
    """

    device = torch.device("meta")

    def __init__(self) -> None:
        super().__init__()
        self.clear()

    def clear(self) -> None:
        """Begins to count from 0."""
        self.waits: list[Wait] = []
        self.unpinned: list[Wait] = []
        self.num_launches = 0

    def where(self) -> Counter[str]:
        """Returns how often each function of alfish waits, by 'path: function'."""
        return Counter(f"{wait.path}: {wait.function}" for wait in self.waits)

    def __enter__(self) -> "FarDevice":
        # A mode does not see how torch makes tensors from numbers, and addresses of `meta` are 0.
        with contextlib.ExitStack() as stack:
            for owner, name, replacement in (
                (nest, "_is_gpu", lambda device: torch.device(device).type != "cpu"),
                (torch, "tensor", _made_on_host(torch.tensor)),
                (torch, "as_tensor", _made_on_host(torch.as_tensor)),
                (torch.Tensor, "data_ptr", _address_of(torch.Tensor.data_ptr)),
                (torch.UntypedStorage, "data_ptr", _storage_address_of(torch.UntypedStorage.data_ptr)),
            ):
                stack.enter_context(mock.patch.object(owner, name, replacement))
            self._replaced = stack.pop_all()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._replaced.close()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # avoids importing all of torch's compiler at the first call

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: tuple = (), keywords: dict[str, Any] | None = None
    ) -> Any:
        keywords = dict(keywords or {})
        tensors = [leaf for leaf in optree.tree_leaves((arguments, keywords)) if isinstance(leaf, torch.Tensor)]
        far = {id(tensor): tensor for tensor in tensors if tensor.is_meta}
        target = keywords.get("device")
        to_far = bool(far) if target is None else torch.device(target).type == "meta"
        if not far and not to_far:
            return _on_host(function, arguments, keywords)
        self._count(function, arguments, keywords, tensors, to_far)
        if to_far and target is not None:
            keywords["device"] = torch.device("cpu")
        twins = {key: twin(tensor) for key, tensor in far.items()}
        arguments, keywords = optree.tree_map(lambda leaf: twins.get(id(leaf), leaf), (arguments, keywords))
        known = {id(tensor): tensor for tensor in tensors} | {id(twins[key]): tensor for key, tensor in far.items()}
        storages = {id(tensor.untyped_storage().twin): tensor.untyped_storage() for tensor in far.values()}

        def back(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or not to_far:
                return leaf
            if id(leaf) in known:  # the operation writes to its argument, and returns it
                return known[id(leaf)]
            return _far(leaf, storages.get(id(leaf.untyped_storage())))

        return optree.tree_map(back, function(*arguments, **keywords))

    def _count(
        self, function: Any, arguments: tuple, keywords: dict[str, Any], tensors: list[torch.Tensor], to_far: bool
    ) -> None:
        """Counts an operation that reads or makes tensors of the device."""
        self.num_launches += not function.is_view
        name = function.overloadpacket.__name__
        waits = name in READS or (name == "repeat_interleave" and keywords.get("output_size") is None)
        if name == "_to_copy":
            waits = not to_far
        elif name == "copy_" and not arguments[0].is_meta:
            is_non_blocking = bool(arguments[2:3])
            waits = not (is_non_blocking and _is_pinned(arguments[0]))
            tensors = tensors[1:]  # the target on the CPU is not read
        elif name in ("index", "index_put_", "_index_put_impl_"):
            indices = [index for index in arguments[1] if index is not None]
            fills = name != "index" and len(indices) == 1 and arguments[2].ndim == 0  # torch then fills by the mask
            waits = not fills and any(index.dtype == torch.bool for index in indices)
        self._note(self.waits, name, waits)
        # Numbers, 0-d tensors on the CPU, are arguments of a launch.
        on_host = [tensor for tensor in tensors if tensor.ndim > 0 and not tensor.is_meta]
        self._note(self.unpinned, name, not all(map(_is_pinned, on_host)))

    @staticmethod
    def _note(noted: list[Wait], name: str, is_one: bool) -> None:
        cause = _cause() if is_one else None
        if cause is not None:
            noted.append(Wait(name, *cause))


def twin(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor on the CPU that has the numbers of a far tensor."""
    held = getattr(tensor.untyped_storage(), "twin", None)
    if held is None:
        raise RuntimeError("a tensor of the device 'meta' was made outside of FarDevice, and has no numbers")
    return torch.empty(0, dtype=tensor.dtype).set_(held, tensor.storage_offset(), tensor.shape, tensor.stride())


def _far(result: torch.Tensor, storage: Any) -> torch.Tensor:
    """Returns the far tensor for a result on the CPU; `storage` is that of a far tensor whose memory it shares."""
    made = torch.empty(0, dtype=result.dtype, device="meta")
    if storage is None:
        own = result.untyped_storage()
        storage = torch.UntypedStorage(own.nbytes(), device="meta")
        storage.twin = own  # lives as long as the storage, which all views share
    return made.set_(storage, result.storage_offset(), result.shape, result.stride())


def _on_host(function: Any, arguments: tuple, keywords: dict[str, Any]) -> Any:
    """Makes an operation on the CPU alone; pinned memory is memory with a mark."""
    name = function.overloadpacket.__name__
    if name == "is_pinned":
        return _is_pinned(arguments[0])
    is_pinned = keywords.pop("pin_memory", False) or name == "_pin_memory"
    result = arguments[0].clone() if name == "_pin_memory" else function(*arguments, **keywords)
    if is_pinned:
        result.untyped_storage().pinned = True
    return result


def _is_pinned(tensor: torch.Tensor) -> bool:
    return getattr(tensor.untyped_storage(), "pinned", False)


def _cause() -> tuple[str, str, int] | None:
    """Returns path, function and line of alfish that asked for the operation; None if other code did."""
    for frame in _frames(sys._getframe()):
        path = Path(frame.f_code.co_filename)
        if any(map(path.is_relative_to, LIBRARIES)) or frame.f_code.co_name.startswith("<"):
            continue
        if not path.is_relative_to(PACKAGE):
            return None
        name = path.relative_to(PACKAGE).as_posix()
        if name.startswith(ENVIRONMENTS):
            return None
        if name not in SHARED:
            return name, frame.f_code.co_name, frame.f_lineno
    return None


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _made_on_host(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def made(*arguments: Any, device: Any = None, **keywords: Any) -> torch.Tensor:
        tensor = function(*arguments, **keywords)
        return tensor if device is None else tensor.to(device)

    return made


def _address_of(function: Callable[[torch.Tensor], int]) -> Callable[[torch.Tensor], int]:
    return lambda tensor: function(twin(tensor) if tensor.is_meta else tensor)


def _storage_address_of(function: Callable[[Any], int]) -> Callable[[Any], int]:
    return lambda storage: function(getattr(storage, "twin", storage))
