"""Nests: NamedTuples, dicts and tuples of leaves, mapped with optree. `None` is an absent subtree.

Leaves are torch tensors or, while acting on a CPU, numpy arrays.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import optree
import torch

Nest: TypeAlias = Any  # NamedTuple, dict or tuple of leaves, of any depth; a single leaf; or None

# A leaf: a numpy array while rows are collected, a torch tensor in replay and in minibatches. Environments that compute
# in torch always return tensors.
Array: TypeAlias = Any

# Largest copy to a GPU that goes through pinned memory, in bytes. torch keeps pinned memory, and the system cannot swap
# it out.
LARGEST_PINNED = 2**26

flatten: Callable[..., tuple[list[Any], Any]] = optree.tree_flatten
unflatten: Callable[..., Nest] = optree.tree_unflatten


def add_kind(kind: type, flatten: Callable[[Any], tuple[Any, Any]], unflatten: Callable[[Any, Any], Any]) -> None:
    """Registers a class, so that its objects are nests.

    Args:
      kind: class to add.
      flatten: function from an object to its children and its remaining data.
      unflatten: function from the remaining data and the children to the object.
    """
    optree.register_pytree_node(kind, flatten, unflatten, namespace=optree.registry.__GLOBAL_NAMESPACE)


def leaves(nest: Nest, is_leaf: Callable[[Any], bool] | None = None) -> list[Any]:
    """Returns the leaves from left to right; leaves of a dict in the order of its sorted keys."""
    if type(nest) is torch.Tensor or type(nest) is np.ndarray:
        return [nest]
    if is_leaf is not None or not isinstance(nest, tuple):
        return optree.tree_leaves(nest, is_leaf=is_leaf)
    found = []  # a fast path for tuples of bare leaves, where optree takes several times as long
    for part in nest:
        if type(part) is torch.Tensor or type(part) is np.ndarray:
            found.append(part)
        elif part is not None:
            found += leaves(part)
    return found


def map(function: Callable[..., Any], nest: Nest, *others: Nest, is_leaf: Callable[[Any], bool] | None = None) -> Nest:
    """Returns the nest of `function(leaf, *leaves at the same path of the other nests)`."""
    # A bare leaf is the common case, and optree takes longer than most functions.
    if type(nest) is torch.Tensor or type(nest) is np.ndarray:
        return function(nest, *others)
    return optree.tree_map(function, nest, *others, is_leaf=is_leaf)


def paths(nest: Nest, is_leaf: Callable[[Any], bool] | None = None) -> list[str]:
    """Returns the names of the leaves in the order of `leaves`, such as `camera.0`; a bare leaf has the name ''."""
    accessors, _, _ = optree.tree_flatten_with_accessor(nest, is_leaf=is_leaf)
    return [".".join(str(getattr(entry, "field", entry.entry)) for entry in accessor) for accessor in accessors]


def named_leaves(nest: Nest, root: str) -> list[tuple[str, Any]]:
    """Returns `(name, leaf)` pairs with names such as `observation.camera.0`; a bare leaf is named `root`."""
    return [(f"{root}.{path}" if path else root, leaf) for path, leaf in zip(paths(nest), leaves(nest))]


def keys(nest: Nest) -> list[tuple[Any, ...]]:
    """Returns the path of each leaf in the order of `leaves`: `(0, 'camera')` for `nest[0]['camera']`."""
    return optree.tree_paths(nest)


def stack(nests: list[Nest], dim: int = 0) -> Nest:
    """Stacks nests of one structure leaf by leaf along a new dimension."""
    return map(lambda *tensors: torch.stack(tensors, dim), *nests)


def host_view(tensor: torch.Tensor) -> Any:
    """Returns a numpy view of a tensor's memory, which is faster to read and to write.

    Returns the tensor itself if numpy cannot view it, because it is not on the CPU or is bfloat16.
    """
    if tensor.device.type != "cpu" or tensor.dtype == torch.bfloat16:
        return tensor
    return tensor.detach().numpy()


def as_array(leaf: Any) -> Any:
    """Returns a leaf as a numpy array. The array of a tensor on the CPU shares the memory of the tensor.

    A bfloat16 tensor is returned as a tensor on the CPU.
    """
    if type(leaf) is np.ndarray:
        return leaf
    return leaf.cpu() if leaf.dtype == torch.bfloat16 else leaf.detach().cpu().numpy()


def as_tensor(leaf: Any) -> torch.Tensor:
    """Returns a leaf as a tensor. The tensor of a writable array shares the memory of the array."""
    if type(leaf) is not np.ndarray:
        return leaf
    return torch.from_numpy(leaf if leaf.flags.writeable else leaf.copy())  # a broadcast array is not writable


def arrays(nest: Nest) -> Nest:
    """Returns leaves as numpy arrays, see `as_array`."""
    return map(as_array, nest)


def tensors(nest: Nest, device: torch.device | None = None) -> Nest:
    """Returns leaves as tensors on a device, see `as_tensor`; None means that leaves keep their devices."""
    if device is None:
        return map(as_tensor, nest)
    if _is_gpu(device):
        return map(lambda leaf: _pinned(as_tensor(leaf)).to(device, non_blocking=True), nest)
    return map(lambda leaf: as_tensor(leaf).to(device), nest)


def arange(count: int, like: Any) -> Any:
    """Returns 0 ... count - 1, `[count]` int64, as a tensor or an array, like `like`."""
    return np.arange(count) if type(like) is np.ndarray else torch.arange(count, device=like.device)


def plain(nest: Nest) -> Nest:
    """Returns the leaves in plain tuples and dicts, as checkpoints keep them."""
    if isinstance(nest, dict):
        return {key: plain(child) for key, child in nest.items()}
    return tuple(plain(child) for child in nest) if isinstance(nest, tuple) else nest


def like(example: Nest, nest: Nest) -> Nest:
    """Returns the leaves in the structure of an example with as many leaves; the inverse of `plain`."""
    return unflatten(flatten(example)[1], leaves(nest))


def detach(nest: Nest) -> Nest:
    """Detaches each leaf from the autograd graph."""
    return map(torch.Tensor.detach, nest)


def to(nest: Nest, device: torch.device | str) -> Nest:
    """Moves each leaf to a device; a copy to a GPU does not block."""
    if _is_gpu(device):
        return map(lambda tensor: _pinned(tensor).to(device, non_blocking=True), nest)
    return map(lambda tensor: tensor.to(device), nest)


def _is_gpu(device: torch.device | str) -> bool:
    return torch.device(device).type == "cuda"


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy in pinned memory if a tensor is small and on the CPU; otherwise, returns the tensor itself.

    A copy from pinned memory to a GPU does not block, and torch reuses the memory only after the copy. A copy from
    other memory may block until the GPU has finished all its work.
    """
    is_small = tensor.device.type == "cpu" and tensor.nbytes <= LARGEST_PINNED
    return tensor.pin_memory() if is_small else tensor


def at(nest: Nest, index: Any) -> Nest:
    """Indexes each leaf: `at(rows, slice(0, 1))` is row 0, with its dimension kept."""
    return map(lambda tensor: tensor[index], nest)


def split(nest: Nest, num_rows: int) -> tuple[Nest, Nest]:
    """Splits leaves of equally many rows into the first `num_rows` rows and the other rows."""
    tensors, structure = flatten(nest)
    sizes = [num_rows, tensors[0].shape[0] - num_rows]  # `len` of a tensor is slower than `shape[0]`
    heads, others = zip(*[tensor.split_with_sizes(sizes) for tensor in tensors])
    return unflatten(structure, heads), unflatten(structure, others)


def merge_leading(nest: Nest) -> Nest:
    """Reshapes leaves `[T, B, ...]` to `[1, T*B, ...]`: one batch of independent rows, still time first."""
    return map(lambda tensor: tensor.reshape(1, -1, *tensor.shape[2:]), nest)


def where(condition: Any, chosen: Nest, other: Nest) -> Nest:
    """Returns the rows of `chosen` where `condition` (`[B]` bool) is True, else of `other`; leaves are `[B, ...]`.

    The leaves are all tensors, or all arrays.
    """
    choose: Any = np.where if type(condition) is np.ndarray else torch.where
    return map(lambda a, b: choose(widened(condition, a), a, b), chosen, other)


def widened(rows: Any, like: Any) -> Any:
    """Appends dimensions of size 1 to `rows`, so that it broadcasts against the leading dimensions of `like`."""
    missing = like.ndim - rows.ndim
    return rows.reshape(*rows.shape, *[1] * missing) if missing > 0 else rows
