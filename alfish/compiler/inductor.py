"""Compiles a function of tensors to one graph, which runs without Python, dispatch and autograd.

The function is traced once. Tracing uses tensors without values, so it has no side effects. All operations are
recorded, including gradients and in-place writes. Python values are read only during tracing, so the function must not
depend on values that change. Callers compare some results with those of the uncompiled function to find such functions.
"""

import dataclasses
import functools
import hashlib
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from alfish import nest
from alfish.compiler import cache, draws, matmul, torch_internals
from alfish.compiler.torch_internals import TorchChanged, storage_id
from alfish.errors import UsageError, first_line
from alfish.nest import Nest

WRAPPER_FROM_TORCH = "2.13"  # oldest torch release with which calling kernels from C++ was tested


def is_checked(count: int) -> bool:
    """Returns whether the results of call `count`, counted from 0, are compared with those of the uncompiled function.

    Calls 0 to 7 are compared, and then each call whose number is a power of 2. With powers of 2 only, a graph that is
    wrong in every third call would never be found.
    """
    return count < 8 or count & (count - 1) == 0


class NotCompilable(Exception):
    """Raised for a function that cannot become a graph; the message names the reason and the line."""


@dataclasses.dataclass(frozen=True)
class TensorLayout:
    """The properties of a tensor except its values."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "TensorLayout":
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)

    def stride(self) -> tuple[int, ...]:
        """Returns the strides, like `torch.Tensor.stride`."""
        return self.strides


class CompiledFunction:
    """A compiled `function(arguments)`, for arguments with fixed shapes, strides and dtypes.

    A call draws the same random numbers as the uncompiled function, in the same order, and writes to the same tensors.

    Args:
      function: function that maps a nest of tensors to a nest of tensors.
      arguments: example arguments, tensors or instances of `TensorLayout`, with the structure, shapes, strides and
        dtypes of later calls.
      precision: precision of large matrix products and convolutions: 'float32', or 'bfloat16' with sums in float32.

    Attributes:
      structure: structure of the results.

    Raises:
      NotCompilable: the function reads a tensor's value, or makes a call that cannot be traced.
      TorchChanged: this release of torch lacks a private name that alfish uses.
    """

    structure: Any
    _call: Callable[[list[torch.Tensor]], Any]

    def __init__(self, function: Callable[[Nest], Nest], arguments: Nest, precision: str = "float32"):
        if precision not in matmul.PRECISIONS:
            raise UsageError(f"the precision is {precision!r}; it must be one of {matmul.PRECISIONS}")
        cache.directory()  # checked here, because torch's error while tracing would name no remedy
        leaves, structure = nest.flatten(arguments)
        # Torch's disk cache requires a ShapeEnv, even without symbolic shapes.
        symbols = torch_internals.ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
        fake = torch_internals.FakeTensorMode(shape_env=symbols, static_shapes=True)
        with fake:
            # Each leaf gets a new tensor, because a tensor that occurs twice would become a single argument.
            leaves = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in leaves]

        def flat(*leaves: torch.Tensor) -> list[torch.Tensor]:
            results, self.structure = nest.flatten(function(nest.unflatten(structure, leaves)))
            return _without_aliases(results, leaves)

        on_cpu = all(leaf.device.type == "cpu" for leaf in leaves)
        has_kernel = on_cpu and matmul.expects_products()  # the library is built while the graph is traced
        self._call = _built(flat, leaves, fake, precision, has_kernel)
        if has_kernel and not matmul.has_products():
            self._call = _built(flat, leaves, fake, precision, has_kernel=False)

    def __call__(self, arguments: Nest) -> Nest:
        return self.call_flat(nest.leaves(arguments))

    def call_flat(self, leaves: list[torch.Tensor]) -> Nest:
        """Returns the function's results for the leaves of its arguments."""
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self.call_flat(leaves)
        return nest.unflatten(self.structure, self._call(list(leaves)))

    def library(self) -> str | None:
        """Returns the file of the graph, for `LoadedFunction`; None if the file does not contain the whole graph."""
        return torch_internals.library_of(self._call)


class LoadedFunction(CompiledFunction):
    """A compiled function, loaded from the file that another process made.

    Args:
      library: file of the graph, see `CompiledFunction.library`.
      structure: structure of the results.

    Raises:
      ImportError: the file cannot be loaded.
    """

    def __init__(self, library: str, structure: Any):
        self.structure, self._call = structure, torch_internals.load_graph(library)


def _built(
    function: Callable[..., list[torch.Tensor]],
    leaves: list[torch.Tensor],
    fake: Any,
    precision: str,
    has_kernel: bool,
) -> Callable[[list[torch.Tensor]], Any]:
    """Returns the compiled graph of a function; see `_compile`.

    Args:
      function: function that maps leaves to results; no result may share memory with another tensor.
      leaves: example tensors of the mode `fake`.
      precision: precision of large products and convolutions, see `rewrite_products`.
      has_kernel: whether alfish's own matrix kernel is available, see `rewrite_products`.
    """
    make_fx = torch_internals.make_fx
    try:
        with fake:
            graph = make_fx(function)(*leaves)
    except TorchChanged:
        raise
    except Exception as error:
        raise NotCompilable(f"{_line_of(error)}: {first_line(error)}") from error
    name = hashlib.sha256(f"{graph.code} {[(x.shape, x.stride(), x.dtype) for x in leaves]}".encode()).hexdigest()
    # A graph that is called from C++ keeps the order of random operations in all algorithms, so none is moved out.
    taken = [] if _is_called_from_cpp(leaves) else draws.take_draws(graph)
    leaves = [*leaves, *(example for each in taken for example in each.examples)]
    # If another process compiles the same graph, this process waits here, and then finds the graph in the cache.
    try:
        with cache.in_use(), cache.lock(name[:2]):
            matmul.rewrite_products(graph, precision, has_kernel)
            compiled = _compile(graph, leaves, fake)
        _trim_cache()
    except OSError as error:
        raise NotCompilable(f"compiled code cannot be kept: {first_line(error)}") from error
    return draws.with_draws(compiled, taken)


@functools.cache
def _trim_cache() -> None:
    """Trims the cache once per process, after the first graph is compiled."""
    cache.trim()


def _without_aliases(results: list[torch.Tensor], leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the results; a result that shares memory with an input or an earlier result is copied."""
    taken = {storage_id(leaf) for leaf in leaves}
    own = []
    for result in results:
        storage = storage_id(result)
        own.append(result.clone() if storage in taken else result)
        taken.add(storage)
    return own


def _compile(graph: torch.fx.GraphModule, leaves: list[torch.Tensor], fake: Any) -> Callable[[list[torch.Tensor]], Any]:
    """Returns the compiled graph as a function of a list of leaves; the function empties the list.

    Args:
      graph: graph to compile; no result may share memory with another tensor.
      leaves: example tensors of the mode `fake`. With real tensors, torch's compiler would treat sizes as variables and
        generate slower loops.
      fake: torch's `FakeTensorMode`, whose tensors have no values.
    """
    compile_fx, compile_fx_inner = torch_internals.compile_fx, torch_internals.compile_fx_inner
    autograd_config = torch_internals.autograd_config
    wrapped = _is_called_from_cpp(leaves)
    # Intermediate tensors share one pool of memory, because an allocation takes as long as a small loop.
    options = {"fallback_random": True, "size_asserts": False, "cpp_wrapper": wrapped, "memory_planning": wrapped}
    innermost: list[Callable[[list[torch.Tensor]], Any]] = []
    context = torch_internals.tracing(torch_internals.TracingContext(fake))
    # Torch's autograd cache would hide the innermost callable.
    outer = autograd_config.patch(enable_autograd_cache=False)
    settings = torch_internals.build_settings(**options)

    def compile_inner(inner_graph: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        compiled = compile_fx_inner(inner_graph, inputs, **options)
        if len(inputs) == len(leaves) and hasattr(compiled, "current_callable"):
            innermost.append(compiled.current_callable)
        return compiled

    try:
        with torch.no_grad(), context, outer, settings, warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch's advice about settings does not apply here
            outermost: Any = compile_fx(graph, leaves, inner_compile=compile_inner)
    except Exception as error:
        raise NotCompilable(f"torch's compiler failed: {first_line(error)}") from error
    # Torch's wrapper around the graph is skipped. The wrapper handles inputs and results that share memory, which do
    # not occur here. It would take as long as a kernel for each of about twenty tensors.
    return innermost[0] if len(innermost) == 1 else lambda leaves: outermost(*leaves)


def _is_called_from_cpp(leaves: Sequence[torch.Tensor]) -> bool:
    """Returns whether to call a graph's kernels from C++; a call from Python takes longer than a small kernel."""
    return torch.__version__ >= WRAPPER_FROM_TORCH and all(leaf.device.type == "cpu" for leaf in leaves)


def _line_of(error: BaseException) -> str:
    """Returns the innermost line of an error's traceback that is outside torch."""
    frames = traceback.extract_tb(error.__traceback__)
    skipped = ("/torch/", "/optree/")
    own = [frame for frame in frames if not any(part in frame.filename for part in skipped)]
    frame = own[-1] if own else frames[-1]
    return f"{frame.filename}:{frame.lineno} in {frame.name}, `{frame.line}`"
