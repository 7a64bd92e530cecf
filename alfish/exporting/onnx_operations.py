"""Translations of torch's operations to ONNX."""

import itertools
import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from alfish.exporting.graph import NotExportable

aten = torch.ops.aten

# Dtypes for which ONNX runtimes implement few operations.
SMALL = {torch.bool, torch.int8, torch.int16, torch.uint8, torch.uint16}


class OnnxGraph:
    """Builder of an ONNX graph; values are represented by their names.

    Args:
      onnx: package `onnx`.
    """

    def __init__(self, onnx: Any):
        self._onnx = onnx
        self.nodes: list[Any] = []
        self.initializers: list[Any] = []
        self._count = 0

    def call(self, operation: str, *inputs: str, **attributes: Any) -> str:
        """Adds an operation and returns its first output."""
        name = self._name()
        self.nodes.append(self._onnx.helper.make_node(operation, list(inputs), [name], **attributes))
        return name

    def constant(self, value: Any, dtype: Any = None, name: str | None = None) -> str:
        """Adds an array and returns its name."""
        name = name or self._name()
        array = np.ascontiguousarray(np.asarray(value, dtype)).reshape(np.shape(value))
        self.initializers.append(self._onnx.numpy_helper.from_array(array, name))
        return name

    def cast(self, value: str, source: torch.dtype, target: torch.dtype) -> str:
        return value if source == target else self.call("Cast", value, to=self.onnx_dtype(target))

    def onnx_dtype(self, dtype: torch.dtype) -> int:
        return self._onnx.helper.np_dtype_to_tensor_dtype(torch.empty(0, dtype=dtype).numpy().dtype)

    def declared(self, name: str, example: torch.Tensor) -> Any:
        """Returns the declaration of an input or output of the graph."""
        return self._onnx.helper.make_tensor_value_info(name, self.onnx_dtype(example.dtype), list(example.shape))

    def _name(self) -> str:
        self._count += 1
        return f"v{self._count}"


Names = dict[Any, Any]
# Nodes are annotated as `Any`, because torch annotates their arguments with a union of many types.
Translate = Callable[[OnnxGraph, Any, Names], Any]


def _arguments(node: Any, *defaults: Any) -> list[Any]:
    """Returns the arguments of a call, completed with defaults; `defaults[0]` belongs to the second argument."""
    return [*node.args, *defaults[len(node.args) - 1 :]]


def _dtype(node: Any) -> torch.dtype:
    return node.meta["val"].dtype


def _shape(node: Any) -> list[int]:
    return list(node.meta["val"].shape)


def _operand(build: OnnxGraph, argument: Any, names: Names, dtype: torch.dtype) -> str:
    """Returns the name of a tensor or number after conversion to a dtype."""
    if isinstance(argument, torch.fx.Node):
        return build.cast(names[argument], _dtype(argument), dtype)
    return build.constant(argument, torch.empty(0, dtype=dtype).numpy().dtype)


def _refuse_keywords(node: Any) -> None:
    others = node.kwargs.keys() - {"dtype", "layout", "device", "pin_memory", "memory_format"}
    if others:
        raise NotExportable(f"{node.target} with {', '.join(sorted(others))} has no translation to ONNX")


def _same_dtype(operation: str) -> Translate:
    """Returns the translation of an operation that computes in the dtype of its result."""

    def translate(build: OnnxGraph, node: Any, names: Names) -> str:
        _refuse_keywords(node)
        return build.call(operation, *(_operand(build, one, names, _dtype(node)) for one in node.args))

    return translate


def _comparison(operation: str) -> Translate:
    def translate(build: OnnxGraph, node: Any, names: Names) -> str:
        left, right = (one.meta["val"] if isinstance(one, torch.fx.Node) else one for one in node.args)
        common = torch.result_type(left, right)
        common = torch.int32 if common in SMALL else common
        return build.call(operation, *(_operand(build, one, names, common) for one in node.args))

    return translate


def _negated(translate: Translate) -> Translate:
    return lambda build, node, names: build.call("Not", translate(build, node, names))


def _logical(operation: str) -> Translate:
    def translate(build: OnnxGraph, node: Any, names: Names) -> str:
        return build.call(operation, *(_operand(build, one, names, torch.bool) for one in node.args))

    return translate


def _bitwise(operation: str) -> Translate:
    logical = _logical(operation)

    def translate(build: OnnxGraph, node: Any, names: Names) -> str:
        if _dtype(node) != torch.bool:
            raise NotExportable(f"{node.target} of integers has no translation to ONNX")
        return logical(build, node, names)

    return translate


def _product(build: OnnxGraph, node: Any, names: Names) -> str:
    _refuse_keywords(node)
    if len(node.args) == 2:
        return build.call("MatMul", *(names[one] for one in node.args))
    bias, left, right = (names[one] for one in node.args)
    return build.call("Gemm", left, right, bias)


def _convolution(build: OnnxGraph, node: Any, names: Names) -> str:
    x, weight, bias, stride, padding, dilation, transposed, _, groups = node.args
    if transposed:
        raise NotExportable("a transposed convolution has no translation to ONNX")
    inputs = [names[one] for one in (x, weight, bias) if one is not None]
    return build.call("Conv", *inputs, strides=stride, pads=[*padding, *padding], dilations=dilation, group=groups)


def _max_pool(build: OnnxGraph, node: Any, names: Names) -> list[str]:
    x, kernel, stride, padding, dilation, ceil_mode = _arguments(node, None, [], [0], [1], False)
    kernel, stride, padding, dilation = (
        [*one] * (2 // len(one)) for one in (kernel, stride or kernel, padding, dilation)
    )
    options = {"kernel_shape": kernel, "strides": stride, "pads": [*padding, *padding], "dilations": dilation}
    return [build.call("MaxPool", names[x], **options, ceil_mode=int(ceil_mode))]


def _layer_norm(build: OnnxGraph, node: Any, names: Names) -> list[str]:
    x, shape, weight, bias, epsilon = node.args
    ones = [names[weight] if weight is not None else build.constant(np.ones(shape, np.float32))]
    ones += [names[bias]] if bias is not None else []
    return [build.call("LayerNormalization", names[x], *ones, axis=-len(shape), epsilon=epsilon)]


def _reshape(build: OnnxGraph, node: Any, names: Names) -> str:
    return build.call("Reshape", names[node.args[0]], build.constant(_shape(node), np.int64))


def _expand(build: OnnxGraph, node: Any, names: Names) -> str:
    return build.call("Expand", names[node.args[0]], build.constant(_shape(node), np.int64))


def _transpose(build: OnnxGraph, node: Any, names: Names) -> str:
    x, *dims = node.args
    order = list(range(len(_shape(x))))
    if node.target is aten.permute.default:
        order = [dim % len(order) for dim in dims[0]]
    else:
        a, b = dims or (0, -1)
        order[a], order[b] = order[b], order[a]
    return build.call("Transpose", names[x], perm=order)


def _slice(build: OnnxGraph, node: Any, names: Names) -> str:
    x, dim, start, end, step = _arguments(node, 0, None, None, 1)
    bounds = [start or 0, np.iinfo(np.int64).max if end is None else end, dim, step]
    return build.call("Slice", names[x], *(build.constant([one], np.int64) for one in bounds))


def _select(build: OnnxGraph, node: Any, names: Names) -> str:
    x, dim, index = node.args
    return build.call("Gather", names[x], build.constant(index, np.int64), axis=dim)


def _cat(build: OnnxGraph, node: Any, names: Names) -> str:
    parts, dim = _arguments(node, 0)
    values = [_operand(build, one, names, _dtype(node)) for one in parts]
    return build.call("Concat", *values, axis=dim)


def _stack(build: OnnxGraph, node: Any, names: Names) -> str:
    parts, dim = _arguments(node, 0)
    axis = build.constant([dim], np.int64)
    return build.call("Concat", *(build.call("Unsqueeze", names[one], axis) for one in parts), axis=dim)


def _split(build: OnnxGraph, node: Any, names: Names) -> list[str]:
    x, sizes, dim = _arguments(node, None, 0)
    total = _shape(x)[dim]
    lengths = [min(sizes, total - k) for k in range(0, total, sizes)] if isinstance(sizes, int) else sizes
    ends = [0, *itertools.accumulate(lengths)]
    axis = build.constant([dim], np.int64)
    bounds = [build.constant([end], np.int64) for end in ends]
    return [build.call("Slice", names[x], low, high, axis) for low, high in itertools.pairwise(bounds)]


def _unbind(build: OnnxGraph, node: Any, names: Names) -> list[str]:
    x, dim = _arguments(node, 0)
    count = _shape(x)[dim]
    return [build.call("Gather", names[x], build.constant(k, np.int64), axis=dim) for k in range(count)]


def _part(build: OnnxGraph, node: Any, names: Names) -> str:
    parts, index = names[node.args[0]], node.args[1]
    if index >= len(parts):
        raise NotExportable(f"a second result of {node.args[0].target} has no translation to ONNX")
    return parts[index]


def _cast(build: OnnxGraph, node: Any, names: Names) -> str:
    (x, *_) = node.args
    return build.cast(names[x], _dtype(x), _dtype(node))


def _where(build: OnnxGraph, node: Any, names: Names) -> str:
    condition, *branches = node.args
    dtype = _dtype(node)
    computed = torch.int32 if dtype in SMALL - {torch.uint8} else dtype
    values = [_operand(build, one, names, computed) for one in branches]
    return build.cast(build.call("Where", names[condition], *values), computed, dtype)


def _clamp(build: OnnxGraph, node: Any, names: Names) -> str:
    x, low, high = _arguments(node, *((-1.0, 1.0) if node.target is aten.hardtanh.default else (None, None)))
    value = _operand(build, x, names, _dtype(node))
    for operation, bound in (("Max", low), ("Min", high)):
        if bound is not None:
            value = build.call(operation, value, _operand(build, bound, names, _dtype(node)))
    return value


def _clamp_max(build: OnnxGraph, node: Any, names: Names) -> str:
    x, high = node.args
    return build.call("Min", _operand(build, x, names, _dtype(node)), _operand(build, high, names, _dtype(node)))


def _reduced(operation: str) -> Translate:
    def translate(build: OnnxGraph, node: Any, names: Names) -> str:
        _refuse_keywords(node)
        x, dims, keepdim = _arguments(node, None, False)[:3]
        axes = list(dims) if dims else list(range(len(_shape(x))))
        computed = torch.int32 if _dtype(node) in SMALL else _dtype(node)
        value = _operand(build, x, names, computed)
        reduced = build.call(operation, value, build.constant(axes, np.int64), keepdims=int(bool(keepdim)))
        return build.cast(reduced, computed, _dtype(node))

    return translate


def _arg_max(build: OnnxGraph, node: Any, names: Names) -> str:
    x, dim, keepdim = _arguments(node, None, False)
    value = names[x]
    if dim is None:
        value, dim = build.call("Reshape", value, build.constant([-1], np.int64)), 0
    return build.call("ArgMax", value, axis=dim, keepdims=int(keepdim))


def _softmax(operation: str) -> Translate:
    return lambda build, node, names: build.call(operation, names[node.args[0]], axis=node.args[1])


def _gather(build: OnnxGraph, node: Any, names: Names) -> str:
    x, dim, index = node.args[:3]
    return build.call("GatherElements", names[x], names[index], axis=dim)


def _silu(build: OnnxGraph, node: Any, names: Names) -> str:
    x = names[node.args[0]]
    return build.call("Mul", x, build.call("Sigmoid", x))


def _gelu(build: OnnxGraph, node: Any, names: Names) -> str:
    _refuse_keywords(node)
    x = names[node.args[0]]
    half, one, root = (build.constant(value, np.float32) for value in (0.5, 1.0, math.sqrt(0.5)))
    erf = build.call("Erf", build.call("Mul", x, root))
    return build.call("Mul", build.call("Mul", x, half), build.call("Add", erf, one))


def _elu(build: OnnxGraph, node: Any, names: Names) -> str:
    x, alpha, scale, input_scale = _arguments(node, 1, 1, 1)
    if (scale, input_scale) != (1, 1):
        raise NotExportable("an elu with a scale has no translation to ONNX")
    return build.call("Elu", names[x], alpha=float(alpha))


def _leaky_relu(build: OnnxGraph, node: Any, names: Names) -> str:
    x, slope = _arguments(node, 0.01)
    return build.call("LeakyRelu", names[x], alpha=float(slope))


def _log1p(build: OnnxGraph, node: Any, names: Names) -> str:
    return build.call("Log", build.call("Add", names[node.args[0]], build.constant(1, np.float32)))


def _expm1(build: OnnxGraph, node: Any, names: Names) -> str:
    return build.call("Sub", build.call("Exp", names[node.args[0]]), build.constant(1, np.float32))


def _rsqrt(build: OnnxGraph, node: Any, names: Names) -> str:
    return build.call("Reciprocal", build.call("Sqrt", names[node.args[0]]))


def _softplus(build: OnnxGraph, node: Any, names: Names) -> str:
    x, beta, _ = _arguments(node, 1, 20)
    if beta == 1:
        return build.call("Softplus", names[x])
    scale = build.constant(beta, np.float32)
    return build.call("Div", build.call("Softplus", build.call("Mul", names[x], scale)), scale)


def _subtracted(build: OnnxGraph, node: Any, names: Names) -> str:
    if len(node.args) > 2:
        raise NotExportable("rsub with a factor has no translation to ONNX")
    x, y = (_operand(build, one, names, _dtype(node)) for one in node.args)
    return build.call("Sub", y, x)


def _squared(build: OnnxGraph, node: Any, names: Names) -> str:
    x, exponent = (_operand(build, one, names, _dtype(node)) for one in node.args)
    return build.call("Mul", x, x) if node.args[1] == 2 else build.call("Pow", x, exponent)


_EQUAL = _comparison("Equal")
TABLE: dict[Any, Translate] = {
    **dict.fromkeys((aten.mm.default, aten.bmm.default, aten.addmm.default), _product),
    **dict.fromkeys((aten.view.default, aten._unsafe_view.default, aten.unsqueeze.default, aten.squeeze.default,
                     aten.squeeze.dim, aten.squeeze.dims), _reshape),
    **dict.fromkeys((aten.t.default, aten.transpose.int, aten.permute.default), _transpose),
    **dict.fromkeys((aten._to_copy.default, aten.clone.default, aten.alias.default), _cast),
    **dict.fromkeys((aten.split.Tensor, aten.split_with_sizes.default), _split),
    **dict.fromkeys((aten.clamp.default, aten.clamp.Tensor, aten.clamp_min.default), _clamp),
    aten.hardtanh.default: _clamp, aten.leaky_relu.default: _leaky_relu, aten.log1p.default: _log1p,
    aten.expm1.default: _expm1, aten.rsqrt.default: _rsqrt,
    **dict.fromkeys((aten.eq.Tensor, aten.eq.Scalar), _EQUAL),
    **dict.fromkeys((aten.ne.Tensor, aten.ne.Scalar), _negated(_EQUAL)),
    **dict.fromkeys((aten.lt.Tensor, aten.lt.Scalar), _comparison("Less")),
    **dict.fromkeys((aten.le.Tensor, aten.le.Scalar), _comparison("LessOrEqual")),
    **dict.fromkeys((aten.gt.Tensor, aten.gt.Scalar), _comparison("Greater")),
    **dict.fromkeys((aten.ge.Tensor, aten.ge.Scalar), _comparison("GreaterOrEqual")),
    **{op: _same_dtype(name) for op, name in {
        aten.add.Tensor: "Add", aten.sub.Tensor: "Sub", aten.mul.Tensor: "Mul", aten.div.Tensor: "Div",
        aten.minimum.default: "Min", aten.maximum.default: "Max", aten.neg.default: "Neg", aten.abs.default: "Abs",
        aten.exp.default: "Exp", aten.log.default: "Log", aten.sqrt.default: "Sqrt", aten.tanh.default: "Tanh",
        aten.relu.default: "Relu", aten.sigmoid.default: "Sigmoid", aten.sin.default: "Sin", aten.cos.default: "Cos",
        aten.round.default: "Round", aten.floor.default: "Floor", aten.reciprocal.default: "Reciprocal",
    }.items()},
    operator.getitem: _part, aten.unbind.int: _unbind, aten.convolution.default: _convolution,
    aten.max_pool2d_with_indices.default: _max_pool, aten.native_layer_norm.default: _layer_norm,
    aten.expand.default: _expand, aten.slice.Tensor: _slice, aten.select.int: _select, aten.cat.default: _cat,
    aten.stack.default: _stack, aten.where.self: _where, aten.clamp_max.default: _clamp_max,
    aten.sum.dim_IntList: _reduced("ReduceSum"), aten.mean.dim: _reduced("ReduceMean"),
    aten.amax.default: _reduced("ReduceMax"), aten.amin.default: _reduced("ReduceMin"),
    aten.argmax.default: _arg_max, aten._softmax.default: _softmax("Softmax"),
    aten._log_softmax.default: _softmax("LogSoftmax"), aten.gather.default: _gather, aten.silu.default: _silu,
    aten.gelu.default: _gelu, aten.elu.default: _elu, aten.softplus.default: _softplus,
    aten.rsub.Scalar: _subtracted, aten.pow.Tensor_Scalar: _squared,
    aten.logical_not.default: _logical("Not"), aten.logical_and.default: _logical("And"),
    aten.bitwise_not.default: _bitwise("Not"), aten.bitwise_and.Tensor: _bitwise("And"),
    aten.bitwise_or.Tensor: _bitwise("Or"),
}  # fmt: skip
