"""Moves the random operations out of a graph, so that random numbers are drawn before the graph runs.

Torch's compiler keeps the order of two operations only if one reads the result of the other. Random operations do not
read each other's results, so the compiler may reorder them. Each operation would then draw different numbers than
without compilation. Therefore the results of random operations become arguments of the graph. Before each call, they
are drawn in the order of the trace.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from alfish.compiler.tracer import is_random

aten = torch.ops.aten
READ_A_LAYOUT = {aten.bernoulli.p, aten.rand_like.default, aten.randn_like.default}
FILL = {aten.bernoulli_.float, aten.exponential_.default, aten.normal_.default, aten.uniform_.default}
ALLOCATE = {aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default}


class Draw(NamedTuple):
    """A random operation that was moved out of its graph.

    Attributes:
      examples: tensors without values, with the shapes and dtypes of the drawn tensors.
      draw: function that draws tensors with the layouts of `examples`.
    """

    examples: Sequence[torch.Tensor]
    draw: Callable[[], Sequence[torch.Tensor]]


def take_draws(graph: torch.fx.GraphModule) -> list[Draw]:
    """Replaces the random operations of a graph with additional arguments; returns the `Draw` of each, in order.

    If a random operation reads a tensor's values, as `multinomial` does, the graph does not change, and the list is
    empty.

    Args:
      graph: graph from `make_fx`; each node's `meta["val"]` is the node's example value.
    """
    nodes = [node for node in graph.graph.nodes if node.op == "call_function" and is_random(node)]
    draws = [_draw(node) for node in nodes]
    taken = [draw for draw in draws if draw is not None]
    if len(taken) < len(draws):
        return []
    last = [node for node in graph.graph.nodes if node.op == "placeholder"][-1]
    for number, (node, draw) in enumerate(zip(nodes, taken)):
        arguments = []
        for part, example in enumerate(draw.examples):
            with graph.graph.inserting_after(last):
                last = graph.graph.placeholder(f"draw_{number}_{part}")
            last.meta["val"] = example
            arguments.append(last)
        _replace(graph.graph, node, arguments)
    graph.recompile()
    return taken


def with_draws(function: Callable[[list[torch.Tensor]], Any], draws: Sequence[Draw]) -> Callable[..., Any]:
    """Returns a function that takes a graph's original arguments, and draws the additional arguments itself.

    If `draws` is empty, returns `function`.
    """
    if not draws:
        return function

    def call(leaves: list[torch.Tensor]) -> Any:
        drawn = [tensor for each in draws for tensor in each.draw()]
        arguments = [*leaves, *drawn]
        leaves.clear()
        return function(arguments)

    return call


def _draw(node: torch.fx.Node) -> Draw | None:
    """Returns the `Draw` that replaces a random node; None if the node reads values of tensors."""
    target: Any = node.target
    value, inputs, arguments, keywords = node.meta["val"], node.all_input_nodes, node.args, node.kwargs
    if not inputs:
        return Draw([value], lambda: [target(*arguments, **keywords)])
    first = inputs[0]
    if inputs[1:] or arguments[0] is not first:
        return None
    layout, rest = first.meta["val"], arguments[1:]
    shape, strides, kind = layout.shape, layout.stride(), {"dtype": layout.dtype, "device": layout.device}

    def empty() -> torch.Tensor:
        return torch.empty_strided(shape, strides, **kind)

    fills_new = target in FILL and first.target in ALLOCATE and len(first.users) == 1
    if fills_new or target in READ_A_LAYOUT:
        return Draw([value], lambda: [target(empty(), *rest, **keywords)])
    if target is aten.native_dropout.default and rest[1] is not False:
        return Draw(value, lambda: target(empty().fill_(1), *rest))
    return None


def _replace(graph: torch.fx.Graph, node: torch.fx.Node, arguments: Sequence[torch.fx.Node]) -> None:
    """Replaces the results of a random node with arguments of the graph."""
    inputs = node.all_input_nodes
    if node.target is aten.native_dropout.default:
        scale, mask = arguments  # results of dropout for an input of ones
        for part in list(node.users):  # users are calls of `getitem`
            replacement = mask
            if part.args[1] == 0:
                with graph.inserting_before(part):
                    replacement = graph.call_function(aten.mul.Tensor, (inputs[0], scale))
                replacement.meta = dict(part.meta)
            part.replace_all_uses_with(replacement)
            graph.erase_node(part)
    else:
        node.replace_all_uses_with(arguments[0])
    graph.erase_node(node)
    for source in inputs:
        if source.target in ALLOCATE and not source.users:
            graph.erase_node(source)
