"""A policy as an ONNX graph, translated operation by operation from the recorded graph."""

import json
from pathlib import Path
from typing import Any

import torch

import alfish
from alfish.errors import UsageError
from alfish.exporting.graph import SMALLEST_UNIFORM, Noise, NotExportable, PolicyGraph
from alfish.exporting.onnx_operations import TABLE, OnnxGraph
from alfish.runs.files import write_atomically

OPSET, IR_VERSION = 18, 9  # supported by runtimes since 2023


def write(program: PolicyGraph, path: Path, origin: str, noise_is_input: bool = False) -> list[Path]:
    """Writes a policy as an ONNX file; returns its path in a list.

    Args:
      program: recorded step of the policy.
      path: path of the file.
      origin: sentence that describes the policy, stored in the file.
      noise_is_input: whether random numbers are inputs of the graph; otherwise the graph draws them.

    Raises:
      NotExportable: an operation has no translation.
      UsageError: the extra 'onnx' is missing.
    """
    write_atomically(path, model(program, origin, noise_is_input).SerializeToString())
    return [path]


def model(program: PolicyGraph, origin: str, noise_is_input: bool = False) -> Any:
    """Returns a policy as an ONNX model; see `write`."""
    try:
        import onnx
    except ImportError as error:
        raise UsageError("an .onnx file needs the extra 'onnx': pip install 'alfish[onnx]'") from error
    build = OnnxGraph(onnx)
    names: dict[torch.fx.Node, Any] = {}
    constants = program.placeholders[: len(program.constants)]
    inputs = program.placeholders[len(constants) :]
    for node, (name, value) in zip(constants, program.constants.items()):
        names[node] = build.constant(value.numpy(), name=name)
    noise = {one.leaf.name: one for one in program.read_noise}
    declared = []
    for node in inputs:
        name = node.meta["name"]
        if name in noise and not noise_is_input:
            names[node] = _drawn(build, noise[name])
        else:
            declared.append(build.declared(name, node.meta["val"]))
            names[node] = name
    for node in program.graph.nodes:
        if node.op == "call_function":
            names[node] = _translated(build, node, names)
    results = [*(leaf.name for leaf in program.actions), *(f"next_{leaf.name}" for leaf in program.state)]
    outputs = []
    for node, name in zip(program.results, results):
        build.nodes.append(onnx.helper.make_node("Identity", [names[node]], [name]))
        outputs.append(build.declared(name, node.meta["val"]))
    graph = onnx.helper.make_graph(build.nodes, "policy", declared, outputs, build.initializers)
    made = onnx.helper.make_model(
        graph,
        opset_imports=[onnx.helper.make_opsetid("", OPSET)],
        ir_version=IR_VERSION,
        producer_name="alfish",
        producer_version=alfish.__version__,
        doc_string=origin,
    )
    onnx.helper.set_model_props(made, {"initial_state": json.dumps(initial_state(program))})
    onnx.checker.check_model(made)
    return made


def initial_state(program: PolicyGraph) -> dict[str, Any]:
    """Returns the state at the start of an episode, in types of JSON."""
    return {leaf.name: _initial(leaf.example) for leaf in program.state}


def _initial(value: torch.Tensor) -> Any:
    """Returns an initial state for JSON: one number if all entries are equal."""
    return value.flatten()[0].item() if value.numel() and (value == value.flatten()[0]).all() else value.tolist()


def _drawn(build: OnnxGraph, noise: Noise) -> str:
    """Adds an operation that draws random numbers at each call."""
    example = noise.leaf.example
    shape, dtype = list(example.shape), build.onnx_dtype(example.dtype)
    if noise.distribution == "normal":
        return build.call("RandomNormal", shape=shape, dtype=dtype)
    if noise.distribution == "integers":
        low, high = (0, *noise.bounds)[-2:]
        drawn = build.call("RandomUniform", shape=shape, dtype=1, low=float(low), high=float(high))
        return build.call("Cast", build.call("Floor", drawn), to=dtype)
    if noise.distribution == "uniform":
        return build.call("RandomUniform", shape=shape, dtype=dtype)
    drawn = build.call("RandomUniform", shape=shape, dtype=dtype, low=SMALLEST_UNIFORM, high=1.0)
    return build.call("Neg", build.call("Log", drawn))


def _translated(build: OnnxGraph, node: torch.fx.Node, names: dict[torch.fx.Node, Any]) -> Any:
    translate = TABLE.get(node.target)
    place = node.meta.get("place", "the policy")
    if translate is None:
        raise NotExportable(f"{place} cannot be exported: {node.target} has no translation to ONNX")
    try:
        return translate(build, node, names)
    except NotExportable as error:
        raise NotExportable(f"{place} cannot be exported: {error}") from error
