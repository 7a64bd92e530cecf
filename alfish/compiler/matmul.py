"""Matrix products in a graph, each by the fastest method on a CPU.

- A product with a vector becomes a multiplication and a sum, which the compiler fuses with the loops around it.
- Other products in float32 use `matmul.cpp`, which needs no preparation and no copies of transposes.
- Large products in bfloat16, on request, use the same kernel. They use oneDNN on a processor that does not multiply
  pairs of bfloat16 (AVX512-BF16), or that has tiles for them (AMX).
- Large convolutions in bfloat16, on request, use oneDNN (`convolutions.py`).

`matmul.cpp` stays because an update takes up to twice the time with torch's own products. A rule that takes the faster
of torch's two libraries for each shape saves a part of that only (docs/performance.md).
"""

import functools
import time
from collections.abc import Callable

import torch
from absl import logging
from torch.fx import GraphModule, Node

from alfish.compiler import convolutions, kernels, torch_internals
from alfish.compiler.torch_internals import TorchChanged
from alfish.errors import first_line

PRECISIONS = ("float32", "bfloat16")
# Multiply-adds of the smallest product for which bfloat16 is faster, conversions included.
LARGE_PRODUCT = 1 << 23
# A product with fewer rows, inner numbers or columns keeps float32. Those of first and last layers are as narrow, and
# cost little. The logits of a categorical critic (`Bins`) need the precision: once they fit their targets, the gradient
# is the small rest, which rounding this one layer changes by half (docs/performance.md).
NARROW = 128
# Vector instructions with which `matmul.cpp` was measured; with others torch's kernels may be faster.
MEASURED: tuple[str, ...] = ("AVX2", "AVX512")
OLDEST_TORCH = "2.10"  # the first with the stable C++ interface that `matmul.cpp` uses

CANNOT_BUILD = (RuntimeError, OSError, TorchChanged)

aten = torch.ops.aten
PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default}
# Operations that return the same numbers in another order.
REARRANGED = {aten.t.default, aten.transpose.int, aten.permute.default, aten.expand.default}

_LIBRARY = torch.library.Library("alfish", "FRAGMENT")
# The kernels accept any strides, so torch's compiler need not copy arguments to the traced strides.
_TAGS = (torch.Tag.flexible_layout,)
_LIBRARY.define("product(Tensor a, Tensor b) -> Tensor", tags=_TAGS)
_LIBRARY.define("bfloat16_product(Tensor a, Tensor b) -> Tensor", tags=_TAGS)


def rewrite_products(graph: GraphModule, precision: str, has_kernel: bool) -> None:
    """Rewrites a graph's products in place; results differ by rounding only.

    Args:
      graph: nodes have example values (`meta["val"]`).
      precision: of large products and convolutions: 'float32', or 'bfloat16' with sums in float32.
      has_kernel: whether `matmul.cpp` will be there when the graph is called.
    """
    call = graph.graph.call_function
    low: dict[Node, Node] = {}  # from a node to its one cast to bfloat16

    def in_bfloat16(x: Node) -> Node:
        if x not in low:
            if x.target in REARRANGED:
                low[x] = call(x.target, (in_bfloat16(x.args[0]), *x.args[1:]))  # type: ignore[arg-type]
            else:
                low[x] = call(aten._to_copy.default, (x,), {"dtype": torch.bfloat16})
        return low[x]

    def product(a: Node, b: Node) -> Node | None:
        left, right = a.meta["val"], b.meta["val"]
        (num_rows, inner), num_columns = left.shape[-2:], right.shape[-1]
        if inner == 1:
            return call(aten.mul.Tensor, (a, b))
        if num_columns == 1 and left.is_floating_point():  # a sum of integers would have another dtype
            row = call(aten.transpose.int, (b, -2, -1))
            return call(aten.sum.dim_IntList, (call(aten.mul.Tensor, (a, row)), [-1], True))
        if left.dtype != torch.float32:
            return None
        is_small = num_rows * inner * num_columns < LARGE_PRODUCT or min(num_rows, inner, num_columns) < NARROW
        if precision == "float32" or is_small:
            return call(torch.ops.alfish.product.default, (a, b)) if has_kernel else None
        if has_kernel and has_bfloat16_products():
            return call(torch.ops.alfish.bfloat16_product.default, (in_bfloat16(a), in_bfloat16(b)))
        multiply = aten.bmm.default if left.ndim == 3 else aten.mm.default
        result = call(multiply, (in_bfloat16(a), in_bfloat16(b)))
        return call(aten._to_copy.default, (result,), {"dtype": torch.float32})

    for node in list(graph.graph.nodes):
        schema = torch_internals.schema(node.target)
        if schema is not None and schema.is_mutable:
            low.clear()
        if node.target in PRODUCTS and not node.kwargs:
            _replace(graph, node, product)
        elif precision == "bfloat16" and node.target in (convolutions.FORWARD, convolutions.BACKWARD):
            convolutions.rewrite_convolution(graph.graph, node, LARGE_PRODUCT, in_bfloat16)
    graph.recompile()


def _replace(graph: GraphModule, node: Node, product: Callable[[Node, Node], Node | None]) -> None:
    """Replaces a product node by `product(a, b)`, plus the bias if there is one; does nothing where that is None."""
    *bias, a, b = node.args
    with graph.graph.inserting_before(node):
        result = product(a, b)  # type: ignore[arg-type]
        if result is None:
            return
        for addend in bias:
            result = graph.graph.call_function(aten.add.Tensor, (result, addend))
    result.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(result)
    graph.graph.erase_node(node)


def suits_products() -> bool:
    """Returns whether this processor and this torch can use `matmul.cpp`."""
    return torch.backends.cpu.get_cpu_capability() in MEASURED and torch.__version__ >= OLDEST_TORCH


def expects_products() -> bool:
    """Begins to build `matmul.cpp`. Returns False if it is already known that `has_products()` is False."""
    if not suits_products():
        return False
    if has_products.cache_info().currsize:
        return has_products()
    try:
        kernels.begin_to_build()
    except CANNOT_BUILD:
        return has_products()
    return True


@functools.cache
def has_products() -> bool:
    """Returns whether `matmul.cpp` can be used here, was compiled, and gives the right result of a small product.

    Torch's cache keeps the compiled library.
    """
    if not suits_products():
        return False
    try:
        kernels.library()
        return _is_right(torch.ops.alfish.product, torch.float32)
    except CANNOT_BUILD as error:
        logging.warning("products use torch's kernels, because matmul.cpp could not be compiled: %s", first_line(error))
        return False


@functools.cache
def has_bfloat16_products() -> bool:
    """Returns whether `matmul.cpp` also multiplies bfloat16 on this processor."""
    try:
        return has_products() and _is_right(torch.ops.alfish.bfloat16_product, torch.bfloat16)
    except NotImplementedError:
        return False


@functools.cache
def bfloat16_cost() -> float:
    """Returns the time of a large product in bfloat16, casts included, as a multiple of the time in float32.

    An Intel processor is slower in bfloat16 than in float32 if a virtual machine hides its tiles (AMX).
    """
    a, b = torch.ones(256, 256), torch.ones(256, 256)

    def low() -> torch.Tensor:
        left, right = a.to(torch.bfloat16), b.to(torch.bfloat16)
        return torch.ops.alfish.bfloat16_product(left, right) if has_bfloat16_products() else (left @ right).float()

    def full() -> torch.Tensor:
        return torch.ops.alfish.product(a, b) if has_products() else a @ b

    return _seconds(low) / _seconds(full)


def _seconds(function: Callable[[], object]) -> float:
    """Returns the time of the quickest of ten calls, which other processes disturb least."""

    def once() -> float:
        began = time.perf_counter()
        function()
        return time.perf_counter() - began

    return min(once() for _ in range(10))


def _is_right(product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], dtype: torch.dtype) -> bool:
    a, b = torch.arange(7 * 5.0).reshape(7, 5), torch.arange(5 * 19.0).reshape(5, 19)
    return torch.equal(product(a.to(dtype), b.to(dtype)), a @ b)  # exact for whole numbers


@torch.library.register_fake("alfish::product", lib=_LIBRARY)
@torch.library.register_fake("alfish::bfloat16_product", lib=_LIBRARY)
def _(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.new_empty(*a.shape[:-1], b.shape[-1], dtype=torch.float32)
