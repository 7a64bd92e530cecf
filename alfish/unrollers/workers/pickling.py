"""Pickles of objects for worker processes, and the environment factory with its gin configuration.

Only processes of one run exchange pickles. A worker parses the configuration itself, because it shares no state with
the trainer.
"""

import copy
import importlib
import io
import pickle
import re
from collections.abc import Callable
from typing import Any

import gin
import torch

from alfish.environments import Environment
from alfish.errors import UsageError
from alfish.parameters import description, gin_internals

_REMEDY = (
    "{name} needs {thing}, which is defined in the program that was started, so a worker process cannot import it; "
    "move it into a module (a file of its own that is imported), or bind Trainer.unroller = @SyncUnroller"
)


class EnvironmentMaker:
    """Environment factory in a form that can be sent to a worker.

    A factory that gin binds to `Trainer.environment` travels as the text of the configuration, since gin's references
    with a scope cannot be pickled. Any other factory is pickled.

    Args:
      factory: takes the keywords `seed` and `num_envs`.

    Raises:
      UsageError: a worker cannot import the factory, or something that the configuration names.
    """

    def __init__(self, factory: Callable[..., Environment]):
        self._config, self._pickled = gin.config_str(), b""
        # Without a configuration a worker needs neither the modules that gin knows nor the parts of earlier runs.
        self._modules = _modules_of(self._config) if self._config else []
        parts = description.registered() if self._config else []
        self._parts = [(module, name) for module, name in parts if module != "__main__"]
        # gin wraps a reference with a scope again at each access; the wrapped object stays the same.
        bound = _bound()
        if bound is None or _origin(bound.configurable.wrapped) is not _origin(factory):
            self._pickled = to_bytes(factory, "Trainer.environment")

    def __call__(self) -> Callable[..., Environment]:
        """Returns the factory. Called in the worker."""
        for module in self._modules:
            importlib.import_module(module)
        for part in self._parts:
            description.register(*part)
        gin.parse_config(self._config)
        return from_bytes(self._pickled) if self._pickled else copy.deepcopy(_bound())  # which is how gin resolves it


def to_bytes(thing: Any, name: str) -> bytes:
    """Pickles an object for another process. Tensors are copied to the CPU, each without the storage it shares.

    Raises:
      UsageError: another process could not import a part of the object; the message names the part.
    """
    buffer = io.BytesIO()
    try:
        _Pickler(buffer).dump(thing)
    except _NotImportable as error:
        raise UsageError(_REMEDY.format(name=name, thing=error)) from None
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
        if isinstance(thing, torch.Tensor):
            data = thing.detach().cpu().contiguous()
            raw = data.reshape(-1).view(torch.uint8).numpy().tobytes()
            return _tensor, (
                raw,
                tuple(data.shape),
                data.dtype,
                isinstance(thing, torch.nn.Parameter),
                thing.requires_grad,
            )
        if isinstance(thing, torch.device):
            return torch.device, ("cpu",)
        if getattr(thing, "__module__", None) == "__main__" and hasattr(thing, "__qualname__"):
            raise _NotImportable(f"{thing.__qualname__!r}")
        return NotImplemented


def _tensor(
    raw: bytes, shape: tuple[int, ...], dtype: torch.dtype, is_parameter: bool, requires_grad: bool
) -> torch.Tensor:
    empty = torch.empty(0, dtype=torch.uint8)
    flat = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else empty
    tensor = flat.view(dtype).view(shape)
    return torch.nn.Parameter(tensor, requires_grad) if is_parameter else tensor.requires_grad_(requires_grad)


def _modules_of(config: str) -> list[str]:
    """Returns the modules that a worker must import before it parses the configuration: all that gin knows."""
    modules = set()
    for selector, configurable in gin_internals.configurables().items():
        module = configurable.__module__
        if module == "__main__" and re.search(rf"\b{selector.rpartition('.')[2]}\b", config):
            raise UsageError(_REMEDY.format(name="the configuration", thing=repr(selector)))
        if module != "__main__" and module.partition(".")[0] != "gin":
            modules.add(module)
    return sorted(modules)


def _bound() -> Any:
    """Returns gin's reference that is bound to `Trainer.environment`; None: there is none."""
    try:
        value = gin.get_bindings("alfish.Trainer", resolve_references=False).get("environment")
    except ValueError:  # nothing has registered the trainer
        return None
    return value if value is not None and gin_internals.is_reference(value) else None


def _origin(factory: Any) -> Any:
    while hasattr(factory, "__wrapped__"):
        factory = factory.__wrapped__
    return factory
