"""Keeps the tensors of buffers when code assigns other tensors to them."""

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
