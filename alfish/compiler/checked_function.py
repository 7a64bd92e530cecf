"""A function of tensors that runs as a compiled graph while its results agree with those of plain Python."""

import time
from collections.abc import Callable
from typing import Any

import torch
from absl import logging

from alfish import nest
from alfish.compiler.inductor import CompiledFunction, NotCompilable, is_checked
from alfish.compiler.torch_internals import TorchChanged
from alfish.nest import Nest

# Fraction of a result's entries that must be close. It is below 1, because rounding may change a sampled action and all
# results that depend on the action.
LEAST_EQUAL = 0.99


class CheckedFunction:
    """A compiled `function(arguments)`, which can fall back to plain Python.

    The first call with new shapes of arguments compiles a graph. Tracing turns Python values that the function reads
    into constants. A graph is wrong if such a value changes later. So some calls (`is_checked`) compare the graph's
    results with those of plain Python. If the function cannot be compiled, or if the results differ, a warning is
    logged, and the function runs as plain Python from then on.

    Args:
      function: function that maps a nest of tensors to a nest of tensors, without side effects.
      name: description of the function that completes "Compiling ..." in the log.
      log: function that is called with messages about each graph.

    Attributes:
      is_plain: whether the function runs as plain Python; callers may set it.
      checks_next: whether the next call compares the results of the graph with those of the function. Callers set this
        attribute after they have changed a value that the function may read.
    """

    def __init__(self, function: Callable[[Nest], Nest], name: str, log: Callable[[str], Any] = logging.info):
        self._function, self._name, self._log = function, name, log
        self._graphs: dict[Any, CompiledFunction] = {}
        self._num_calls = 0
        self.is_plain = self.checks_next = False

    def __call__(self, arguments: Nest) -> Nest:
        """Returns the function's results for a nest of tensors. Gradients are disabled."""
        with torch.no_grad():
            if self.is_plain:
                return self._function(arguments)
            try:
                return self._by_graph(nest.map(torch.Tensor.contiguous, arguments))
            except (NotCompilable, TorchChanged) as error:
                logging.warning("%s runs as plain Python, which is slower: %s", self._name.capitalize(), error)
                self.is_plain = True
                return self._function(arguments)

    def _by_graph(self, arguments: Nest) -> Nest:
        leaves = nest.leaves(arguments)
        layout = tuple(leaf.shape for leaf in leaves)
        graph = self._graphs.get(layout)
        if graph is None:
            began = time.perf_counter()
            self._log(f"Compiling {self._name}; training waits")
            graph = self._graphs[layout] = CompiledFunction(self._function, arguments)
            self._log(f"Compiled {self._name} in {time.perf_counter() - began:.1f} s")
        if self.checks_next or is_checked(self._num_calls):
            self.checks_next = False
            self._compare(graph, arguments)
        self._num_calls += 1
        return graph.call_flat(leaves)

    def _compare(self, graph: CompiledFunction, arguments: Nest) -> None:
        devices = [leaf.device for leaf in nest.leaves(arguments) if leaf.device.type == "cuda"][:1]
        with torch.random.fork_rng(devices):
            expected = nest.leaves(self._function(arguments))
        with torch.random.fork_rng(devices):
            found = nest.leaves(graph(arguments))
        for a, b in zip(found, expected, strict=True):
            is_close = torch.isclose(a.double(), b.double(), 1e-3, 1e-4, equal_nan=True)
            if (a.dtype, a.shape) != (b.dtype, b.shape) or is_close.double().mean() < LEAST_EQUAL:
                raise NotCompilable(
                    "its compiled results differ from its uncompiled results, because a hook depends on a value that "
                    "changes between calls; make this value a buffer or a part of the state"
                )
