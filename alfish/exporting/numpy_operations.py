"""Operations in numpy for exported policies, which `alfish.compiler` leaves to torch because torch is faster."""

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from alfish.compiler.numpy_operations import TABLE, NotTranslatable, convolution

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
    """Returns `[N, C, H', W', *kernel]`, a view of images `[N, C, H, W]` after padding."""
    if max(padding):
        margins = ((0, 0), (0, 0), (padding[0], padding[0]), (padding[1], padding[1]))
        x = np.pad(x, margins, constant_values=fill)
    windows = np.lib.stride_tricks.sliding_window_view(x, tuple(kernel), (2, 3))
    return windows[:, :, :: stride[0], :: stride[1]]


def _layer_norm_of(node: Any, shape: tuple[int, ...]) -> Callable[..., Any]:
    if any(user.args[1] != 0 for user in node.users):
        raise NotTranslatable("the moments of a layer norm are read")
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


# The compiler's table, without torch.
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
