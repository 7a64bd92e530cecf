"""A function of small CPU tensors as a Python function of numpy calls.

Acting means many operations on few numbers, where torch spends its time on finding the kernel and modules on finding
torch. So the function is traced once with tensors of zeros, and each recorded operation becomes one call of numpy, a
tenth of the cost. Arrays share the tensors' memory. Random numbers are torch's own, in the same order.

The tracer is our own: torch's take a second and 70 MB to import.
"""

import contextlib
import operator
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from alfish import nest
from alfish.nest import Nest

# Up to so many multiply-adds numpy's OpenBLAS uses one thread, by matrices and by vectors; above, torch is as fast.
SMALL_PRODUCT = 1 << 18
SMALL_VECTOR_PRODUCT = 9000

aten = torch.ops.aten


class NotTranslatable(Exception):
    """The function does something that has no translation; says what."""


class NumpyProgram:
    """`function(arguments)` for arguments of one layout, which are not written.

    Args:
      function: from a nest of CPU tensors to a nest of tensors.
      arguments: like those of the calls to come, in structure, shapes and dtypes.
      num_fixed: how many of the arguments' leaves, the first ones, change only where `prepare` is called.

    Raises:
      NotTranslatable: an operation is not in the table, or the function cannot be traced.

    Attributes:
      used: which of the arguments' leaves the program reads.
    """

    def __init__(self, function: Callable[[Nest], Nest], arguments: Nest, num_fixed: int = 0):
        leaves, structure = nest.flatten(arguments)
        if any(leaf.device.type != "cpu" for leaf in leaves):
            raise NotTranslatable("a tensor is not on the CPU")

        generator = torch.get_rng_state()  # what is drawn without a device is drawn in tracing too
        # Each a tensor of its own: what stands in two places would be traced as one argument.
        zeros = [torch.zeros_like(leaf) for leaf in leaves]
        try:
            with torch.no_grad(), _unreadable(), _Recorder(zeros) as recorder:
                results, self._structure = nest.flatten(function(nest.unflatten(structure, zeros)))
        except NotTranslatable:
            raise
        except Exception as error:
            raise NotTranslatable(f"tracing failed: {error}") from error
        finally:
            torch.set_rng_state(generator)
        graph = recorder.finish(results)
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        self.used = [index for index, node in enumerate(placeholders) if node.users]
        self._num_fixed = sum(index < num_fixed for index in self.used)
        self._translate(graph)
        self._try(graph, [leaves[index] for index in self.used])

    def prepare(self, leaves: list[np.ndarray]) -> None:
        """Works out whatever depends on the fixed leaves alone, from those of them that are used."""
        self._prepared = self._first(*leaves)

    def __call__(self, leaves: list[np.ndarray]) -> Nest:
        """From the other used leaves of the arguments to the function's nest, of arrays."""
        return nest.unflatten(self._structure, self._rest(*self._prepared, *leaves))

    def _try(self, graph: torch.fx.Graph, leaves: list[torch.Tensor]) -> None:
        """Refuses what numpy does not take, or makes another shape or dtype of."""
        generator = torch.get_rng_state()
        try:
            zeros = [np.zeros(tuple(leaf.shape), _numpy_dtype(leaf.dtype)) for leaf in leaves]
            self.prepare(zeros[: self._num_fixed])
            found = self._rest(*self._prepared, *zeros[self._num_fixed :])
        except Exception as error:
            raise NotTranslatable(f"in numpy: {error}") from error
        finally:
            torch.set_rng_state(generator)
        (output,) = (node for node in graph.nodes if node.op == "output")
        for node, result in zip(output.args[0], found):
            value = node.meta["val"]
            if (result.shape, result.dtype) != (tuple(value.shape), _numpy_dtype(value.dtype)):
                raise NotTranslatable(f"{node.name} is {result.dtype}{list(result.shape)} in numpy")

    def _translate(self, graph: torch.fx.Graph) -> None:
        """Writes two functions: what depends on fixed leaves alone, and the rest."""
        constants: dict[str, Any] = {"asarray": np.asarray, "errstate": np.errstate}
        fixed: list[torch.fx.Node] = []
        inputs: list[torch.fx.Node] = []
        first: list[str] = []
        rest: list[str] = []

        def constant(value: Any) -> str:
            constants[f"_c{len(constants)}"] = value
            return f"_c{len(constants) - 1}"

        def written(argument: Any) -> str:
            if isinstance(argument, torch.fx.Node):
                return argument.name
            if isinstance(argument, (list, tuple)):
                return f"[{', '.join(map(written, argument))}]"
            return constant(argument)

        for node in graph.nodes:
            if node.op == "output":
                (results,) = node.args
            elif node.op == "call_function":
                line = f"{node.name} = {constant(_translate(node))}({', '.join(map(written, node.args))})"
                if node.all_input_nodes and set(fixed).issuperset(node.all_input_nodes) and not _is_random(node):
                    fixed.append(node)
                    first.append(line)
                else:
                    rest.append(line)
            elif node.users:
                (fixed if len(fixed) < self._num_fixed and not inputs else inputs).append(node)
        # numpy makes scalars of what has no dimensions.
        made = [f"asarray({node.name})" if node.meta["val"].ndim == 0 else node.name for node in results]
        self._first = _function(fixed[: self._num_fixed], first, [node.name for node in fixed], constants)
        self._rest = _function([*fixed, *inputs], rest, made, constants)


class _Recorder(TorchDispatchMode):
    """The operations of a function as a graph; an operation in place becomes the one that makes a new tensor."""

    def __init__(self, arguments: list[torch.Tensor]):
        super().__init__()
        self._graph = torch.fx.Graph()
        self._nodes: dict[int, tuple[torch.fx.Node, torch.Tensor]] = {}  # by the tensor's id; it lives as long as that
        self._sharers: dict[int, list[torch.Tensor]] = {}  # the tensors that lie in a storage
        for k, argument in enumerate(arguments):
            self._keep(self._graph.placeholder(f"argument_{k}"), argument)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else the first call imports all of it

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        result = function(*arguments, **(keywords or {}))
        if function is aten.detach.default:  # the same numbers under another name
            self._keep(self._traced(arguments[0]), result)
            return result
        is_written = function._schema.is_mutable
        target = self._made_new(function, arguments[0]) if is_written else function
        traced = self._graph.call_function(target, *nest.map(self._traced, (tuple(arguments), dict(keywords or {}))))
        traced.meta["val"] = result
        if is_written:
            for sharer in self._sharers[_storage(result)]:
                self._nodes[id(sharer)] = traced, sharer
        elif isinstance(result, torch.Tensor):
            self._keep(traced, result)
        elif isinstance(result, (list, tuple)):
            for k, part in enumerate(result):
                self._keep(self._graph.call_function(operator.getitem, (traced, k)), part)
        else:
            raise NotTranslatable(f"{function} looks at values")
        return result

    def finish(self, results: list[Any]) -> torch.fx.Graph:
        self._graph.output([self._traced(result) for result in results])
        self._graph.eliminate_dead_code(lambda node: node.is_impure() or _is_random(node))
        return self._graph

    def _keep(self, node: torch.fx.Node, value: torch.Tensor) -> None:
        node.meta["val"] = value
        self._nodes[id(value)] = node, value
        self._sharers.setdefault(_storage(value), []).append(value)

    def _traced(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in self._nodes:
            raise NotTranslatable("a tensor that is no argument")
        return self._nodes[id(value)][0]

    def _made_new(self, function: Any, written: torch.Tensor) -> Any:
        """The operation without the underscore, if nobody sees a part of what this one writes."""
        name = function._schema.name.removeprefix("aten::")
        packet = getattr(aten, name.removesuffix("_"), None) if name.endswith("_") else None
        overload = getattr(packet, function._overloadname, None)
        if overload is None or self._traced(written).op == "placeholder":
            raise NotTranslatable(f"{function} writes what it is given")
        for sharer in self._sharers[_storage(written)]:
            if (sharer.shape, sharer.stride(), sharer.storage_offset()) != (
                written.shape,
                written.stride(),
                written.storage_offset(),
            ):
                raise NotTranslatable(f"{function} writes what other tensors see a part of")
        return overload


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


@contextlib.contextmanager
def _unreadable() -> Iterator[None]:
    """Refuses looks at values that a dispatch mode does not see (it does see `item`, `float` and `bool`)."""

    def refuse(tensor: torch.Tensor, *arguments: Any, **keywords: Any) -> None:
        raise NotTranslatable("looks at values")

    torch.Tensor.numpy = torch.Tensor.tolist = refuse  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        del torch.Tensor.numpy, torch.Tensor.tolist  # those of the base class show again


def _function(
    arguments: list[torch.fx.Node], lines: list[str], results: list[str], constants: dict[str, Any]
) -> Callable[..., list[np.ndarray]]:
    """A Python function of these lines: an interpreter's loop over them would take a third of the time."""
    source = [f"def run({', '.join(node.name for node in arguments)}):"]
    source.append("    with errstate(all='ignore'):")  # torch says nothing of a logarithm of 0 either
    source += [f"        {line}" for line in lines]
    source.append(f"        return [{', '.join(results)}]")
    names = dict(constants)
    exec("\n".join(source), names)
    return names["run"]


def _translate(node: torch.fx.Node) -> Callable[..., Any]:
    if node.target in OUTPUTS_OF_SEVERAL:
        return OUTPUTS_OF_SEVERAL[node.target]
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        raise NotTranslatable(f"{node.target}")
    shape, dtype = tuple(value.shape), _numpy_dtype(value.dtype)
    if _is_random(node):
        return _random(node, value)
    make = TABLE.get(node.target)
    if make is None:
        raise NotTranslatable(f"{node.target} has no translation")
    if node.kwargs and (make not in MADE_LIKE or node.kwargs.keys() - LAYOUT):
        raise NotTranslatable(f"{node.target} with {dict(node.kwargs)}")
    function = make(node, shape)
    inputs = {x.meta["val"].dtype for x in node.all_input_nodes if isinstance(x.meta.get("val"), torch.Tensor)}
    if inputs <= {value.dtype} and node.target not in CASTS:
        return function
    if node.target in COMPARISONS and len(inputs) > 1:
        common = _numpy_dtype(torch.result_type(*(x.meta["val"] for x in node.args)))  # type: ignore[union-attr, arg-type]
        return lambda a, b: np.asarray(function(a.astype(common), b.astype(common)))
    # numpy would promote 0-d arrays, and torch does not.
    return lambda *arguments: np.asarray(function(*arguments)).astype(dtype, copy=False)


def _numpy_dtype(dtype: torch.dtype) -> np.dtype:
    try:
        return torch.empty(0, dtype=dtype).numpy().dtype
    except TypeError as error:
        raise NotTranslatable(f"numpy has no {dtype}") from error


RANDOM = {
    aten.rand.default: lambda shape, dtype: torch.rand(shape, dtype=dtype),
    aten.rand_like.default: lambda shape, dtype: torch.rand(shape, dtype=dtype),
    aten.randn.default: lambda shape, dtype: torch.randn(shape, dtype=dtype),
    aten.randn_like.default: lambda shape, dtype: torch.randn(shape, dtype=dtype),
    aten.exponential.default: lambda shape, dtype: torch.empty(shape, dtype=dtype).exponential_(),
}


def _is_random(node: torch.fx.Node) -> bool:
    return node.target in RANDOM or node.target is aten.randint_like.default


def _random(node: torch.fx.Node, value: torch.Tensor) -> Callable[..., Any]:
    shape, dtype = tuple(value.shape), value.dtype
    if not value.is_contiguous():
        raise NotTranslatable(f"{node.target} in another order than that of rows")
    if node.kwargs.keys() - LAYOUT or (node.target is aten.exponential.default and len(node.args) > 1):
        raise NotTranslatable(f"{node.target} with {node.args[1:]} and {dict(node.kwargs)}")
    if node.target is aten.randint_like.default:
        return lambda like, high: torch.randint(high, shape, dtype=dtype).numpy()
    draw = RANDOM[node.target]  # type: ignore[index]
    return lambda *arguments: draw(shape, dtype).numpy()


def _ufunc(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda node, shape: function


def _reshape(node: torch.fx.Node, shape: tuple[int, ...]) -> Callable[..., Any]:
    return lambda x, *rest: x.reshape(shape)


def _broadcast(node: torch.fx.Node, shape: tuple[int, ...]) -> Callable[..., Any]:
    return lambda x, *rest: np.broadcast_to(x, shape)


def _product(node: torch.fx.Node, shape: tuple[int, ...]) -> Callable[..., Any]:
    *_, left, right = node.args
    rows, inner = left.meta["val"].shape  # type: ignore[union-attr]
    size = rows * inner * right.meta["val"].shape[-1]  # type: ignore[union-attr]
    is_small = size <= (SMALL_PRODUCT if rows > 1 else SMALL_VECTOR_PRODUCT)
    if len(node.args) == 3:
        if is_small:
            return lambda bias, a, b: np.matmul(a, b) + bias
        return lambda bias, a, b: torch.addmm(_tensor(bias), _tensor(a), _tensor(b)).numpy()
    if is_small:
        return np.matmul
    return lambda a, b: torch.mm(_tensor(a), _tensor(b)).numpy()


def _tensor(array: Any) -> torch.Tensor:
    array = np.asarray(array)
    return torch.from_numpy(array if array.flags.writeable else array.copy())  # a broadcast one is not


def _slice(x: np.ndarray, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> np.ndarray:
    return x[(slice(None),) * (dim % x.ndim) + (slice(start, end, step),)]


def _select(x: np.ndarray, dim: int, index: int) -> np.ndarray:
    return x[(slice(None),) * (dim % x.ndim) + (index,)]


def _split(x: np.ndarray, sizes: int | list[int], dim: int = 0) -> list[np.ndarray]:
    bounds = range(sizes, x.shape[dim], sizes) if isinstance(sizes, int) else np.cumsum(sizes)[:-1]
    return np.split(x, bounds, dim)


def _clamp(x: Any, low: Any = None, high: Any = None) -> Any:
    x = x if low is None else np.maximum(x, low)
    return x if high is None else np.minimum(x, high)


def _arg_max(x: np.ndarray, dim: int | None = None, keepdim: bool = False) -> Any:
    return np.argmax(x, dim, keepdims=keepdim)


def _over(function: Callable[..., Any]) -> Callable[..., Any]:
    def reduce(x: np.ndarray, dim: Any = None, keepdim: bool = False) -> Any:
        return function(x, axis=tuple(dim) if dim else None, keepdims=keepdim)  # of no dimension means of all

    return _ufunc(reduce)


def _log_softmax(x: np.ndarray, dim: int, half_to_float: bool) -> np.ndarray:
    shifted = x - x.max(dim, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(dim, keepdims=True))


def _softmax(x: np.ndarray, dim: int, half_to_float: bool) -> np.ndarray:
    exponent = np.exp(x - x.max(dim, keepdims=True))
    return exponent / exponent.sum(dim, keepdims=True)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-1.0 * x))


def _softplus(x: np.ndarray, beta: float = 1.0, threshold: float = 20.0) -> np.ndarray:
    return np.logaddexp(beta * x, 0) / beta


def _gather(x: np.ndarray, dim: int, index: np.ndarray) -> np.ndarray:
    dim %= x.ndim
    kept = tuple(slice(None if axis == dim else size) for axis, size in enumerate(index.shape))
    return np.take_along_axis(x[kept], index, dim)


def _filled(node: torch.fx.Node, shape: tuple[int, ...]) -> Callable[..., Any]:
    value = node.meta["val"]
    dtype = torch.empty(0, dtype=value.dtype).numpy().dtype
    if node.target in (aten.full.default, aten.full_like.default):
        return lambda like, fill: np.full(shape, fill, dtype)
    if node.target is aten.scalar_tensor.default:
        return lambda fill: np.full(shape, fill, dtype)
    fill = 1 if node.target in (aten.ones.default, aten.ones_like.default) else 0
    return lambda *rest: np.full(shape, fill, dtype)


OUTPUTS_OF_SEVERAL: dict[Any, Callable[..., Any]] = {
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.unbind.int: lambda x, dim=0: list(np.moveaxis(x, dim, 0)),
    operator.getitem: lambda parts, index: parts[index],
}
CASTS = {aten._to_copy.default}
COMPARISONS = {aten.lt.Tensor, aten.le.Tensor, aten.gt.Tensor, aten.ge.Tensor, aten.eq.Tensor, aten.ne.Tensor}
# Keywords that the traced result's dtype says already, for operations that make an array.
LAYOUT = {"dtype", "layout", "device", "pin_memory", "memory_format"}
_same, _copied = _ufunc(lambda x: x), _ufunc(lambda x: np.array(x))
MADE_LIKE = {_filled, _same, _copied}
TABLE: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((aten.mm.default, aten.addmm.default), _product),
    **dict.fromkeys((aten.view.default, aten._unsafe_view.default, aten.unsqueeze.default, aten.squeeze.default,
                     aten.squeeze.dim, aten.squeeze.dims), _reshape),
    aten.expand.default: _broadcast,
    **dict.fromkeys((aten.full.default, aten.full_like.default, aten.scalar_tensor.default, aten.zeros.default,
                     aten.zeros_like.default, aten.ones.default, aten.ones_like.default, aten.empty_like.default,
                     aten.empty.memory_format), _filled),
    **dict.fromkeys((aten._to_copy.default, aten.alias.default), _same),
    aten.clone.default: _copied,
    aten.t.default: _ufunc(lambda x: x.T),
    aten.transpose.int: _ufunc(np.swapaxes),
    aten.permute.default: _ufunc(lambda x, dims: np.transpose(x, dims)),
    aten.slice.Tensor: _ufunc(_slice),
    aten.select.int: _ufunc(_select),
    aten.cat.default: _ufunc(lambda parts, dim=0: np.concatenate(parts, dim)),
    aten.stack.default: _ufunc(lambda parts, dim=0: np.stack(parts, dim)),
    **{op: _ufunc(function) for op, function in dict[Any, Callable[..., Any]]({
        aten.add.Tensor: np.add, aten.sub.Tensor: np.subtract, aten.mul.Tensor: np.multiply,
        aten.div.Tensor: np.true_divide, aten.neg.default: np.negative, aten.abs.default: np.abs,
        aten.exp.default: np.exp, aten.log.default: np.log, aten.sqrt.default: np.sqrt, aten.tanh.default: np.tanh,
        aten.pow.Tensor_Scalar: np.power, aten.sigmoid.default: _sigmoid,
        aten.relu.default: lambda x: np.maximum(x, 0), aten.clamp.default: _clamp, aten.clamp.Tensor: _clamp,
        aten.silu.default: lambda x: x * _sigmoid(x), aten.rsub.Scalar: lambda x, y, alpha=1: y - alpha * x,
        aten.softplus.default: _softplus,
        aten.clamp_min.default: np.maximum, aten.clamp_max.default: np.minimum,
        aten.minimum.default: np.minimum, aten.maximum.default: np.maximum,
        aten.where.self: np.where,
        aten.lt.Tensor: np.less, aten.lt.Scalar: np.less, aten.le.Tensor: np.less_equal, aten.le.Scalar: np.less_equal,
        aten.gt.Tensor: np.greater, aten.gt.Scalar: np.greater, aten.ge.Tensor: np.greater_equal,
        aten.ge.Scalar: np.greater_equal, aten.eq.Tensor: np.equal, aten.eq.Scalar: np.equal,
        aten.ne.Tensor: np.not_equal, aten.ne.Scalar: np.not_equal, aten.logical_not.default: np.logical_not,
        aten.bitwise_not.default: np.invert, aten.bitwise_and.Tensor: np.bitwise_and,
        aten.bitwise_or.Tensor: np.bitwise_or, aten.logical_and.default: np.logical_and,
        aten.argmax.default: _arg_max, aten._log_softmax.default: _log_softmax, aten._softmax.default: _softmax,
    }).items()},
    aten.sum.dim_IntList: _over(np.sum),
    aten.mean.dim: _over(np.mean),
    aten.amax.default: _over(np.max),
    aten.amin.default: _over(np.min),
    aten.gather.default: _ufunc(_gather),
}  # fmt: skip
