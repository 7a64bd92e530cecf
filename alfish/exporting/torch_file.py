"""A policy as a torch program; `torch.export.load` reads it without alfish."""

import io
from pathlib import Path
from typing import Any

import torch
from torch import nn

from alfish.errors import first_line
from alfish.exporting.graph import SMALLEST_UNIFORM, Noise, NotExportable, PolicyGraph
from alfish.runs.files import write_atomically

aten = torch.ops.aten


def write(program: PolicyGraph, path: Path, description: str, noise_is_input: bool = False) -> list[Path]:
    """Writes a policy as a `.pt2` file; returns its path in a list.

    Args:
      program: recorded step of the policy.
      path: path of the file.
      description: JSON text that the file stores as `policy.json`.
      noise_is_input: whether random numbers are inputs; if not, the program draws them from torch's generator.

    Raises:
      NotExportable: torch cannot export the program.
    """
    noise = program.read_noise if noise_is_input else []
    examples = tuple(leaf.example for leaf in (*program.inputs, *(one.leaf for one in noise)))
    try:
        exported = torch.export.export(module(program, noise_is_input), examples)
        content = io.BytesIO()
        torch.export.save(exported, content, extra_files={"policy.json": description})
    except Exception as error:  # torch raises many kinds of errors
        raise NotExportable(f"torch.export cannot export the policy: {first_line(error)}") from error
    write_atomically(path, content.getvalue())
    return [path]


def module(program: PolicyGraph, noise_is_input: bool) -> torch.fx.GraphModule:
    """Returns the program as a module. Its arguments are the inputs and, with `noise_is_input`, the random numbers."""
    graph, root = torch.fx.Graph(), nn.Module()
    names: dict[torch.fx.Node, torch.fx.Node] = {}
    noise = {one.leaf.name: one for one in program.read_noise}
    for node in program.graph.nodes:
        name = node.meta.get("name", "").replace(".", "_")
        if node.op != "placeholder":
            names[node] = graph.node_copy(node, lambda one: names[one])
        elif node.meta["name"] in program.constants:
            constant = program.constants[node.meta["name"]]
            root.register_buffer(name, constant.clone())  # parameters are views of one long vector
            names[node] = graph.get_attr(name)
        elif node.meta["name"] in noise and not noise_is_input:
            names[node] = _drawn(graph, noise[node.meta["name"]])
        else:
            names[node] = graph.placeholder(name)
    return torch.fx.GraphModule(root, graph)


def _drawn(graph: torch.fx.Graph, noise: Noise) -> torch.fx.Node:
    example = noise.leaf.example
    shape: list[int] = list(example.shape)
    like: dict[str, Any] = {"dtype": example.dtype}
    if noise.distribution == "normal":
        return graph.call_function(aten.randn.default, (shape,), like)
    if noise.distribution == "integers":
        low, high = (0, *noise.bounds)[-2:]
        return graph.call_function(aten.randint.low, (low, high, shape), like)
    drawn = graph.call_function(aten.rand.default, (shape,), like)
    if noise.distribution == "uniform":
        return drawn
    positive = graph.call_function(aten.clamp_min.default, (drawn, SMALLEST_UNIFORM))
    return graph.call_function(aten.neg.default, (graph.call_function(aten.log.default, (positive,)),))


def load(path: Path) -> Any:
    """Loads the module from a file that `write` wrote in this process."""
    return torch.export.load(path).module()
