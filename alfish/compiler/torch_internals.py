"""Torch's private names that the compiler uses; each is imported when it is first needed.

Any release of torch may move a private name. If a name is missing, `TorchChanged` is raised, and callers continue
without it: updates and policies run uncompiled, and products use torch's own kernels.
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

# Names in this module, each with the object `module:name` or the module that it refers to.
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


# Settings of torch's compiler for everything that it builds, as far as a release has these settings. By default, the
# compiler would compile its headers first, which takes longer than compiling the one or two graphs that use them. It
# would also compile a program to find out which vector instructions the C++ compiler knows, although the processor's
# flags tell which to use, and it would add line numbers for debuggers.
BUILD_SETTINGS = {
    "cpp_cache_precompile_headers": False,
    "cpp.vec_isa_ok": True,
    "aot_inductor.enable_line_tables": False,
}


class TorchChanged(ImportError):
    """Raised if this release of torch lacks a private name."""


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
    """Returns True if oneDNN convolves in bfloat16 on this processor; torch would sum gradients in bfloat16."""
    is_supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return is_supported is not None and bool(is_supported())


def build_settings(**settings: Any) -> Any:
    """Returns a context in which torch's compiler has these settings and `BUILD_SETTINGS`.

    The first call also changes, for good, how torch calls C++ compilers: see `_build_under_other_name` and
    `_ask_for_flags`.
    """
    _build_under_other_name(__getattr__("cpp_builder"))
    _ask_for_flags(__getattr__("cpu_vec_isa"))
    config = __getattr__("compiler_config")
    return config.patch({name: value for name, value in BUILD_SETTINGS.items() if hasattr(config, name)} | settings)


@functools.cache
def _build_under_other_name(builder: Any) -> None:
    """Makes each C++ compiler that torch starts give its output the final name only when the output is complete.

    Otherwise a compiler that is killed would leave incomplete output in the cache, which torch would take for complete.
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
    """Makes torch find out whether a C++ compiler supports vector instructions by asking for the compiler's flags.

    Otherwise torch compiles a program for each kind of instructions, and loads the program in another process, even if
    it is in the cache.
    """
    if hasattr(instructions.VecISA, "check_build"):  # exists since torch 2.6
        instructions.VecISA.check_build = _knows_flags


def _knows_flags(instructions: Any, code: str = "") -> bool:
    compiler = __getattr__("cpp_builder").get_cpp_compiler()
    command = [compiler, *instructions.build_arch_flags().split(), "-fsyntax-only", "-x", "c++", os.devnull]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def dispatch_mode(receive: Callable[[Any, Any, Any], Any]) -> Any:
    """Returns a context in which `receive(operation, arguments, keywords)` runs each operation of this thread."""

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
    """Returns the overload that makes a new tensor instead of writing into one; None if torch has no such overload."""
    name = operation._schema.name.removeprefix("aten::")
    packet = getattr(torch.ops.aten, name.removesuffix("_"), None) if name.endswith("_") else None
    return getattr(packet, operation._overloadname, None)


def storage_id(tensor: torch.Tensor) -> int:
    """Returns a number that is the same for all tensors that share memory; also for tensors without values."""
    return tensor.untyped_storage()._cdata


# Name of the function in a graph's shared library, a Python module; it takes and returns lists of tensors' addresses.
GRAPH_ENTRY = "inductor_entry_cpp"


def library_of(call: Callable[..., Any]) -> str | None:
    """Returns the shared library of a compiled graph; None if the graph also has Python code or constants."""
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
    """Returns the graph in a shared library as a function of a list of tensors; the function empties the list.

    No part of torch's compiler is imported.

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
