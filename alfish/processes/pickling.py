"""Pickles of objects for worker processes. Only processes of one run exchange them."""

import io
import pickle
import sys
from typing import TYPE_CHECKING, Any

from alfish.errors import UsageError

if TYPE_CHECKING:
    import torch

NOT_IMPORTABLE = (
    "{name} needs {thing}, which is defined in the program that was started, so a worker process cannot import it; "
    "move it into a module (a file of its own that is imported), or bind Trainer.unroller = @SyncUnroller"
)


def to_bytes(thing: Any, name: str) -> bytes:
    """Pickles an object for another process. Tensors are copied to the CPU, each without the storage it shares.

    Raises:
      UsageError: another process could not import a part of the object; the message names the part.
    """
    buffer = io.BytesIO()
    try:
        _Pickler(buffer).dump(thing)
    except _NotImportable as error:
        raise UsageError(NOT_IMPORTABLE.format(name=name, thing=error)) from None
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UsageError(
            f"{name} cannot be sent to a worker process ({error}); build it from functions and classes at the top "
            "level of a module, without lambdas, or bind Trainer.unroller = @SyncUnroller"
        ) from error
    return buffer.getvalue()


def from_bytes(data: bytes) -> Any:
    """Inverse of `to_bytes`. Only for bytes of this run's processes: unpickling can execute any code."""
    return pickle.loads(data)


class _NotImportable(Exception):
    pass


class _Pickler(pickle.Pickler):
    def __init__(self, file: Any):
        super().__init__(file, pickle.HIGHEST_PROTOCOL)

    def reducer_override(self, thing: Any) -> Any:
        torch = sys.modules.get("torch")  # a process that has not imported it has no tensors
        if torch is not None and isinstance(thing, torch.Tensor):
            data = thing.detach().cpu().contiguous()
            raw = data.reshape(-1).view(torch.uint8).numpy().tobytes()
            return _tensor, (
                raw,
                tuple(data.shape),
                data.dtype,
                isinstance(thing, torch.nn.Parameter),
                thing.requires_grad,
            )
        if torch is not None and isinstance(thing, torch.device):
            return torch.device, ("cpu",)
        if getattr(thing, "__module__", None) == "__main__" and hasattr(thing, "__qualname__"):
            raise _NotImportable(f"{thing.__qualname__!r}")
        return NotImplemented


def _tensor(
    raw: bytes, shape: tuple[int, ...], dtype: "torch.dtype", is_parameter: bool, requires_grad: bool
) -> "torch.Tensor":
    import torch

    empty = torch.empty(0, dtype=torch.uint8)
    flat = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else empty
    tensor = flat.view(dtype).view(shape)
    return torch.nn.Parameter(tensor, requires_grad) if is_parameter else tensor.requires_grad_(requires_grad)
