"""A function of tensors as one compiled graph: no Python, no dispatch and no autograd when it is called.

The function is traced once with tensors that hold no values, so tracing changes nothing, and whatever it does with
tensors is recorded operation by operation, gradients and updates in place included. What it does with Python values
happens at tracing alone: that is why hooks must be pure, and why the learner compares now and then.
"""

import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch

from alfish import nest
from alfish.compiler import torch_internals
from alfish.compiler.matmul import PRECISIONS, rewrite_products
from alfish.compiler.torch_internals import TorchChanged, storage_id
from alfish.errors import UsageError, first_line
from alfish.nest import Nest

WRAPPER_FROM_TORCH = "2.13"  # the oldest with which a graph's kernels are called from C++ was tested


def is_checked(count: int) -> bool:
    """Whether the call of this number, from 0, is compared with plain Python: the first 8, then ever fewer.

    Were they fewer from the start, what differs in every third call would never be seen.
    """
    return count < 8 or count & (count - 1) == 0


class NotCompilable(Exception):
    """The function does something that a graph cannot; says what, and in which line."""


class CompiledFunction:
    """`function(arguments)` for arguments of one layout.

    Random numbers are those of the plain call, in the same order. Tensors that the function writes are written.

    Args:
      function: from a nest of tensors to a nest of tensors.
      arguments: like those of the calls to come, in structure, shapes, strides and dtypes.
      precision: of large products on a CPU: 'float32', or 'bfloat16' with sums in float32.

    Raises:
      NotCompilable: the function looks at a tensor's value, or calls what cannot be traced.
      TorchChanged: this release of torch does not compile graphs as expected.
    """

    def __init__(self, function: Callable[[Nest], Nest], arguments: Nest, precision: str = "float32"):
        if precision not in PRECISIONS:
            raise UsageError(f"the precision is {precision!r}; it is one of {PRECISIONS}")
        leaves, structure = nest.flatten(arguments)
        # The cache on disk wants a place for symbolic shapes, though there are none, nor numbers taken out of tensors.
        symbols = torch_internals.ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
        fake = torch_internals.FakeTensorMode(shape_env=symbols, static_shapes=True)
        with fake:
            # Each a tensor of its own: what stands in two places would be traced as one argument.
            leaves = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in leaves]

        def flat(*leaves: torch.Tensor) -> list[torch.Tensor]:
            results, self._structure = nest.flatten(function(nest.unflatten(structure, leaves)))
            return _without_aliases(results, leaves)

        make_fx = torch_internals.make_fx
        try:
            with fake:
                graph = make_fx(flat)(*leaves)
        except TorchChanged:
            raise
        except Exception as error:
            raise NotCompilable(f"{_line_of(error)}: {first_line(error)}") from error
        if all(leaf.device.type == "cpu" for leaf in leaves):
            rewrite_products(graph, precision)
        self._call = _compile(graph, leaves, fake)

    def __call__(self, arguments: Nest) -> Nest:
        return self.call_flat(nest.leaves(arguments))

    def call_flat(self, leaves: list[torch.Tensor]) -> Nest:
        """The same from the arguments' leaves."""
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self.call_flat(leaves)
        return nest.unflatten(self._structure, self._call(list(leaves)))


def _without_aliases(results: list[torch.Tensor], leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """A copy of each result that lies in the memory of an input or of an earlier result, as `_compile` asks."""
    taken = {storage_id(leaf) for leaf in leaves}
    own = []
    for result in results:
        storage = storage_id(result)
        own.append(result.clone() if storage in taken else result)
        taken.add(storage)
    return own


def _compile(graph: torch.fx.GraphModule, leaves: list[torch.Tensor], fake: Any) -> Callable[[list[torch.Tensor]], Any]:
    """The compiled graph as a function of a list, which it empties. No result of the graph may alias another tensor.

    Args:
      leaves: of the mode `fake`. Of real ones, torch's compiler would take sizes for variables, and make slower loops.
    """
    compile_fx, compile_fx_inner = torch_internals.compile_fx, torch_internals.compile_fx_inner
    config, autograd_config = torch_internals.compiler_config, torch_internals.autograd_config
    # From Python the calls of a small update take longer than its kernels.
    wrapped = torch.__version__ >= WRAPPER_FROM_TORCH and all(leaf.device.type == "cpu" for leaf in leaves)
    # A pool of memory for what is only needed inside, because to allocate takes as long as a small loop.
    options = {"fallback_random": True, "size_asserts": False, "cpp_wrapper": wrapped, "memory_planning": wrapped}
    innermost: list[Callable[[list[torch.Tensor]], Any]] = []
    context = torch_internals.tracing(torch_internals.TracingContext(fake))
    outer = autograd_config.patch(enable_autograd_cache=False)  # this cache would hide the innermost callable

    def compile_inner(inner_graph: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        compiled = compile_fx_inner(inner_graph, inputs, **options)
        if len(inputs) == len(leaves) and hasattr(compiled, "current_callable"):
            innermost.append(compiled.current_callable)
        return compiled

    try:
        with torch.no_grad(), context, outer, config.patch(options):
            outermost: Any = compile_fx(graph, leaves, inner_compile=compile_inner)
    except Exception as error:
        raise NotCompilable(f"torch's compiler failed: {first_line(error)}") from error
    # What torch puts round the graph is for inputs and results that alias one another, and costs as much as a kernel
    # for each of some twenty tensors.
    return innermost[0] if len(innermost) == 1 else lambda leaves: outermost(*leaves)


def _line_of(error: BaseException) -> str:
    """The innermost line outside torch."""
    frames = traceback.extract_tb(error.__traceback__)
    skipped = ("/torch/", "/optree/")
    own = [frame for frame in frames if not any(part in frame.filename for part in skipped)]
    frame = own[-1] if own else frames[-1]
    return f"{frame.filename}:{frame.lineno} in {frame.name}, `{frame.line}`"
