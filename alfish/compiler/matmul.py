"""Products of matrices in a graph, each done by what is fastest on a CPU.

- With a vector: multiplied and summed, which becomes part of the loops before and after.
- Other ones in float32: `matmul.cpp`, which needs neither a library's preparations nor copies of transposes.
- Large ones in bfloat16, if asked: the same, or oneDNN where a processor does not multiply pairs of bfloat16, or has
  tiles for them.
"""

import functools
from collections.abc import Callable
from pathlib import Path

import torch
from absl import logging
from torch.fx import GraphModule, Node

from alfish.compiler import torch_internals
from alfish.compiler.torch_internals import TorchChanged
from alfish.errors import first_line

PRECISIONS = ("float32", "bfloat16")
# Multiply-adds of one product from which bfloat16 is worth its preparations. Thin ones, of first and last layers, keep
# their precision.
LARGE_PRODUCT = 1 << 23
# Vectors with which `matmul.cpp` was measured; with others torch's own may be faster.
MEASURED: tuple[str, ...] = ("AVX2", "AVX512")
OLDEST_TORCH = "2.10"  # whose stable interface has what `matmul.cpp` takes of it

aten = torch.ops.aten
PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default}
# The same numbers in another order.
REARRANGED = {aten.t.default, aten.transpose.int, aten.permute.default, aten.expand.default}

_LIBRARY = torch.library.Library("alfish", "FRAGMENT")
# As they take any strides, torch's compiler need not copy what comes in others than those that were traced.
_TAGS = (torch.Tag.flexible_layout,)
_LIBRARY.define("product(Tensor a, Tensor b) -> Tensor", tags=_TAGS)
_LIBRARY.define("bfloat16_product(Tensor a, Tensor b) -> Tensor", tags=_TAGS)


def rewrite_products(graph: GraphModule, precision: str) -> None:
    """Rewrites the graph's products; the results are the same to float error, or to that of the precision.

    Args:
      graph: whose nodes know their values' shapes (`meta["val"]`).
      precision: of large products: 'float32', or 'bfloat16' with sums in float32.
    """
    call = graph.graph.call_function
    low: dict[Node, Node] = {}  # values in bfloat16, each made once

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
        if num_columns == 1:
            row = call(aten.transpose.int, (b, -2, -1))
            return call(aten.sum.dim_IntList, (call(aten.mul.Tensor, (a, row)), [-1], True))
        if left.dtype != torch.float32:
            return None
        if precision == "float32" or num_rows * inner * num_columns < LARGE_PRODUCT:
            return call(torch.ops.alfish.product.default, (a, b)) if has_products() else None
        if has_bfloat16_products():
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
    graph.recompile()


def _replace(graph: GraphModule, node: Node, product: Callable[[Node, Node], Node | None]) -> None:
    """Puts `product(a, b)`, where it is not None, in the place of a product; the bias of one is added to it."""
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
    """Whether `matmul.cpp` is for this processor and this torch."""
    return torch.backends.cpu.get_cpu_capability() in MEASURED and torch.__version__ >= OLDEST_TORCH


@functools.cache
def has_products() -> bool:
    """Whether `matmul.cpp` suits this machine, could be compiled, and is right.

    Torch's cache keeps what it was compiled to.
    """
    if not suits_products():
        return False
    source = Path(__file__).with_name("matmul.cpp").read_text()
    try:
        torch_internals.CppCodeCache.load(source)
        return _is_right(torch.ops.alfish.product, torch.float32)
    except (RuntimeError, OSError, TorchChanged) as error:
        logging.warning("products are left to torch, because matmul.cpp could not be compiled: %s", first_line(error))
        return False


@functools.cache
def has_bfloat16_products() -> bool:
    """Whether `matmul.cpp` multiplies bfloat16 here, too."""
    try:
        return has_products() and _is_right(torch.ops.alfish.bfloat16_product, torch.bfloat16)
    except NotImplementedError:
        return False


def _is_right(product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], dtype: torch.dtype) -> bool:
    a, b = torch.arange(7 * 5.0).reshape(7, 5), torch.arange(5 * 19.0).reshape(5, 19)
    return torch.equal(product(a.to(dtype), b.to(dtype)), a @ b)  # exact, being whole numbers


@torch.library.register_fake("alfish::product", lib=_LIBRARY)
@torch.library.register_fake("alfish::bfloat16_product", lib=_LIBRARY)
def _(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.new_empty(*a.shape[:-1], b.shape[-1], dtype=torch.float32)
