"""Convolutions in a graph, in bfloat16 on request.

oneDNN sums in float32 and rounds each result to bfloat16. Biases and their gradients are added in float32. Where oneDNN
cannot do that (`torch_internals.has_bfloat16_convolutions`), convolutions stay in float32.
"""

import math
import operator
from collections.abc import Callable

import torch
from torch.fx import Graph, Node

from alfish.compiler import torch_internals

aten = torch.ops.aten
FORWARD, BACKWARD = aten.convolution.default, aten.convolution_backward.default


def rewrite_convolution(graph: Graph, node: Node, smallest: int, in_bfloat16: Callable[[Node], Node]) -> None:
    """Replaces a convolution or its gradient by one in bfloat16 with results in float32.

    Args:
      graph: contains the node; nodes have example values (`meta["val"]`).
      node: a call of `FORWARD` or `BACKWARD`.
      smallest: multiply-adds of the smallest convolution that is replaced.
      in_bfloat16: returns a node's cast to bfloat16.
    """
    forward = node.target is FORWARD
    # An image, weights [out, in, height, width], and the results' pixels.
    image, weight = node.args[:2] if forward else node.args[1:3]
    result = node if forward else node.args[0]
    pixels = result.meta["val"]  # type: ignore[union-attr]
    size = pixels.numel() * math.prod(weight.meta["val"].shape[1:])  # type: ignore[union-attr]
    if node.kwargs or pixels.dtype != torch.float32 or size < smallest:
        return
    if not torch_internals.has_bfloat16_convolutions():
        return
    with graph.inserting_before(node):
        low_image, low_weight = in_bfloat16(image), in_bfloat16(weight)  # type: ignore[arg-type]
        if forward:
            low = graph.call_function(FORWARD, (low_image, low_weight, None, *node.args[3:]))
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
        low = graph.call_function(BACKWARD, (in_bfloat16(gradient), low_image, low_weight, *settings))  # type: ignore[arg-type]
        for part in list(node.users):
            k = part.args[1]
            value = node.meta["val"][k]
            if value is not None:  # the gradient of an image that is no result of a layer is not asked for
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
