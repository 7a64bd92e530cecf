"""Translations of torch's operations to numpy.

`translated` returns a function of numpy arrays for a recorded torch operation. Torch still draws random numbers, and
computes products that are too large for numpy to be faster.

All other operations become named functions of this module or of numpy, or a `functools.partial` of such a function with
plain values. So `alfish.exporting` can write them into a file that needs numpy only.
"""

import functools
import itertools
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from alfish.compiler.tracer import is_random

# Largest numbers of multiply-adds for which numpy's OpenBLAS uses one thread, first in a product of two matrices, then
# in a product with a vector. For larger products, torch is as fast.
SMALL_PRODUCT = 1 << 18
SMALL_VECTOR_PRODUCT = 9000

aten = torch.ops.aten


class NotTranslatable(Exception):
    """Raised if an operation of a function has no translation; the message names the operation."""


def translated(node: torch.fx.Node, table: Mapping[Any, Callable[..., Any]]) -> Callable[..., Any] | str:
    """Returns a function of arrays that computes the same as a recorded operation on tensors.

    To save a function call, the result may also be a string: a Python expression with `{0}`, `{1}` ... for the
    arguments.

    Args:
      node: node of a call; `meta["val"]` of the node has the result's shape and dtype.
      table: dict from each operation to a function of (node, shape) that returns the translation: `TABLE` or an
        extension.

    Raises:
      NotTranslatable: the table does not have the operation, or cannot translate its options.
    """
    if node.target in OUTPUTS_OF_SEVERAL:
        return OUTPUTS_OF_SEVERAL[node.target]
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        if node.target not in table:
            raise NotTranslatable(f"{node.target} has no numpy equivalent")
        return table[node.target](node, ())
    shape, dtype = tuple(value.shape), numpy_dtype(value.dtype)
    if is_random(node):
        return _random(node, value)
    make = table.get(node.target)
    if make is None:
        raise NotTranslatable(f"{node.target} has no numpy equivalent")
    if node.kwargs and (make not in MADE_LIKE or node.kwargs.keys() - LAYOUT):
        raise NotTranslatable(f"{node.target} with {dict(node.kwargs)}")
    function = make(node, shape)
    inputs = {x.meta["val"].dtype for x in node.all_input_nodes if isinstance(x.meta.get("val"), torch.Tensor)}
    if node.target is aten.where.self:
        inputs -= {torch.bool}  # the condition's dtype does not matter
    if (inputs <= {value.dtype} and node.target not in CASTS) or node.target in OF_ONE_DTYPE or type(function) is str:
        return function
    # Unlike torch, numpy promotes dtypes for 0-d arrays.
    return functools.partial(_cast, function, dtype)


def equalize_compared(graph: torch.fx.Graph) -> None:
    """Adds casts of compared values to their common dtype, because numpy's promotion rules differ from torch's.

    The casts are nodes of the graph. So a cast of a fixed leaf is computed only in `prepare`.
    """
    for node in list(graph.nodes):
        if node.target not in COMPARISONS:
            continue
        values = [argument.meta["val"] for argument in node.args]
        common = torch.result_type(*values)
        for argument, value in zip(node.args, values):
            if value.dtype != common:
                with graph.inserting_before(node):
                    cast = graph.call_function(aten._to_copy.default, (argument,), {"dtype": common})
                cast.meta["val"] = value.to(common)
                node.replace_input_with(argument, cast)


def align_biases(graph: torch.fx.Graph) -> None:
    """Adds a dimension to the bias of a product with one row, because numpy adds equally shaped arrays twice as fast.

    The dimension is added by a node of the graph. Therefore, if the bias does not change, `prepare` adds the dimension
    only once.
    """
    for node in list(graph.nodes):
        if node.target is not aten.addmm.default:
            continue
        bias, left, _ = node.args
        if len(left.meta["val"]) == 1 and bias.meta["val"].ndim == 1:
            with graph.inserting_before(node):
                row = graph.call_function(aten.unsqueeze.default, (bias, 0))
            row.meta["val"] = bias.meta["val"].unsqueeze(0)
            node.args = (row, *node.args[1:])


def operand(node: torch.fx.Node, argument: Any) -> Any:
    """Returns the form of a non-tensor argument that is fastest for numpy.

    A number becomes an array of the operation's dtype, because finding the dtype takes numpy as long as a small
    operation.
    """
    if node.target not in ARITHMETIC | SCALAR_COMPARISONS or not isinstance(argument, (int, float)):
        return argument
    typed = node.all_input_nodes if node.target in SCALAR_COMPARISONS else (node, *node.all_input_nodes)
    (dtype, *others) = {x.meta["val"].dtype for x in typed}
    if node.target in SCALAR_COMPARISONS and not _fits(argument, dtype):  # torch wraps numbers around, numpy does not
        raise NotTranslatable(f"{node.target} of {dtype} and {argument}")
    return np.array(argument, numpy_dtype(dtype)) if dtype.is_floating_point and not others else argument


def _fits(number: int | float, dtype: torch.dtype) -> bool:
    if dtype.is_floating_point or dtype is torch.bool or isinstance(number, float):
        return True
    limits = torch.iinfo(dtype)
    return limits.min <= number <= limits.max


def numpy_dtype(dtype: torch.dtype) -> np.dtype:
    """Returns numpy's dtype for a dtype of torch."""
    try:
        return torch.empty(0, dtype=dtype).numpy().dtype
    except TypeError as error:
        raise NotTranslatable(f"numpy has no {dtype}") from error


# Name of the distribution of each random operation.
DISTRIBUTIONS: dict[Any, str] = {
    **dict.fromkeys((aten.rand.default, aten.rand_like.default), "uniform"),
    **dict.fromkeys((aten.randn.default, aten.randn_like.default), "normal"),
    aten.exponential.default: "exponential",
    aten.randint_like.default: "integers",
}
# Methods that fill a tensor with random numbers, by distribution.
DRAWS: dict[str, Callable[..., Any]] = {
    "uniform": torch.Tensor.uniform_,
    "normal": torch.Tensor.normal_,
    "exponential": torch.Tensor.exponential_,
    "integers": torch.Tensor.random_,
}


def _random(node: torch.fx.Node, value: torch.Tensor) -> Callable[..., Any]:
    if not value.is_contiguous():
        raise NotTranslatable(f"{node.target} with an order other than row-major")
    if node.kwargs.keys() - LAYOUT or (node.target is aten.exponential.default and len(node.args) > 1):
        raise NotTranslatable(f"{node.target} with {node.args[1:]} and {dict(node.kwargs)}")
    distribution = DISTRIBUTIONS.get(node.target)
    if distribution is None:
        raise NotTranslatable(f"{node.target} has no numpy equivalent")
    fill, bounds = DRAWS[distribution], node.args[1:] if distribution == "integers" else ()
    drawn = torch.empty(value.shape, dtype=value.dtype)  # created once, because creating takes longer than drawing
    array = drawn.numpy()
    # Whether the result may be read after the next draw.
    may_stay = any(user.op == "output" or user.target in VIEWS for user in node.users)

    def numbers(*arguments: Any) -> np.ndarray:
        fill(drawn, *bounds)
        return array.copy() if may_stay else array

    return numbers


def _cast(function: Callable[..., Any], dtype: np.dtype, *arguments: Any) -> np.ndarray:
    return np.asarray(function(*arguments)).astype(dtype, copy=False)


def _ufunc(function: Callable[..., Any] | str) -> Callable[..., Any]:
    return lambda node, shape: function


def _reshape(node: torch.fx.Node, shape: tuple[int, ...]) -> str:
    return f"{{0}}.reshape({shape})"


def _broadcast(node: torch.fx.Node, shape: tuple[int, ...]) -> Callable[..., Any]:
    return functools.partial(_broadcast_to, shape)


def _broadcast_to(shape: tuple[int, ...], x: np.ndarray, *rest: Any) -> np.ndarray:
    return np.broadcast_to(x, shape)


def _same(x: np.ndarray) -> np.ndarray:
    return x


def _copied(x: np.ndarray) -> np.ndarray:
    return np.array(x)


def _unbind(x: np.ndarray, dim: int = 0) -> list[np.ndarray]:
    return list(np.moveaxis(x, dim, 0))


def _part(parts: list[np.ndarray], index: int) -> np.ndarray:
    return parts[index]


def _product(node: torch.fx.Node, shape: tuple[int, ...]) -> Callable[..., Any] | str:
    *_, left, right = node.args
    rows, inner = left.meta["val"].shape  # type: ignore[union-attr]
    size = rows * inner * right.meta["val"].shape[-1]  # type: ignore[union-attr]
    is_small = size <= (SMALL_PRODUCT if rows > 1 else SMALL_VECTOR_PRODUCT)
    if len(node.args) == 3:
        if is_small:
            return "{1}.dot({2}) + {0}"
        return lambda bias, a, b: torch.addmm(_tensor(bias), _tensor(a), _tensor(b)).numpy()
    if is_small:
        return np.ndarray.dot  # the same result as matmul, in half the time
    return lambda a, b: torch.mm(_tensor(a), _tensor(b)).numpy()


def convolution(node: Any, shape: tuple[int, ...], largest: float = SMALL_PRODUCT) -> Callable[..., Any]:
    """Returns a convolution of images: by numpy for up to `largest` multiply-adds, else by torch."""
    weight, dilation, transposed, groups = node.args[1].meta["val"], node.args[5], node.args[6], node.args[8]
    if weight.ndim != 4 or transposed or groups != 1 or set(dilation) != {1}:
        raise NotTranslatable("the convolution has groups or dilation, is transposed, or is not two-dimensional")
    size = shape[0] * math.prod(shape[2:]) * weight.numel()
    return _convolution if size <= largest else _torch_convolution


def _torch_convolution(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None, *settings: Any) -> np.ndarray:
    return torch.convolution(_tensor(x), _tensor(weight), None if bias is None else _tensor(bias), *settings).numpy()


def _convolution(
    x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None, stride: list[int], padding: list[int], *rest: Any
) -> np.ndarray:
    images = x.transpose(0, 2, 3, 1)  # the usual memory order of images
    (down, right), (top, left) = stride, padding
    if top or left:
        rows, height, width, channels = images.shape
        padded = np.zeros((rows, height + 2 * top, width + 2 * left, channels), x.dtype)
        padded[:, top : top + height, left : left + width] = images
        images = padded
    rows, height, width, channels = images.shape
    outputs, _, *kernel = weight.shape
    by_row, by_line, by_pixel, by_channel = images.strides
    patches = np.lib.stride_tricks.as_strided(
        images,
        (rows, (height - kernel[0]) // down + 1, (width - kernel[1]) // right + 1, *kernel, channels),
        (by_row, by_line * down, by_pixel * right, by_line, by_pixel, by_channel),
    )
    weights = weight.transpose(2, 3, 1, 0).reshape(-1, outputs)
    result = patches.reshape(-1, len(weights)).dot(weights)
    if bias is not None:
        result += bias
    return result.reshape(*patches.shape[:3], outputs).transpose(0, 3, 1, 2)


def _tensor(array: Any) -> torch.Tensor:
    array = np.asarray(array)
    return torch.from_numpy(array if array.flags.writeable else array.copy())  # a broadcast array is not writable


def _slice(x: np.ndarray, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> np.ndarray:
    return x[(slice(None),) * (dim % x.ndim) + (slice(start, end, step),)]


def _select(x: np.ndarray, dim: int, index: int) -> np.ndarray:
    return x[(slice(None),) * (dim % x.ndim) + (index,)]


def _split(x: np.ndarray, sizes: int | list[int], dim: int = 0) -> list[np.ndarray]:
    if isinstance(sizes, int):
        starts = [*range(0, max(1, x.shape[dim]), sizes)]
        ends = [*starts[1:], x.shape[dim]]
    else:
        ends = [*itertools.accumulate(sizes)]
        starts = [0, *ends[:-1]]
    before = (slice(None),) * (dim % x.ndim)
    return [x[before + (slice(start, end),)] for start, end in zip(starts, ends)]  # three times as fast as np.split


def _clamp(x: Any, low: Any = None, high: Any = None) -> Any:
    x = x if low is None else np.maximum(x, low)
    return x if high is None else np.minimum(x, high)


def _arg_max(x: np.ndarray, dim: int | None = None, keepdim: bool = False) -> Any:
    return x.argmax(dim, keepdims=keepdim)  # type: ignore[arg-type]


def _relu(node: torch.fx.Node, shape: tuple[int, ...]) -> Callable[..., Any]:
    zero = np.zeros((), numpy_dtype(node.meta["val"].dtype))  # created once; creating it takes as long as np.maximum
    return functools.partial(_at_least, zero)


def _at_least(least: np.ndarray, x: np.ndarray) -> np.ndarray:
    return np.maximum(x, least)


def _real(function: np.ufunc) -> Callable[..., Any]:
    return functools.partial(_of_real, function)


def _of_real(function: np.ufunc, node: torch.fx.Node, shape: tuple[int, ...]) -> Callable[..., Any]:
    (x,) = node.all_input_nodes
    if x.meta["val"].is_floating_point():
        return function
    # numpy would compute in float16 for bools and 8-bit integers.
    return functools.partial(function, dtype=numpy_dtype(node.meta["val"].dtype).name)


def _over(function: Callable[..., Any]) -> Callable[..., Any]:
    return _ufunc(functools.partial(_reduced, function))


def _reduced(function: Callable[..., Any], x: np.ndarray, dim: Any = None, keepdim: bool = False) -> Any:
    return function(x, axis=tuple(dim) if dim else None, keepdims=keepdim)  # an empty list means all dimensions


def _log_softmax(x: np.ndarray, dim: int, half_to_float: bool) -> np.ndarray:
    shifted = x - x.max(dim, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(dim, keepdims=True))


def _softmax(x: np.ndarray, dim: int, half_to_float: bool) -> np.ndarray:
    exponent = np.exp(x - x.max(dim, keepdims=True))
    return exponent / exponent.sum(dim, keepdims=True)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-1.0 * x))


def _silu(x: np.ndarray) -> np.ndarray:
    return x * _sigmoid(x)


def _subtracted(x: Any, y: Any, alpha: float = 1) -> Any:
    return y - alpha * x


def _softplus(x: np.ndarray, beta: float = 1.0, threshold: float = 20.0) -> np.ndarray:
    result = np.logaddexp(beta * x, 0) / beta
    # For x of 20 or more, the result is x to the precision of float32, so a threshold of at least 20 has no effect.
    return result if threshold >= 20 else np.where(beta * x > threshold, x, result)


def _where(node: torch.fx.Node, shape: tuple[int, ...]) -> Callable[..., Any]:
    value = node.meta["val"]
    likes = [argument.meta["val"] for argument in node.args[1:]]  # type: ignore[union-attr]
    if not shape or any(like.dtype != value.dtype or like.shape != value.shape for like in likes):
        return np.where
    return _chosen


def _chosen(condition: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    result = b.copy()  # faster than np.where, which also handles different dtypes
    np.copyto(result, a, where=condition)
    return result


def _gather(x: np.ndarray, dim: int, index: np.ndarray) -> np.ndarray:
    dim %= x.ndim
    kept = tuple(slice(None if axis == dim else size) for axis, size in enumerate(index.shape))
    return np.take_along_axis(x[kept], index, dim)


def _constant(node: torch.fx.Node, shape: tuple[int, ...]) -> Callable[..., Any]:
    value = node.meta["val"]
    if value.device.type != "cpu":
        raise NotTranslatable(f"a constant is on {value.device}")
    return value.detach().numpy().copy  # each call makes a copy, because the caller may write into a result


def _filled(node: torch.fx.Node, shape: tuple[int, ...]) -> Callable[..., Any]:
    dtype = numpy_dtype(node.meta["val"].dtype)
    if node.target in (aten.full.default, aten.full_like.default, aten.scalar_tensor.default):
        return functools.partial(_full, shape, dtype)
    fill = 1 if node.target in (aten.ones.default, aten.ones_like.default) else 0
    return functools.partial(_full_of, shape, dtype, fill)


def _full(shape: tuple[int, ...], dtype: np.dtype, *arguments: Any) -> np.ndarray:
    return np.full(shape, arguments[-1], dtype)


def _full_of(shape: tuple[int, ...], dtype: np.dtype, fill: int, *rest: Any) -> np.ndarray:
    return np.full(shape, fill, dtype)


def _range(node: torch.fx.Node, shape: tuple[int, ...]) -> Callable[..., Any]:
    dtype = numpy_dtype(node.meta["val"].dtype)
    return functools.partial(_arange, dtype)


def _arange(dtype: np.dtype, *bounds: int) -> np.ndarray:
    return np.arange(*bounds, dtype=dtype)


OUTPUTS_OF_SEVERAL: dict[Any, Callable[..., Any]] = {
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.unbind.int: _unbind,
    operator.getitem: _part,
}
# Operations whose results may share memory with their arguments.
VIEWS = {
    aten.view.default, aten._unsafe_view.default, aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim,
    aten.squeeze.dims, aten.expand.default, aten._to_copy.default, aten.alias.default, aten.t.default,
    aten.transpose.int, aten.permute.default, aten.slice.Tensor, aten.select.int, *OUTPUTS_OF_SEVERAL,
}  # fmt: skip
CASTS = {aten._to_copy.default}
COMPARISONS = {aten.lt.Tensor, aten.le.Tensor, aten.gt.Tensor, aten.ge.Tensor, aten.eq.Tensor, aten.ne.Tensor}
SCALAR_COMPARISONS = {aten.lt.Scalar, aten.le.Scalar, aten.gt.Scalar, aten.ge.Scalar, aten.eq.Scalar, aten.ne.Scalar}
# Operations whose results in numpy have the same dtype as in torch, for all dtypes of the arguments.
OF_ONE_DTYPE = COMPARISONS | SCALAR_COMPARISONS | {aten.logical_not.default, aten.argmax.default}
# Operations that compute in the dtype of their tensors, even if the other argument is a number.
ARITHMETIC = {
    aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.clamp.default, aten.clamp_min.default,
    aten.clamp_max.default,
}  # fmt: skip
# Keywords that may be ignored in operations that create an array, because the recorded result determines the dtype.
LAYOUT = {"dtype", "layout", "device", "pin_memory", "memory_format"}
_PASSED, _COPIED = _ufunc(_same), _ufunc(_copied)
MADE_LIKE = {_filled, _range, _PASSED, _COPIED}
TABLE: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((aten.mm.default, aten.addmm.default), _product),
    aten.bmm.default: _ufunc(np.matmul),
    aten.convolution.default: convolution,
    aten.relu.default: _relu,
    aten.where.self: _where,
    **dict.fromkeys((aten.view.default, aten._unsafe_view.default, aten.unsqueeze.default, aten.squeeze.default,
                     aten.squeeze.dim, aten.squeeze.dims), _reshape),
    aten.expand.default: _broadcast,
    aten.lift_fresh.default: _constant,
    **dict.fromkeys((aten.full.default, aten.full_like.default, aten.scalar_tensor.default, aten.zeros.default,
                     aten.zeros_like.default, aten.ones.default, aten.ones_like.default), _filled),
    **dict.fromkeys((aten.arange.default, aten.arange.start, aten.arange.start_step), _range),
    **dict.fromkeys((aten._to_copy.default, aten.alias.default), _PASSED),
    aten.clone.default: _COPIED,
    aten.t.default: _ufunc("{0}.T"),
    aten.transpose.int: _ufunc(np.swapaxes),
    aten.permute.default: _ufunc(np.transpose),
    aten.slice.Tensor: _ufunc(_slice),
    aten.select.int: _ufunc(_select),
    aten.cat.default: _ufunc(np.concatenate),
    aten.stack.default: _ufunc(np.stack),
    **{op: _ufunc(function) for op, function in dict[Any, Callable[..., Any]]({
        aten.add.Tensor: np.add, aten.sub.Tensor: np.subtract, aten.mul.Tensor: np.multiply,
        aten.div.Tensor: np.true_divide, aten.neg.default: np.negative, aten.abs.default: np.abs,
        aten.pow.Tensor_Scalar: np.power, aten.sigmoid.default: _sigmoid,
        aten.clamp.default: _clamp, aten.clamp.Tensor: _clamp,
        aten.silu.default: _silu, aten.rsub.Scalar: _subtracted,
        aten.softplus.default: _softplus,
        aten.clamp_min.default: np.maximum, aten.clamp_max.default: np.minimum,
        aten.minimum.default: np.minimum, aten.maximum.default: np.maximum,
        aten.lt.Tensor: np.less, aten.lt.Scalar: np.less, aten.le.Tensor: np.less_equal, aten.le.Scalar: np.less_equal,
        aten.gt.Tensor: np.greater, aten.gt.Scalar: np.greater, aten.ge.Tensor: np.greater_equal,
        aten.ge.Scalar: np.greater_equal, aten.eq.Tensor: np.equal, aten.eq.Scalar: np.equal,
        aten.ne.Tensor: np.not_equal, aten.ne.Scalar: np.not_equal, aten.logical_not.default: np.logical_not,
        aten.bitwise_not.default: np.invert, aten.bitwise_and.Tensor: np.bitwise_and,
        aten.bitwise_or.Tensor: np.bitwise_or, aten.logical_and.default: np.logical_and,
        aten.argmax.default: _arg_max, aten._log_softmax.default: _log_softmax, aten._softmax.default: _softmax,
    }).items()},
    aten.exp.default: _real(np.exp),
    aten.log.default: _real(np.log),
    aten.sqrt.default: _real(np.sqrt),
    aten.tanh.default: _real(np.tanh),
    aten.sum.dim_IntList: _over(np.sum),
    aten.mean.dim: _over(np.mean),
    aten.amax.default: _over(np.max),
    aten.amin.default: _over(np.min),
    aten.gather.default: _ufunc(_gather),
}  # fmt: skip
