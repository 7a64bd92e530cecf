"""Translates a function of small CPU tensors to a Python function of numpy calls.

A policy's step consists of many operations on few numbers. For such operations, torch's dispatch takes longer than the
computation. So the function is recorded once on tensors of zeros, and each operation becomes one numpy call, at a tenth
of the cost. Arrays share the tensors' memory. Torch draws the random numbers, in the same order.
"""

import contextvars
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from alfish import nest
from alfish.compiler.numpy_operations import (
    TABLE,
    NotTranslatable,
    align_biases,
    equalize_compared,
    numpy_dtype,
    operand,
    translated,
)
from alfish.compiler.torch_internals import TorchChanged
from alfish.compiler.tracer import is_random, record
from alfish.nest import Nest


class NumpyProgram:
    """A numpy translation of `function` for arguments of one layout; the program does not modify its arguments.

    Args:
      function: function that maps a nest of CPU tensors to a nest of tensors.
      arguments: example arguments with the structure, shapes and dtypes of later calls.
      num_fixed: number of leading leaves of the arguments whose values change only before a call of `prepare`.

    Raises:
      NotTranslatable: an operation is not in the table, or the function cannot be recorded.
      TorchChanged: this release of torch lacks a private name that alfish uses.

    Attributes:
      used: indices of the argument leaves that the program reads.
    """

    def __init__(self, function: Callable[[Nest], Nest], arguments: Nest, num_fixed: int = 0):
        leaves, structure = nest.flatten(arguments)
        if any(leaf.device.type != "cpu" for leaf in leaves):
            raise NotTranslatable("a tensor is not on the CPU")

        generator = torch.get_rng_state()  # restored below, because recording draws random numbers
        # Each leaf gets a new tensor, because a tensor that occurs twice would become a single argument.
        zeros = [torch.zeros_like(leaf) for leaf in leaves]

        def flat(leaves: list[torch.Tensor]) -> list[Any]:
            results, self._structure = nest.flatten(function(nest.unflatten(structure, leaves)))
            return results

        try:
            graph = record(flat, zeros)
            prepare_graph(graph)
        except TorchChanged:
            raise
        except Exception as error:
            raise NotTranslatable(f"recording failed: {error}") from error
        finally:
            torch.set_rng_state(generator)
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        self.used = [index for index, node in enumerate(placeholders) if node.users]
        self._num_fixed = sum(index < num_fixed for index in self.used)
        self._first, self._rest = compiled(written(graph, self._num_fixed, self._structure))
        self._try(graph, [leaves[index] for index in self.used])

    def prepare(self, leaves: list[np.ndarray]) -> None:
        """Computes all values that depend on fixed leaves only. `leaves` are the leaves in `used` that are fixed."""
        self._prepared = self._first(*leaves)

    def __call__(self, leaves: list[np.ndarray]) -> Nest:
        """Returns the function's results, a nest of arrays. `leaves` are the leaves in `used` that are not fixed."""
        return self._rest(*self._prepared, *leaves)

    def _try(self, graph: torch.fx.Graph, leaves: list[torch.Tensor]) -> None:
        """Runs the program once on zeros; raises NotTranslatable if it fails, or if a shape or dtype is not torch's."""
        generator = torch.get_rng_state()
        try:
            zeros = [np.zeros(tuple(leaf.shape), numpy_dtype(leaf.dtype)) for leaf in leaves]
            self.prepare(zeros[: self._num_fixed])
            found = nest.leaves(self._rest(*self._prepared, *zeros[self._num_fixed :]))
        except Exception as error:
            raise NotTranslatable(f"in numpy: {error}") from error
        finally:
            torch.set_rng_state(generator)
        (output,) = (node for node in graph.nodes if node.op == "output")
        for node, result in zip(output.args[0], found):
            value = node.meta["val"]
            if (result.shape, result.dtype) != (tuple(value.shape), numpy_dtype(value.dtype)):
                raise NotTranslatable(f"{node.name} is {result.dtype}{list(result.shape)} in numpy")


class Written(NamedTuple):
    """Source code of a translated graph, split into two functions.

    Attributes:
      first: code of the first function, which maps the fixed leaves to the values that the second function reads.
      rest: code of the second function, which maps these values and the other leaves to the results.
      constants: functions and plain values that the code uses, by name.
    """

    first: list[str]
    rest: list[str]
    constants: dict[str, Any]


def prepare_graph(graph: torch.fx.Graph) -> None:
    """Adds casts and dimensions to a graph, so that numpy's results equal torch's and numpy is faster."""
    equalize_compared(graph)
    align_biases(graph)


def written(
    graph: torch.fx.Graph, num_fixed: int, structure: Any, table: Mapping[Any, Callable[..., Any]] = TABLE
) -> Written:
    """Translates a graph to two functions, of which the first computes the values that depend on fixed leaves only.

    Args:
      graph: graph that `prepare_graph` has changed.
      num_fixed: number of leading placeholders that are fixed, without counting placeholders that are not used.
      structure: structure of the nest of results.
      table: translations of operations, see `numpy_operations.translated`.

    Raises:
      NotTranslatable: an operation is not in the table.
    """
    constants: dict[str, Any] = {"asarray": np.asarray}
    fixed: list[torch.fx.Node] = []
    inputs: list[torch.fx.Node] = []
    read: set[torch.fx.Node] = set()  # nodes whose values the second function uses
    first: list[str] = []
    rest: list[str] = []

    def constant(value: Any) -> str:
        constants[f"_c{len(constants)}"] = value
        return f"_c{len(constants) - 1}"

    def named(argument: Any, node: torch.fx.Node) -> str:
        if isinstance(argument, torch.fx.Node):
            return argument.name
        if isinstance(argument, (list, tuple)):
            return f"[{', '.join(named(part, node) for part in argument)}]"
        return constant(operand(node, argument))

    needed = _needed(graph)
    for node in graph.nodes:
        if node.op == "output":
            (results,) = node.args
        elif node.op == "call_function":
            if node not in needed:
                continue
            # A random operation uses only a tensor's shape, which is known.
            arguments = [None if is_random(node) and isinstance(x, torch.fx.Node) else x for x in node.args]
            call, names = translated(node, table), [named(x, node) for x in arguments]
            value = call.format(*names) if isinstance(call, str) else f"{constant(call)}({', '.join(names)})"
            line = f"{node.name} = {value}"
            if node.all_input_nodes and set(fixed).issuperset(node.all_input_nodes) and not is_random(node):
                fixed.append(node)
                first.append(line)
            else:
                rest.append(line)
                read.update(() if is_random(node) else node.all_input_nodes)
        elif node.users:
            (fixed if len(fixed) < num_fixed and not inputs else inputs).append(node)
    # `asarray` is needed because numpy returns scalars instead of 0-d arrays.
    made = [f"asarray({node.name})" if node.meta["val"].ndim == 0 else node.name for node in results]
    result = _nested(nest.unflatten(structure, made), constant)
    prepared = [node for node in fixed if node in read.union(results)]
    return Written(
        _lines(fixed[:num_fixed], first, f"[{_names(prepared)}]"),
        _lines([*prepared, *inputs], rest, result),
        constants,
    )


def _needed(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """Returns the nodes that results depend on, and all random nodes, because they advance the generator."""
    needed: set[torch.fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op == "output" or node in needed or is_random(node):
            needed.add(node)
            needed.update(() if is_random(node) else node.all_input_nodes)
    return needed


def _names(nodes: list[torch.fx.Node]) -> str:
    return ", ".join(node.name for node in nodes)


def _nested(results: Nest, constant: Callable[[Any], str]) -> str:
    """Returns a Python expression that builds a nest, because `nest.unflatten` takes as long as a matrix product.

    Args:
      results: nest of expressions.
      constant: function that returns a name for a value.
    """
    if results is None or isinstance(results, str):
        return str(results)
    if type(results) is dict:
        return f"{{{', '.join(f'{constant(key)}: {_nested(part, constant)}' for key, part in results.items())}}}"
    parts = "".join(f"{_nested(part, constant)}, " for part in results)
    if type(results) is list:
        return f"[{parts}]"
    return f"({parts})" if type(results) is tuple else f"{constant(type(results))}({parts})"


def _lines(arguments: list[torch.fx.Node], lines: list[str], result: str) -> list[str]:
    return [f"def run({_names(arguments)}):", *[f"    {line}" for line in lines], f"    return {result}"]


def compiled(source: Written) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns the two functions as compiled Python. A loop over recorded calls would take 1.5 times as long."""
    functions = []
    for lines in (source.first, source.rest):
        names = dict(source.constants)
        exec("\n".join(lines), names)
        functions.append(quiet(names["run"]))
    return functions[0], functions[1]


def quiet(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function with numpy's warnings disabled, because torch does not warn about log(0) either.

    The result must not be called from two threads at the same time.
    """
    context = contextvars.copy_context()
    with np.errstate():
        context.run(np.seterr, all="ignore")
    if context.run(np.geterr)["divide"] == "ignore":  # numpy 2 keeps the setting in a context, which costs no time
        return functools.partial(context.run, function)
    return np.errstate(all="ignore")(function)
