"""Records a function of tensors as a graph of operations.

The function runs once without gradients, and each operation is recorded. Torch's own tracers are not used, because
their import takes a second and 70 MB.
"""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from alfish import nest
from alfish.compiler import torch_internals

aten = torch.ops.aten


class NotRecordable(Exception):
    """Raised for a function that cannot be recorded; the message says why."""


def record(
    function: Callable[[list[torch.Tensor]], list[Any]],
    arguments: list[torch.Tensor],
    place: Callable[[], str] = str,
    captures: bool = False,
) -> torch.fx.Graph:
    """Returns the graph of `function(arguments)`, with a placeholder for each argument and a call for each operation.

    `meta["val"]` of a node is its value in this run. `meta["place"]` of a call is the result of `place`. Operations
    whose results are not used are removed, except random operations.

    Args:
      function: function that maps a list of tensors to a list of tensors.
      arguments: tensors to call the function with; they must not share memory.
      place: function that describes the code that is running, for messages, such as the name of a module.
      captures: whether tensors that the function reads besides its arguments become constants: calls of
        `aten.lift_fresh`, whose `meta["val"]` is the tensor.

    Raises:
      NotRecordable: the function reads a tensor's value or writes to an argument. If `captures` is False, also if the
        function reads a tensor that is not an argument.
      TorchChanged: this release of torch lacks a private name that alfish uses.
    """
    recorder = _Recorder(arguments, place, captures)
    with torch.no_grad(), _Unreadable(), torch_internals.dispatch_mode(recorder.receive):
        results = function(arguments)
    return recorder.finish(results)


def is_random(node: torch.fx.Node) -> bool:
    """Returns whether the operation draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


class _Recorder:
    """Builds a graph from operations; in-place operations become operations that return new tensors."""

    def __init__(self, arguments: list[torch.Tensor], place: Callable[[], str], captures: bool):
        self._place, self._captures = place, captures
        self._graph = torch.fx.Graph()
        # Nodes by the id of their tensor. Each tensor is kept, so that no other tensor gets the same id.
        self._nodes: dict[int, tuple[torch.fx.Node, torch.Tensor]] = {}
        self._sharers: dict[int, list[torch.Tensor]] = {}  # tensors by storage
        for k, argument in enumerate(arguments):
            self._keep(self._graph.placeholder(f"argument_{k}"), argument)

    def receive(self, function: Any, arguments: Any, keywords: Any) -> Any:
        """Runs an operation, adds it to the graph and returns its result."""
        result = function(*arguments, **keywords)
        if function is aten.detach.default:  # an alias
            self._keep(self._traced(arguments[0]), result)
            return result
        if function is aten.lift_fresh.default:  # a constant made from data of Python or numpy
            if id(result) not in self._nodes:
                self._keep(self._graph.call_function(function), result)
            return result
        is_written = torch_internals.schema(function).is_mutable
        target = self._made_new(function, arguments[0]) if is_written else function
        traced = self._graph.call_function(target, *nest.map(self._traced, (tuple(arguments), dict(keywords))))
        traced.meta["val"], traced.meta["place"] = result, self._place()
        if is_written:
            for sharer in self._sharers[torch_internals.storage_id(result)]:
                self._nodes[id(sharer)] = traced, sharer
        elif isinstance(result, torch.Tensor):
            self._keep(traced, result)
        elif isinstance(result, (list, tuple)):
            for k, part in enumerate(result):
                self._keep(self._graph.call_function(operator.getitem, (traced, k)), part)
        else:
            raise NotRecordable(f"{function} reads values of tensors")
        return result

    def finish(self, results: list[Any]) -> torch.fx.Graph:
        self._graph.output([self._traced(result) for result in results])
        self._graph.eliminate_dead_code(lambda node: node.is_impure() or is_random(node))
        return self._graph

    def _keep(self, node: torch.fx.Node, value: torch.Tensor) -> None:
        node.meta["val"] = value
        self._nodes[id(value)] = node, value
        self._sharers.setdefault(torch_internals.storage_id(value), []).append(value)

    def _traced(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in self._nodes:
            if not self._captures:
                raise NotRecordable("a tensor that is not an argument")
            self._keep(self._graph.call_function(aten.lift_fresh.default), value)
        return self._nodes[id(value)][0]

    def _made_new(self, function: Any, written: torch.Tensor) -> Any:
        """Returns the operation that computes the same as an in-place operation, but returns a new tensor.

        Raises:
          NotRecordable: the written memory may belong to the caller, or another tensor shares only a part of the
            memory.
        """
        overload = torch_internals.functional_overload(function)
        self._traced(written)  # this raises if the tensor is not in the graph
        sharers = self._sharers[torch_internals.storage_id(written)]
        if overload is None or any(_is_given(self._traced(sharer)) for sharer in sharers):
            raise NotRecordable(f"{function} writes to its arguments")
        for sharer in sharers:
            if (sharer.shape, sharer.stride(), sharer.storage_offset()) != (
                written.shape,
                written.stride(),
                written.storage_offset(),
            ):
                raise NotRecordable(f"{function} writes to memory that other tensors share")
        return overload


def _is_given(node: torch.fx.Node) -> bool:
    """Returns whether a tensor's memory may belong to the caller: the tensor is an argument, or made from an array."""
    return node.op == "placeholder" or node.target is aten.lift_fresh.default


class _Unreadable(TorchFunctionMode):
    """Raises NotRecordable if the function reads values of tensors in ways that a dispatch mode does not notice.

    A dispatch mode notices reads by `item` and `bool`. This mode applies to one thread only.
    """

    READERS = frozenset(("numpy", "tolist", "__float__", "__index__", "__array__", "__dlpack__", "__repr__"))
    # Operations that read the value of each tensor in a list.
    MAKERS = frozenset(("tensor", "as_tensor", "asarray", "new_tensor"))

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        keywords = keywords or {}
        name = getattr(function, "__name__", None)
        if name in self.READERS or (name in self.MAKERS and _lists_tensors(*arguments, *keywords.values())):
            raise NotRecordable("reads values of tensors")
        return function(*arguments, **keywords)


def _lists_tensors(*values: Any) -> bool:
    """Returns whether one of the values is a list or tuple that contains a tensor."""
    lists = [value for value in values if isinstance(value, (list, tuple))]
    return any(isinstance(leaf, torch.Tensor) for leaf in nest.leaves(lists))
