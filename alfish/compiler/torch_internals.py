"""The private names of torch that the compiler uses, each imported when it is first needed.

Any release of torch may move them. `TorchChanged` is raised where one is missing, and what needs it runs without it:
updates and policies as they are written, products by torch's own kernels.
"""

import importlib
from collections.abc import Callable
from typing import Any

import torch

# From the name here to `module:name`, or to a module.
HOMES = {
    "CppCodeCache": "torch._inductor.codecache:CppCodeCache",
    "FakeTensorMode": "torch._subclasses.fake_tensor:FakeTensorMode",
    "ShapeEnv": "torch.fx.experimental.symbolic_shapes:ShapeEnv",
    "TorchDispatchMode": "torch.utils._python_dispatch:TorchDispatchMode",
    "TracingContext": "torch._guards:TracingContext",
    "autograd_config": "torch._functorch.config",
    "compile_fx": "torch._inductor.compile_fx:compile_fx",
    "compile_fx_inner": "torch._inductor.compile_fx:compile_fx_inner",
    "compiler_config": "torch._inductor.config",
    "make_fx": "torch.fx.experimental.proxy_tensor:make_fx",
    "reparametrize_module": "torch.nn.utils.stateless:_reparametrize_module",
    "tracing": "torch._guards:tracing",
}


class TorchChanged(ImportError):
    """This release of torch lacks a private name."""


def __getattr__(name: str) -> Any:
    home = HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, there = home.partition(":")
    try:
        found = importlib.import_module(module)
        return getattr(found, there) if there else found
    except (ImportError, AttributeError) as error:
        raise TorchChanged(f"torch {torch.__version__} has no {home.replace(':', '.')}") from error


def dispatch_mode(receive: Callable[[Any, Any, Any], Any]) -> Any:
    """Returns a context in which `receive(operation, arguments, keywords)` runs each operation of this thread."""

    class Mode(__getattr__("TorchDispatchMode")):  # type: ignore[misc]
        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            return False  # else the first call imports all of it

        def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
            return receive(function, arguments, keywords or {})

    return Mode()


def schema(operation: Any) -> Any:
    """Returns an operation's schema; None for a Python function."""
    return getattr(operation, "_schema", None)


def functional_overload(operation: Any) -> Any:
    """Returns the overload that makes a new tensor in place of writing one; None where there is none."""
    name = operation._schema.name.removeprefix("aten::")
    packet = getattr(torch.ops.aten, name.removesuffix("_"), None) if name.endswith("_") else None
    return getattr(packet, operation._overloadname, None)


def storage_id(tensor: torch.Tensor) -> int:
    """Returns one number for all tensors that share memory, those without values included."""
    return tensor.untyped_storage()._cdata
