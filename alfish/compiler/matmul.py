"""Rewrites matrix products and convolutions in a graph to the fastest method.

On a GPU, only large products and convolutions change, and only if bfloat16 is requested. On a CPU:

- A matrix-vector product becomes a multiplication and a sum, which the compiler fuses with neighbouring loops.
- Other products in float32 use the kernel in `matmul.cpp`. The kernel needs no preparation, and does not copy
  transposes.
- Large products in bfloat16, if requested, use the same kernel on a processor with AVX512-BF16 (products of pairs of
  bfloat16) and without AMX (tiles for bfloat16). On other processors, they use oneDNN.
- Large convolutions in bfloat16, if requested, use oneDNN, which sums in float32 and rounds each result to bfloat16.
  Biases and their gradients are added in float32. If oneDNN does not support bfloat16 convolutions
  (`torch_internals.has_bfloat16_convolutions`), convolutions stay in float32.

`matmul.cpp` exists because an update takes up to twice as long with torch's own products. Torch has two libraries for
products; choosing the faster one for each shape would save only a part of this time (docs/performance.md).
"""

import functools
import math
import operator
import time
from collections.abc import Callable

import torch
from absl import logging
from torch.fx import Graph, GraphModule, Node

from alfish.compiler import kernels, torch_internals
from alfish.compiler.torch_internals import TorchChanged
from alfish.errors import first_line

PRECISIONS = ("float32", "bfloat16")
# Number of multiply-adds from which a product is faster in bfloat16, conversions included.
LARGE_PRODUCT = 1 << 23
# A product with a smaller dimension stays in float32. Products of first and last layers often have such a dimension,
# and take little time. The logits of a categorical critic (`Bins`) need float32, too: when logits fit their targets,
# the gradient is a small difference, and rounding in this layer would change it by half (docs/performance.md).
NARROW = 128
# Vector instructions with which `matmul.cpp` was measured. With other instructions, torch's kernels may be faster.
MEASURED: tuple[str, ...] = ("AVX2", "AVX512")
OLDEST_TORCH = "2.10"  # first release with the stable C++ interface that `matmul.cpp` uses

CANNOT_BUILD = (RuntimeError, OSError, TorchChanged)

aten = torch.ops.aten
CONVOLUTION, CONVOLUTION_BACKWARD = aten.convolution.default, aten.convolution_backward.default
PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default}
# Operations that return the same numbers in a different order.
REARRANGED = {aten.t.default, aten.transpose.int, aten.permute.default, aten.expand.default}

_LIBRARY = torch.library.Library("alfish", "FRAGMENT")
# The kernels accept any strides. With this tag, torch's compiler does not copy arguments whose strides have changed.
_TAGS = (torch.Tag.flexible_layout,)
_LIBRARY.define("product(Tensor a, Tensor b) -> Tensor", tags=_TAGS)
_LIBRARY.define("bfloat16_product(Tensor a, Tensor b) -> Tensor", tags=_TAGS)


def rewrite_products(graph: GraphModule, precision: str, has_kernel: bool) -> None:
    """Rewrites a graph's products in place; results change only by rounding.

    Args:
      graph: graph whose nodes have example values (`meta["val"]`).
      precision: precision of large products and convolutions: 'float32', or 'bfloat16' with sums in float32.
      has_kernel: whether `matmul.cpp` will be available when the graph is called.
    """
    call = graph.graph.call_function
    low: dict[Node, Node] = {}  # bfloat16 cast of each node, by the node

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
        is_small = num_rows * inner * num_columns < LARGE_PRODUCT or min(num_rows, inner, num_columns) < NARROW
        if left.device.type != "cpu" and (precision == "float32" or is_small):
            return None
        if inner == 1:
            return call(aten.mul.Tensor, (a, b))
        if num_columns == 1 and left.is_floating_point():  # a sum of integers has a different dtype
            row = call(aten.transpose.int, (b, -2, -1))
            return call(aten.sum.dim_IntList, (call(aten.mul.Tensor, (a, row)), [-1], True))
        if left.dtype != torch.float32:
            return None
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
        elif precision == "bfloat16" and node.target in (CONVOLUTION, CONVOLUTION_BACKWARD):
            rewrite_convolution(graph.graph, node, LARGE_PRODUCT, in_bfloat16)
    graph.recompile()


def _replace(graph: GraphModule, node: Node, product: Callable[[Node, Node], Node | None]) -> None:
    """Replaces a product node with `product(a, b)`, plus the bias if there is one, unless `product` returns None."""
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
    """Starts building `matmul.cpp`; returns False if `has_products()` is already known to be False."""
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
    """Returns whether `matmul.cpp` suits this processor, compiles, and computes a small product correctly.

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

    An Intel processor is slower in bfloat16 than in float32 if a virtual machine hides AMX.
    """
    a, b = torch.ones(256, 256), torch.ones(256, 256)

    def low() -> torch.Tensor:
        left, right = a.to(torch.bfloat16), b.to(torch.bfloat16)
        return torch.ops.alfish.bfloat16_product(left, right) if has_bfloat16_products() else (left @ right).float()

    def full() -> torch.Tensor:
        return torch.ops.alfish.product(a, b) if has_products() else a @ b

    return _seconds(low) / _seconds(full)


def _seconds(function: Callable[[], object]) -> float:
    """Returns the seconds of the fastest of ten calls, which other processes have disturbed least."""

    def once() -> float:
        began = time.perf_counter()
        function()
        return time.perf_counter() - began

    return min(once() for _ in range(10))


def _is_right(product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], dtype: torch.dtype) -> bool:
    a, b = torch.arange(7 * 5.0).reshape(7, 5), torch.arange(5 * 19.0).reshape(5, 19)
    return torch.equal(product(a.to(dtype), b.to(dtype)), a @ b)  # products of whole numbers are exact


@torch.library.register_fake("alfish::product", lib=_LIBRARY)
@torch.library.register_fake("alfish::bfloat16_product", lib=_LIBRARY)
def _(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.new_empty(*a.shape[:-1], b.shape[-1], dtype=torch.float32)


def rewrite_convolution(graph: Graph, node: Node, smallest: int, in_bfloat16: Callable[[Node], Node]) -> None:
    """Replaces a convolution or its gradient with a convolution in bfloat16 whose results are cast to float32.

    Args:
      graph: graph of the node; its nodes have example values (`meta["val"]`).
      node: call of `CONVOLUTION` or `CONVOLUTION_BACKWARD`.
      smallest: number of multiply-adds of the smallest convolution to replace.
      in_bfloat16: function that returns a node's cast to bfloat16.
    """
    forward = node.target is CONVOLUTION
    # The image, the weights [out, in, height, width], and the resulting image or its gradient.
    image, weight = node.args[:2] if forward else node.args[1:3]
    result = node if forward else node.args[0]
    pixels = result.meta["val"]  # type: ignore[union-attr]
    size = pixels.numel() * math.prod(weight.meta["val"].shape[1:])  # type: ignore[union-attr]
    if node.kwargs or pixels.dtype != torch.float32 or size < smallest:
        return
    if pixels.device.type == "cpu" and not torch_internals.has_bfloat16_convolutions():
        return
    with graph.inserting_before(node):
        low_image, low_weight = in_bfloat16(image), in_bfloat16(weight)  # type: ignore[arg-type]
        if forward:
            low = graph.call_function(CONVOLUTION, (low_image, low_weight, None, *node.args[3:]))
            result = _in_float32(graph, low, pixels)
            if node.args[2] is not None:
                shape = [1, -1] + [1] * (pixels.ndim - 2)
                bias = graph.call_function(aten.view.default, (node.args[2], shape))
                result = graph.call_function(aten.add.Tensor, (result, bias))
                result.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(result)
            graph.erase_node(node)
            return
        gradient, mask = node.args[0], node.args[10]
        settings = (None, *node.args[4:10], [*mask[:2], False])  # type: ignore[index,misc]
        low = graph.call_function(CONVOLUTION_BACKWARD, (in_bfloat16(gradient), low_image, low_weight, *settings))  # type: ignore[arg-type]
        for part in list(node.users):
            k = part.args[1]
            value = node.meta["val"][k]
            if value is not None:  # None if the gradient is not needed, because the image is an input of the graph
                if k == 2:
                    new = graph.call_function(aten.sum.dim_IntList, (gradient, [0, *range(2, pixels.ndim)]))
                    new.meta["val"] = value
                else:
                    new = _in_float32(graph, graph.call_function(operator.getitem, (low, k)), value)
                part.replace_all_uses_with(new)
            graph.erase_node(part)
        graph.erase_node(node)


def _in_float32(graph: Graph, low: Node, value: torch.Tensor) -> Node:
    result = graph.call_function(aten._to_copy.default, (low,), {"dtype": torch.float32})
    result.meta["val"] = value
    return result
