"""The private names of torch that the compiler uses, each imported when it is first needed.

Any release of torch may move them. `TorchChanged` is raised where one is missing, and what needs it runs without it:
updates and policies as they are written, products by torch's own kernels.
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
    "cpp_builder": "torch._inductor.cpp_builder",
    "cpu_vec_isa": "torch._inductor.cpu_vec_isa",
    "make_fx": "torch.fx.experimental.proxy_tensor:make_fx",
    "reparametrize_module": "torch.nn.utils.stateless:_reparametrize_module",
    "tracing": "torch._guards:tracing",
}


# Settings for all that torch's compiler builds, of those that a release has. It would compile its headers first, which
# takes longer than the one or two graphs that use them, compile a program to see which vector instructions the C++
# compiler knows, although the flags of the processor say which to use, and add line numbers for debuggers.
BUILD_SETTINGS = {
    "cpp_cache_precompile_headers": False,
    "cpp.vec_isa_ok": True,
    "aot_inductor.enable_line_tables": False,
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


def has_bfloat16_convolutions() -> bool:
    """Returns True if oneDNN convolves in bfloat16 on this processor; torch's own code sums gradients in bfloat16."""
    is_supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return is_supported is not None and bool(is_supported())


def build_settings(**settings: Any) -> Any:
    """Returns a context with settings of torch's compiler, and `BUILD_SETTINGS`.

    From the first call on, C++ compilers write as `_build_under_other_name` says, and are asked what they know as
    `_ask_for_flags` says.
    """
    _build_under_other_name(__getattr__("cpp_builder"))
    _ask_for_flags(__getattr__("cpu_vec_isa"))
    config = __getattr__("compiler_config")
    return config.patch({name: value for name, value in BUILD_SETTINGS.items() if hasattr(config, name)} | settings)


@functools.cache
def _build_under_other_name(builder: Any) -> None:
    """Makes each C++ compiler that torch starts give its output the final name only when it is complete.

    A compiler that is killed leaves the beginning of its output in the cache, which torch would take for the whole.
    """
    run = getattr(builder, "run_compile_cmd", None)  # since torch 2.5
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
    """Makes torch ask the C++ compiler whether it knows the flags of further vector instructions.

    Else it compiles a program for each of them, and has another process load it, even where its cache has the program.
    """
    if hasattr(instructions.VecISA, "check_build"):  # since torch 2.6
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


# A graph's shared library is a Python module with this function, which takes and returns lists of tensors' addresses.
GRAPH_ENTRY = "inductor_entry_cpp"


def library_of(call: Callable[..., Any]) -> str | None:
    """Returns the shared library of a compiled graph, if that is all of it: no Python, and no constants."""
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
    """Returns a graph of a `library_of`, as a function of a list of tensors, which it empties.

    Nothing of torch's compiler is imported.

    Raises:
      ImportError: the file cannot be loaded.
    """
    try:
        to_addresses = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors
        to_tensors = torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs
        # The library reads it when it is loaded.
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
