"""Private names of torch that the compiler uses. Each name is imported when it is first used.

A release of torch may move a private name. If a name is missing, `TorchChanged` is raised. Then updates and policies
are not compiled, and products use torch's own kernels.
"""

import functools
import importlib
import importlib.util
import inspect
import os
import shlex
import subprocess
import types
from collections.abc import Callable
from typing import Any

import torch

# Attributes of this module, each with the object (`module:name`) or the module to which it refers.
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
    "cpp_builder": "torch._inductor.cpp_builder",
    "cpu_vec_isa": "torch._inductor.cpu_vec_isa",
    "make_fx": "torch.fx.experimental.proxy_tensor:make_fx",
    "reparametrize_module": "torch.nn.utils.stateless:_reparametrize_module",
    "tracing": "torch._guards:tracing",
}


# Settings of torch's compiler for all builds; settings that a release lacks are left out. By default, the compiler
# precompiles its headers, which takes longer than the one or two graphs that use them. It also compiles a program to
# find out which vector instructions the C++ compiler supports, although the processor's flags suffice. Also by
# default, the generated code has line numbers for debuggers.
BUILD_SETTINGS = {
    "cpp_cache_precompile_headers": False,
    "cpp.vec_isa_ok": True,
    "aot_inductor.enable_line_tables": False,
}


class TorchChanged(ImportError):
    """Raised if this release of torch lacks a private name that the compiler uses."""


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


def has_bfloat16_convolutions() -> bool:
    """Returns whether oneDNN supports convolutions in bfloat16 on this processor.

    Otherwise torch's own convolution would be used, which sums gradients in bfloat16.
    """
    is_supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return is_supported is not None and bool(is_supported())


def build_settings(**settings: Any) -> Any:
    """Returns a context in which torch's compiler uses the given settings and `BUILD_SETTINGS`.

    The first call also changes how torch calls C++ compilers, until the process ends: see `_build_under_other_name` and
    `_ask_for_flags`.
    """
    _build_under_other_name(__getattr__("cpp_builder"))
    _ask_for_flags(__getattr__("cpu_vec_isa"))
    config = __getattr__("compiler_config")
    return config.patch({name: value for name, value in BUILD_SETTINGS.items() if hasattr(config, name)} | settings)


@functools.cache
def _build_under_other_name(builder: Any) -> None:
    """Makes torch's C++ compilers write to a temporary file, which gets its final name when it is complete.

    Otherwise a compiler that is killed would leave an incomplete file in the cache, and torch would load it.
    """
    run = getattr(builder, "run_compile_cmd", None)  # exists since torch 2.5
    if run is not None:
        builder.run_compile_cmd = functools.partial(_run_and_rename, run)


def _run_and_rename(run: Callable[[str, str], Any], command: str, cwd: str) -> Any:
    words = shlex.split(command)
    if "-o" not in words:
        return run(command, cwd)
    at = words.index("-o") + 1
    output = os.path.join(cwd, words[at])
    words[at] = f"{output}.{os.getpid()}.half"
    result = run(shlex.join(words), cwd)
    os.replace(words[at], output)
    return result


@functools.cache
def _ask_for_flags(instructions: Any) -> None:
    """Makes torch test only the flags of a C++ compiler to find out which vector instructions it supports.

    Otherwise torch compiles a program for each type of instructions and loads it in another process. Torch does this
    even if the program is in the cache.
    """
    if hasattr(instructions.VecISA, "check_build"):  # exists since torch 2.6
        instructions.VecISA.check_build = _knows_flags


def _knows_flags(instructions: Any, code: str = "") -> bool:
    compiler = __getattr__("cpp_builder").get_cpp_compiler()
    command = [compiler, *instructions.build_arch_flags().split(), "-fsyntax-only", "-x", "c++", os.devnull]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def dispatch_mode(receive: Callable[[Any, Any, Any], Any]) -> Any:
    """Returns a context in which each operation of this thread calls `receive(operation, arguments, keywords)`."""

    class Mode(__getattr__("TorchDispatchMode")):  # type: ignore[misc]
        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            return False  # avoids importing all of torch's compiler at the first call

        def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
            return receive(function, arguments, keywords or {})

    return Mode()


def schema(operation: Any) -> Any:
    """Returns an operation's schema; None for a Python function."""
    return getattr(operation, "_schema", None)


def functional_overload(operation: Any) -> Any:
    """Returns the variant of an in-place operation that returns a new tensor; None if torch has no such variant."""
    name = operation._schema.name.removeprefix("aten::")
    packet = getattr(torch.ops.aten, name.removesuffix("_"), None) if name.endswith("_") else None
    return getattr(packet, operation._overloadname, None)


def storage_id(tensor: torch.Tensor) -> int:
    """Returns a number that identifies a tensor's storage; tensors that share memory have the same number.

    The tensor may be a tensor without values.
    """
    return tensor.untyped_storage()._cdata


# Name of the graph's function in its shared library, which is a Python module. The function takes and returns lists of
# addresses of tensors.
GRAPH_ENTRY = "inductor_entry_cpp"


def library_of(call: Callable[..., Any]) -> str | None:
    """Returns the file of a compiled graph's shared library; None if the graph also needs Python code or constants."""
    if not inspect.isfunction(call):
        return None
    names = inspect.getclosurevars(call)
    entry = names.nonlocals.get("f")
    module = getattr(entry, "__self__", None)
    is_all = set(names.nonlocals) == {"f"} and set(names.globals) == {"torch"}
    if not is_all or getattr(entry, "__name__", "") != GRAPH_ENTRY or not isinstance(module, types.ModuleType):
        return None
    return module.__file__


def load_graph(library: str) -> Callable[[list[torch.Tensor]], Any]:
    """Loads a graph from a shared library; returns a function of a list of tensors, which empties the list.

    Loading does not import torch's compiler.

    Raises:
      ImportError: the file cannot be loaded.
    """
    try:
        to_addresses = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors
        to_tensors = torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs
        # The library reads this variable when it is loaded.
        address = torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr  # type: ignore[attr-defined]
    except AttributeError as error:
        raise TorchChanged(f"torch {torch.__version__} cannot load graphs ({error})") from error
    os.environ["_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"] = str(address)
    name = f"{os.path.basename(library).partition('.')[0]}.{GRAPH_ENTRY}"
    spec = importlib.util.spec_from_file_location(name, library)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    entry = getattr(module, GRAPH_ENTRY)

    def call(leaves: list[torch.Tensor]) -> Any:
        addresses = to_addresses(leaves)
        leaves.clear()
        return to_tensors(entry(addresses))

    return call
