"""A function of tensors as one compiled graph: no Python, no dispatch and no autograd when it is called.

The function is traced once with tensors that hold no values, so tracing changes nothing, and whatever it does with
tensors is recorded operation by operation, gradients and updates in place included. What it does with Python values
happens at tracing alone: that is why hooks must be pure, and why the learner compares now and then.
"""

import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from alfish import nest
from alfish.errors import UsageError
from alfish.nest import Nest

PRECISIONS = ("float32", "bfloat16")
# Below so many multiply-adds a product is no faster elsewhere.
LARGE_PRODUCT = 1 << 21

aten = torch.ops.aten
PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default}


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
    """

    def __init__(self, function: Callable[[Nest], Nest], arguments: Nest, precision: str = "float32"):
        if precision not in PRECISIONS:
            raise UsageError(f"the precision is {precision!r}; it is one of {PRECISIONS}")
        leaves, structure = nest.flatten(arguments)
        # Each a tensor of its own: what stands in two places would be traced as one argument.
        leaves = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in leaves]

        def flat(*leaves: torch.Tensor) -> list[torch.Tensor]:
            results, self._structure = nest.flatten(function(nest.unflatten(structure, leaves)))
            return _without_aliases(results, leaves)

        fake = FakeTensorMode()
        try:
            with fake:
                graph = make_fx(flat)(*[fake.from_tensor(leaf) for leaf in leaves])
        except Exception as error:
            raise NotCompilable(f"{_line_of(error)}: {_first_line(error)}") from error
        if all(leaf.device.type == "cpu" for leaf in leaves):
            _write_out_vector_products(graph)
            _use_fast_products(graph, precision)
        self._call = _compile(graph, leaves)

    def __call__(self, arguments: Nest) -> Nest:
        return self.call_flat(nest.leaves(arguments))

    def call_flat(self, leaves: list[torch.Tensor]) -> Nest:
        """The same from the arguments' leaves."""
        with torch.no_grad():
            return nest.unflatten(self._structure, self._call(list(leaves)))


def _without_aliases(results: list[torch.Tensor], leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """A copy of each result that lies in the memory of an input or of an earlier result, as `_compile` asks."""
    taken = {leaf.untyped_storage()._cdata for leaf in leaves}
    own = []
    for result in results:
        storage = result.untyped_storage()._cdata
        own.append(result.clone() if storage in taken else result)
        taken.add(storage)
    return own


def _compile(graph: torch.fx.GraphModule, leaves: list[torch.Tensor]) -> Callable[[list[torch.Tensor]], Any]:
    """The compiled graph as a function of a list, which it empties. No result of the graph may alias another tensor."""
    from torch._functorch import config as functorch_config
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner  # here, because it takes a second
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    innermost: list[Callable[[list[torch.Tensor]], Any]] = []
    # The cache on disk wants a place for symbolic shapes, though there are none; and of its two caches the outer one
    # hides the innermost callable.
    context = tracing(TracingContext(FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)))
    outer = functorch_config.patch(enable_autograd_cache=False)

    def compile_inner(inner_graph: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        compiled = compile_fx_inner(inner_graph, inputs, **options)
        if len(inputs) == len(leaves) and hasattr(compiled, "current_callable"):
            innermost.append(compiled.current_callable)
        return compiled

    try:
        with torch.no_grad(), context, outer, config.patch(fallback_random=True, size_asserts=False):
            outermost: Any = compile_fx(graph, leaves, inner_compile=compile_inner)
    except Exception as error:
        raise NotCompilable(f"torch's compiler failed: {_first_line(error)}") from error
    # What torch puts round the graph is for inputs and results that alias one another, and costs as much as a kernel
    # for each of some twenty tensors.
    return innermost[0] if len(innermost) == 1 else lambda leaves: outermost(*leaves)


def _write_out_vector_products(graph: torch.fx.GraphModule) -> None:
    """Rewrites products whose result has one column, or whose sums have one term, for which libraries are slow.

    As multiplications and sums they become part of the loops before and after them.
    """
    call = graph.graph.call_function

    def written_out(a: torch.fx.Node, b: torch.fx.Node) -> torch.fx.Node | None:
        inner, num_columns = b.meta["val"].shape[-2:]
        if inner == 1:
            return call(aten.mul.Tensor, (a, b))
        if num_columns == 1:
            row = call(aten.transpose.int, (b, -2, -1))
            return call(aten.sum.dim_IntList, (call(aten.mul.Tensor, (a, row)), [-1], True))
        return None

    _rewrite_products(graph, written_out)


def _use_fast_products(graph: torch.fx.GraphModule, precision: str) -> None:
    """Rewrites large float32 products."""
    if precision == "float32" and not _onednn_multiplies():
        return
    call = graph.graph.call_function

    def fast(a: torch.fx.Node, b: torch.fx.Node) -> torch.fx.Node | None:
        left, right = a.meta["val"], b.meta["val"]
        if left.dtype != torch.float32 or left.shape.numel() * right.shape[-1] < LARGE_PRODUCT:
            return None
        if precision == "float32":
            return call(torch.ops.alfish.product.default, (a, b))
        low = tuple(call(aten._to_copy.default, (x,), {"dtype": torch.bfloat16}) for x in (a, b))
        product = call(aten.bmm.default if left.ndim == 3 else aten.mm.default, low)
        return call(aten._to_copy.default, (product,), {"dtype": torch.float32})

    _rewrite_products(graph, fast)


def _rewrite_products(
    graph: torch.fx.GraphModule, rewritten: Callable[[torch.fx.Node, torch.fx.Node], torch.fx.Node | None]
) -> None:
    """Puts `rewritten(a, b)`, where it is not None, in the place of each product of a and b; biases are added to it."""
    for node in list(graph.graph.nodes):
        if node.op != "call_function" or node.target not in PRODUCTS or node.kwargs:
            continue
        *bias, a, b = node.args
        with graph.graph.inserting_before(node):
            product = rewritten(a, b)
            if product is None:
                continue
            for addend in bias:
                product = graph.graph.call_function(aten.add.Tensor, (product, addend))
        product.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(product)
        graph.graph.erase_node(node)
    graph.recompile()


# `torch.matmul` in float32 through oneDNN, which takes half the time of MKL's for matrices of some hundred rows.
_LIBRARY = torch.library.Library("alfish", "FRAGMENT")
_LIBRARY.define("product(Tensor a, Tensor b) -> Tensor")


@torch.library.impl(_LIBRARY, "product", "CPU")
def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    multiply = torch.ops.mkldnn._linear_pointwise.default
    if a.ndim == 2:
        return multiply(a, b.t(), None, "none", [], "")
    return torch.stack([multiply(x, y.t(), None, "none", [], "") for x, y in zip(a, b)])


@torch.library.register_fake("alfish::product", lib=_LIBRARY)
def _(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.new_empty(*a.shape[:-1], b.shape[-1])


def _onednn_multiplies() -> bool:
    """Whether this build has oneDNN's product, which is no public operation, and it is right."""
    if not torch.backends.mkldnn.is_available():
        return False
    try:
        a, b = torch.arange(12.0).reshape(3, 4), torch.arange(8.0).reshape(4, 2)
        return torch.equal(torch.ops.alfish.product(a, b), a @ b)
    except (AttributeError, RuntimeError):
        return False


def _line_of(error: BaseException) -> str:
    """The innermost line outside torch."""
    frames = traceback.extract_tb(error.__traceback__)
    skipped = ("/torch/", "/optree/")
    own = [frame for frame in frames if not any(part in frame.filename for part in skipped)]
    frame = own[-1] if own else frames[-1]
    return f"{frame.filename}:{frame.lineno} in {frame.name}, `{frame.line}`"


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
