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
        """Makes the current tensors those that `restore` restores."""
        self._kept = [(buffers, dict(buffers)) for _, buffers in self._owners]

    def restore(self) -> None:
        """Restores tensors that were replaced since `remember`, with the values of their replacements.

        Raises:
          UsageError: a buffer has changed its shape or dtype.
        """
        for buffers, kept in self._kept:
            for name, tensor in kept.items():
                new = buffers.get(name)
                if new is not tensor and new is not None and tensor is not None:
                    if new.shape != tensor.shape or new.dtype != tensor.dtype:
                        raise UsageError(
                            f"the buffer {self._path(buffers, name)} has changed from {list(tensor.shape)} "
                            f"{tensor.dtype} to {list(new.shape)} {new.dtype}; workers, compiled updates and "
                            "checkpoints need a constant shape and dtype, so allocate the buffer in its final form"
                        )
                    tensor.copy_(new.detach())
                    buffers[name] = tensor

    def _path(self, buffers: dict[str, torch.Tensor | None], name: str) -> str:
        owner = next(path for path, own in self._owners if own is buffers)
        return f"{owner}.{name}" if owner else name
