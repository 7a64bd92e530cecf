"""Keeps the tensors of buffers when code assigns other tensors to them, and finds attributes that should be buffers."""

import itertools
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from alfish.errors import UsageError


class BufferKeeper:
    """Keeps the tensors of a module's buffers, to which workers and compiled graphs refer.

    `self.mean = self.mean + x` makes a new tensor the buffer. `restore` copies its values into the earlier tensor, and
    makes the earlier tensor the buffer again.

    Args:
      module: module with the buffers, also those of its submodules.
    """

    def __init__(self, module: nn.Module):
        self._owners = [(name, each._buffers) for name, each in module.named_modules() if each._buffers]
        self.remember()

    def remember(self) -> None:
        """Remembers the tensors that are the buffers now; a later `restore` brings them back."""
        self._kept = [
            (buffers, name, tensor)
            for _, buffers in self._owners
            for name, tensor in buffers.items()
            if tensor is not None
        ]

    def restore(self) -> None:
        """Restores tensors that were replaced since `remember`, with the values of their replacements.

        Raises:
          UsageError: a buffer has changed its shape or dtype.
        """
        for buffers, name, tensor in self._kept:
            new = buffers[name]
            if new is not tensor and new is not None:
                self._put_back(buffers, name, tensor, new)

    def _put_back(
        self, buffers: dict[str, torch.Tensor | None], name: str, tensor: torch.Tensor, new: torch.Tensor
    ) -> None:
        if new.shape != tensor.shape or new.dtype != tensor.dtype:
            owner = next(path for path, own in self._owners if own is buffers)
            raise UsageError(
                f"the buffer {owner}{'.' if owner else ''}{name} has changed from {list(tensor.shape)} {tensor.dtype} "
                f"to {list(new.shape)} {new.dtype}; workers, compiled updates and checkpoints need a constant shape "
                "and dtype, so allocate the buffer in its final form"
            )
        with torch.no_grad():
            tensor.copy_(new)
        buffers[name] = tensor


class UnsavedAttributes:
    """Finds attributes of modules that change, but are not in checkpoints: numbers, and tensors that are not buffers.

    A bool is not looked at, because it usually notes that something was done once, which is done again after a resume.

    Args:
      modules: modules, also with their submodules; those that define `get_extra_state` are left out.
      restored: names of attributes that other code restores when a run resumes.
    """

    def __init__(self, modules: Iterable[nn.Module], restored: Collection[str]):
        each = itertools.chain.from_iterable(module.modules() for module in modules)
        self._modules = [one for one in each if type(one).get_extra_state is nn.Module.get_extra_state]
        self._restored = {"training", *restored}
        self._known: dict[tuple[int, str], Any] = {(index, name): mark for index, name, mark in self._marks()}

    def changed(self) -> Iterator[str]:
        """Yields a sentence for each attribute that has changed since the construction; each attribute comes once."""
        for index, name, mark in self._marks():
            before = self._known.get((index, name))
            if before is None or mark == before:
                continue
            self._known[index, name] = None
            is_number = isinstance(before, str)
            change, first = (f" from {before} to {mark}", f"tensor({before})") if is_number else ("", "zeros(...)")
            yield (
                f"{type(self._modules[index]).__name__}.{name} has changed{change}, but is not a buffer: checkpoints "
                "and workers do not have the new value, and compiled updates may keep the first one; make it a buffer "
                f"by self.register_buffer({name!r}, torch.{first})"
            )

    def _marks(self) -> Iterator[tuple[int, str, Any]]:
        """Yields the index of a module, and the name and a mark of an attribute; the mark changes with the value."""
        for index, module in enumerate(self._modules):
            for name, value in vars(module).items():
                if isinstance(value, torch.Tensor):
                    yield index, name, (id(value), None if value.is_inference() else value._version)
                elif type(value) in (int, float) and name not in self._restored:
                    yield index, name, repr(value)
