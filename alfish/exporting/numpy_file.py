"""A policy as a Python file that needs numpy only, and its weights in a file next to it.

The code comes from `alfish.compiler.numpy_program`, which also makes the code that acts during training. Weights are in
a separate `.npz` file of plain arrays, so the code stays readable, and loading unpickles nothing.
"""

import functools
import hashlib
import inspect
import io
import math
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

import alfish
from alfish import nest, specs
from alfish.compiler.numpy_operations import TABLE, NotTranslatable, convolution, translated
from alfish.compiler.numpy_program import Written, prepare_graph, written
from alfish.exporting.graph import NotExportable, PolicyGraph
from alfish.runs.files import write_atomically

aten = torch.ops.aten


def _pooling_of(node: Any, shape: tuple[int, ...]) -> Callable[..., Any]:
    dilation, ceil_mode = [*node.args[4:], [1], False][:2] if len(node.args) > 4 else ([1], False)
    if set(dilation) != {1} or ceil_mode or any(user.args[1] != 0 for user in node.users):
        raise NotTranslatable("the pooling has dilation, rounds up, or returns indices")
    return _max_pool


def _max_pool(
    x: np.ndarray, kernel: list[int], stride: list[int] | None = None, padding: list[int] | None = None, *rest: Any
) -> list[np.ndarray]:
    height, width = np.broadcast_to(kernel, 2)
    strides, paddings = np.broadcast_to(stride or kernel, 2), np.broadcast_to(padding or 0, 2)
    return [_windows(x, (height, width), strides, paddings, -np.inf).max((-2, -1))]


def _windows(x: np.ndarray, kernel: Any, stride: Any, padding: Any, fill: float) -> np.ndarray:
    """Returns the windows `[N, C, H', W', *kernel]` of padded images `[N, C, H, W]`, as a view."""
    if max(padding):
        margins = ((0, 0), (0, 0), (padding[0], padding[0]), (padding[1], padding[1]))
        x = np.pad(x, margins, constant_values=fill)
    windows = np.lib.stride_tricks.sliding_window_view(x, tuple(kernel), (2, 3))
    return windows[:, :, :: stride[0], :: stride[1]]


def _layer_norm_of(node: Any, shape: tuple[int, ...]) -> Callable[..., Any]:
    if any(user.args[1] != 0 for user in node.users):
        raise NotTranslatable("the policy reads the mean or the inverse standard deviation of a layer norm")
    return _layer_norm


def _layer_norm(x: np.ndarray, shape: list[int], weight: Any, bias: Any, epsilon: float) -> list[np.ndarray]:
    axes = tuple(range(x.ndim - len(shape), x.ndim))
    centered = x - x.mean(axes, keepdims=True)
    result = centered / np.sqrt((centered * centered).mean(axes, keepdims=True) + np.asarray(epsilon, x.dtype))
    result = result if weight is None else result * weight
    return [result if bias is None else result + bias]


def _gelu(x: np.ndarray) -> np.ndarray:
    erf = np.vectorize(math.erf, otypes=[np.float64])(x / math.sqrt(2))
    return (0.5 * x * (1 + erf)).astype(x.dtype)


def _elu(x: np.ndarray, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> np.ndarray:
    return np.where(x > 0, x * scale, np.expm1(np.minimum(x, 0) * input_scale) * (alpha * scale)).astype(x.dtype)


def _leaky_relu(x: np.ndarray, slope: float = 0.01) -> np.ndarray:
    return np.where(x > 0, x, x * slope).astype(x.dtype)


def _always(function: Callable[..., Any] | str) -> Callable[..., Any]:
    return lambda node, shape: function


def _rsqrt(x: np.ndarray) -> np.ndarray:
    return 1 / np.sqrt(x)


def _hardtanh(x: np.ndarray, low: float = -1.0, high: float = 1.0) -> np.ndarray:
    return np.clip(x, low, high)


# The compiler's table of operations, with functions that do not need torch.
PORTABLE: dict[Any, Callable[..., Any]] = {
    **TABLE,
    aten.mm.default: _always("{0}.dot({1})"),
    aten.addmm.default: _always("{1}.dot({2}) + {0}"),
    aten.bmm.default: _always(np.matmul),
    aten.convolution.default: functools.partial(convolution, largest=math.inf),
    aten.max_pool2d_with_indices.default: _pooling_of,
    aten.native_layer_norm.default: _layer_norm_of,
    aten.gelu.default: _always(_gelu),
    aten.elu.default: _always(_elu),
    aten.leaky_relu.default: _always(_leaky_relu),
    aten.hardtanh.default: _always(_hardtanh),
    aten.sin.default: _always(np.sin),
    aten.cos.default: _always(np.cos),
    aten.round.default: _always(np.round),
    aten.floor.default: _always(np.floor),
    aten.log1p.default: _always(np.log1p),
    aten.expm1.default: _always(np.expm1),
    aten.reciprocal.default: _always(np.reciprocal),
    aten.rsqrt.default: _always(_rsqrt),
}


def translate(program: PolicyGraph) -> Written:
    """Returns the source of a policy's step in numpy; changes the graph.

    Raises:
      NotExportable: an operation has no translation.
    """
    graph = program.graph
    for node in graph.nodes:
        if node.op == "call_function":
            try:
                translated(node, PORTABLE)
            except NotTranslatable as error:
                raise NotExportable(f"{node.meta.get('place', 'the policy')} cannot be exported: {error}") from error
    prepare_graph(graph)
    structure = nest.flatten([0] * len(program.results))[1]
    return written(graph, len(program.constants), structure, PORTABLE)


def write(program: PolicyGraph, path: Path, origin: str, noise_is_input: bool = False) -> list[Path]:
    """Writes `path` and the `.npz` file next to it; returns both paths.

    Args:
      program: recorded step of the policy; its graph is changed.
      path: path of the Python file.
      origin: sentence that describes the policy, for the file's head.
      noise_is_input: argument without effect: the file's `step` draws random numbers unless its caller passes them.

    Raises:
      NotExportable: an operation has no translation.
    """
    source = translate(program)
    weights = {name: value.numpy() for name, value in program.constants.items()}
    weights |= {leaf.name: leaf.example.numpy() for leaf in program.state}
    content = io.BytesIO()
    np.savez(content, **weights)  # type: ignore[arg-type]
    beside = path.with_suffix(".npz")
    write_atomically(beside, content.getvalue())
    write_atomically(path, _text(program, source, origin, hashlib.sha256(content.getvalue()).hexdigest()))
    return [path, beside]


def _text(program: PolicyGraph, source: Written, origin: str, checksum: str) -> str:
    runtime = Path(__file__).with_name("numpy_runtime.py").read_text()
    functions = _Functions()
    constants = [f"{name} = {functions.expression(value)}" for name, value in source.constants.items()]
    needs = (
        f"Written by alfish {alfish.__version__}. Needs numpy, and the .npz file of the same name in the same "
        "directory."
    )
    head = f'"""{origin}\n\n{needs}\n"""\n\n'
    attributes = {
        "weights_sha256": checksum,
        "weight_names": tuple(program.constants),
        "observations": tuple(_observations(program)),
        "reward_shape": next((tuple(one.example.shape) for one in program.inputs if one.name == "reward"), ()),
        "inputs": tuple(leaf.name for leaf in program.inputs),
        "num_actions": len(program.actions),
        "states": tuple(leaf.name for leaf in program.state),
        "noise": tuple(
            (one.distribution, tuple(one.leaf.example.shape), _dtype(one.leaf.example), one.bounds)
            for one in program.read_noise
        ),
    }
    body = [
        *(f"{name} = {value!r}" for name, value in attributes.items()),
        "",
        *_method("prepare", source.first),
        "",
        *_method("run", source.rest),
        "",
        "@staticmethod",
        "def nested(leaves):",
        f"    return {_structure(program.action_space)}",
    ]
    policy = ["class Policy(NumpyPolicy):", *(textwrap.indent(line, "    ") for line in body)]
    parts = [head + runtime, *functions.sources, "\n".join(constants), "\n".join(policy)]
    return "\n\n".join(part.strip("\n") + "\n" for part in parts)


def _method(name: str, lines: list[str]) -> list[str]:
    head, *rest = lines
    return ["@staticmethod", head.replace("def run(", f"def {name}("), *rest]


def _observations(program: PolicyGraph) -> list[tuple[str, tuple[Any, ...], tuple[int, ...], str]]:
    """Returns name, keys, shape and dtype of each observation leaf that the step reads."""
    leaves = specs.map_space(lambda leaf: 0, program.observation_space)
    keys = dict(zip((name for name, _ in nest.named_leaves(leaves, "observation")), nest.keys(leaves)))
    read = [leaf for leaf in program.inputs if leaf.name in keys]
    return [(leaf.name, keys[leaf.name], tuple(leaf.example.shape), _dtype(leaf.example)) for leaf in read]


def _structure(space: spaces.Space) -> str:
    """Returns the Python expression that builds an action from the list `leaves`."""
    structure = specs.map_space(lambda leaf: 0, space)
    names = iter(f"leaves[{k}]" for k in range(len(nest.leaves(structure))))
    return _nested(nest.map(lambda _: next(names), structure))


def _nested(names: Any) -> str:
    if isinstance(names, dict):
        return f"{{{', '.join(f'{key!r}: {_nested(part)}' for key, part in names.items())}}}"
    return f"({''.join(f'{_nested(part)}, ' for part in names)})" if isinstance(names, tuple) else names


def _dtype(example: torch.Tensor) -> str:
    return example.numpy().dtype.name


class _Functions:
    """Source texts of alfish's functions that an exported numpy program calls.

    Attributes:
      sources: texts of the functions, in an order in which each function follows the functions that it calls.
    """

    def __init__(self) -> None:
        self.sources: list[str] = []
        self._known: set[FunctionType] = set()

    def expression(self, value: Any) -> str:
        """Returns the Python expression of a constant in `Written.constants`."""
        if isinstance(value, functools.partial):
            arguments = [self.expression(one) for one in (value.func, *value.args)]
            return f"functools.partial({', '.join(arguments)})"
        if isinstance(value, np.ndarray):
            return f"np.array({value.item()!r}, np.{value.dtype.name})" if np.isfinite(value) else _infinite(value)
        if isinstance(value, np.dtype):
            return f"np.dtype({value.name!r})"
        if value is np.ndarray.dot:
            return "np.ndarray.dot"
        if isinstance(value, FunctionType) and value.__module__.startswith("alfish."):
            self._add(value)
            return value.__name__
        if callable(value):
            assert getattr(np, value.__name__) is value, f"{value} is not part of numpy"
            return f"np.{value.__name__}"
        return repr(value)

    def _add(self, function: FunctionType) -> None:
        if function in self._known:
            return
        self._known.add(function)
        for name in function.__code__.co_names:
            called = function.__globals__.get(name)
            if isinstance(called, FunctionType):
                self._add(called)
        self.sources.append(inspect.getsource(function))


def _infinite(value: np.ndarray) -> str:
    return f"np.array(float({str(value.item())!r}), np.{value.dtype.name})"
