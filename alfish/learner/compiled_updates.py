"""Compiled updates: one graph computes an update, from the algorithm's hooks to the optimizer step.

Each layout of batches (their structure, shapes and dtypes) has a separate graph.
"""

import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from absl import logging

from alfish import nest
from alfish.algorithms.contract import kind_of
from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.compiler import matmul, torch_internals
from alfish.compiler.background import BackgroundCompiler, Compilation
from alfish.compiler.cuda_graphs import RecordedFunction
from alfish.compiler.inductor import CompiledFunction, NotCompilable, is_checked
from alfish.data import Batch
from alfish.errors import RunError, UsageError
from alfish.learner.batches import Minibatches, take
from alfish.learner.traced_update import TracedUpdate
from alfish.learner.updates import Updates, UpdateStats, over_learners
from alfish.nest import Nest
from alfish.processes import replicas
from alfish.replay import ReplayView
from alfish.runs import random_state

# Number of first calls of a graph that are not recorded, because they load kernels and let libraries allocate memory.
CALLS_BEFORE_RECORDING = 3
SLOWER = 1.1  # ratio of bfloat16's time to float32's time above which bfloat16 is reported as slower


class CompiledUpdates:
    """Makes the same updates as `Updates`, with one graph for each layout of batches and each `graph_key`.

    Tracing turns Python values that a hook reads into constants. A graph is wrong if such a value changes later. So
    some calls (`is_checked`) compare the graph's losses with the losses of the plain update.

    Args:
      updates: plain updates; compiled updates use the same parameters, optimizers and counters.
      precision: `Learner.precision`.
      records: whether to record each graph as a CUDA graph; has no effect on a CPU or with several learners.
      log: function that is called with messages about each new graph.
    """

    def __init__(
        self, updates: Updates, precision: str, records: bool = False, log: Callable[[str], Any] = logging.info
    ):
        self._plain, self._precision = updates, "bfloat16" if precision == "bfloat16" else "float32"
        self._log = log
        self._records = records and not updates.on_cpu and not replicas.is_joined()
        self._tolerance = 1e-3 if precision == "float32" else 0.1
        self._made: dict[Hashable, _Graph] = {}
        self._background = BackgroundCompiler()
        self._requested: dict[Hashable, Compilation] = {}
        self._last: Any = None  # the last chunk's source
        self._source: Any = None  # the last chunk's source, or its copy in the memory that a recorded graph reads
        self._rows: list[torch.Tensor] = []  # leaves of `_source`
        _check_key(updates.algorithm)
        self._layouts: dict[Hashable, int] = {}  # a number for each layout, because hashing a layout takes microseconds
        self._layout = 0
        self._held: dict[Hashable, list[torch.Tensor]] = {}  # leaves of the copied rows, by layout
        self._update = TracedUpdate(updates)
        self._optimizers, self._tensors = self._update.optimizers, self._update.tensors
        self._leaves = nest.leaves(self._tensors)
        # The coefficients are in host memory, and are written before each call.
        self._coefficients = torch.zeros(self._update.num_coefficients)
        self._numbers = self._coefficients.numpy()

    def __call__(
        self, chunk: Minibatches, index: Nest, learning_rate: Mapping[str, float], summarize: bool
    ) -> UpdateStats | None:
        """Makes an update on a minibatch; see `Updates`. A graph always computes `extra`.

        Raises:
          NotCompilable, TorchChanged: the update cannot be compiled, and has changed nothing; use plain updates.
        """
        plain = self._plain
        chunk, index = steady(chunk, index)
        source, at, key = self._located(chunk, index)
        graph = self._made.get(key)
        if graph is None:
            graph = self._made[key] = self._make_by_all(source, index)
        total = self._compare(graph, source, index, at) if is_checked(graph.num_calls) else None
        graph.num_calls += 1
        coefficients: list[float] = []
        for name, optimizer in self._optimizers.items():
            coefficients += optimizer.coefficients(learning_rate[name])
        self._numbers[:] = coefficients
        result = self._run(graph, [self._here(self._coefficients), *at], total)
        stops = result["stop"]
        if stops is not None:
            if plain.on_cpu and stops:
                return None
            plain.project(graph.trained)
        if not plain.on_cpu or not plain.num_consecutive_skips():  # on a CPU, Adam does not count a skipped step
            for name in graph.trained:
                for part, _ in plain.groups[name].parts:
                    self._optimizers[part].count()
        stats = UpdateStats(graph.trained, result["total"], result["extra"], result["priority"])
        return stats if plain.on_cpu or stops is None else plain.unless_stopped(stats, stops)

    def request(self, chunk: Minibatches, index: Nest) -> None:
        """Begins to compile the graph for a minibatch in another process, unless the graph was requested before.

        Args:
          chunk, index: chunk and index that `steady` returns.

        Raises:
          NotCompilable, NotSendable: the update cannot be compiled, or cannot be sent to another process.
        """
        source, _, key = self._located(chunk, index)
        if key not in self._requested:
            self._update.check()
            arguments = self._tensors, self._here(self._coefficients), index, source
            self._requested[key] = self._background.request(self._update, arguments, self._precision)

    @property
    def is_ready(self) -> bool:
        """True if `finish_requests` returns without waiting."""
        return all(compilation.is_ready for compilation in self._requested.values())

    def wait(self) -> None:
        """Waits until `is_ready`."""
        for compilation in self._requested.values():
            compilation.wait()

    def finish_requests(self) -> float:
        """Loads all requested graphs; returns the seconds for which the other process compiled.

        Raises:
          NotCompilable, TorchChanged: a graph could not be compiled.
        """
        self._judge_precision()
        seconds = 0.0
        for key, compilation in self._requested.items():
            made = compilation.result()
            self._made[key] = _Graph(made.function, made.notes)
            seconds += made.seconds
        return seconds

    def close(self) -> None:
        """Ends the other process if there is one, and forgets all requests."""
        self._background.close()
        self._requested.clear()

    def forget_batch(self) -> None:
        """Releases the last chunk's rows, unless they belong to a replay ring."""
        if isinstance(self._source, Batch):
            self._last = None
            self._source = None
            self._rows = []

    def _located(self, chunk: Minibatches, index: Nest) -> tuple[Batch | ReplayView, list[torch.Tensor], Hashable]:
        """Returns the rows of a chunk, the leaves of its index, and the key of the graph for rows and index."""
        if chunk.source is not self._last:
            holds = self._records and isinstance(chunk.source, Batch)  # the rows of a ring stay where they are
            self._last, self._source = chunk.source, self._hold(chunk.source) if holds else chunk.source
            self._rows, structure = nest.flatten(self._source)
            # The structure is part of the key, because two hooks may prepare rows of the same shapes, but return infos
            # of different types.
            layout = structure, *((leaf.dtype, leaf.shape, leaf.stride()) for leaf in self._rows)
            self._layout = self._layouts.setdefault(layout, len(self._layouts))
        at = nest.leaves(index)
        return self._source, at, (self._plain.algorithm.graph_key(), *[leaf.shape for leaf in at], self._layout)

    def _hold(self, source: Nest) -> Nest:
        """Copies rows into memory that all chunks of the same layout share; returns the copy."""
        rows, structure = nest.flatten(source)
        layout = tuple((row.dtype, row.shape) for row in rows)
        held = self._held.get(layout)
        if held is None:
            held = [torch.empty(row.shape, dtype=row.dtype, device=row.device) for row in rows]
            self._held[layout] = held
        for own, row in zip(held, rows, strict=True):
            own.copy_(row)
        return nest.unflatten(structure, held)

    def _run(self, graph: "_Graph", given: list[torch.Tensor], total: torch.Tensor | None) -> Nest:
        """Runs the graph, or its CUDA graph once recorded, and returns the results.

        Args:
          given: coefficients and index of the call.
          total: expected `total`, if this call is checked; None otherwise.

        Raises:
          RunError: the CUDA graph's `total` is not close to the expected `total`.
        """
        rows = self._rows

        def call(given: list[torch.Tensor]) -> Nest:
            result = graph.function.call_flat([*self._leaves, *given, *rows])
            if result["stop"] is None:  # a CUDA graph records projections, too
                self._plain.project(graph.trained)
            return result

        if graph.recorded is None:
            if not self._records or graph.num_calls <= CALLS_BEFORE_RECORDING:
                return call(given)
            graph.recorded = RecordedFunction(call, given)
        result = graph.recorded(given)
        if total is not None and not self._is_close(result["total"], total):
            raise RunError(
                f"losses and norms of the CUDA graph are {result['total'].tolist()}, but those of the compiled update "
                f"are {total.tolist()}; set Learner.cuda_graphs = False"
            )
        return result

    def _make_by_all(self, source: Batch | ReplayView, index: Nest) -> "_Graph":
        """Returns a new graph; raises an error in every learner if one of them cannot compile it.

        Otherwise learners with plain updates and learners with compiled updates would wait for each other forever.
        """
        failure: Exception | None = None
        try:
            graph = self._make(source, index)
        except (NotCompilable, torch_internals.TorchChanged) as error:
            failure = error
        if any(failed for (failed,) in replicas.gather(failure is not None)):
            raise failure or NotCompilable("another learner could not compile it")
        return graph

    def _make(self, source: Batch | ReplayView, index: Nest) -> "_Graph":
        self._update.check()
        name, began = type(self._plain.algorithm).__name__, time.perf_counter()
        self._log(f"Compiling the update of {name}; training waits")
        arguments = self._tensors, self._here(self._coefficients), index, source
        function = CompiledFunction(self._update, arguments, self._precision)
        self._log(f"Compiled the update of {name} in {time.perf_counter() - began:.1f} s")
        self._judge_precision()
        return _Graph(function, self._update.notes)

    def _judge_precision(self) -> None:
        """Logs a message if bfloat16 is slower on this processor; only for the first graph."""
        if self._precision == "float32" or self._made or not self._plain.on_cpu:
            return
        if matmul.bfloat16_cost() > SLOWER:
            self._log(
                f"On this processor a large product takes {matmul.bfloat16_cost():.1f} times as long in bfloat16 as in "
                "float32; Learner.precision = 'float32' is faster"
            )

    def _compare(
        self, graph: "_Graph", source: Batch | ReplayView, index: Nest, at: list[torch.Tensor]
    ) -> torch.Tensor:
        """Returns the graph's `total`; raises NotCompilable if the graph's losses differ from the plain losses.

        The graph and the plain update write to copies of the tensors. So the comparison changes no parameter, and no
        running statistic of BatchNorm.
        """
        plain, algorithm = self._plain, self._plain.algorithm
        buffers = {name: buffer.clone() for name, buffer in algorithm.named_buffers()}
        with random_state.preserved():
            batch = take(source, index)  # `take` may draw random numbers, as the graph does
            # Gradients are enabled, because a hook may compute gradients.
            with torch.enable_grad(), torch_internals.reparametrize_module(algorithm, buffers, tie_weights=True):
                means, _ = plain.means(batch)
        losses = over_learners(means, {})[0].losses
        expected = torch.stack([loss.detach() for loss in losses.values()])
        copies = [leaf.clone() for leaf in self._leaves]
        coefficients = self._here(torch.ones_like(self._coefficients))
        with random_state.preserved():
            total = graph.function.call_flat([*copies, coefficients, *at, *self._rows])["total"]
        if list(losses) != graph.trained or not self._is_close(total[: len(expected)], expected):
            raise NotCompilable(
                f"its compiled losses {graph.trained} are {total[: len(graph.trained)].tolist()}, but its uncompiled "
                f"losses {list(losses)} are {expected.tolist()}: train_step or calc_loss depends on a value that "
                "changes between updates; make this value a buffer, or return it from `graph_key`"
            )
        return total

    def _is_close(self, found: torch.Tensor, expected: torch.Tensor) -> bool:
        return torch.allclose(found, expected, self._tolerance, self._tolerance, equal_nan=True)

    def _here(self, numbers: torch.Tensor) -> torch.Tensor:
        # The host may overwrite `numbers` afterwards: a small copy from pageable memory is complete when the call
        # returns.
        return numbers if self._plain.on_cpu else numbers.to(self._plain.num_applied.device, non_blocking=True)


def steady(chunk: Minibatches, index: Nest) -> tuple[Minibatches, Nest]:
    """Returns a chunk that has the same shapes in every update, and the index of the minibatch in this chunk.

    If the shapes of chunks differ (`is_steady` is False), the result is a chunk that contains only the minibatch.
    """
    return (chunk, index) if chunk.is_steady else (Minibatches(take(chunk.source, index), None), None)


class _Graph:
    """A compiled update and the number of its calls.

    Attributes:
      function: function of (tensors, coefficients, index, source).
      trained: names of the groups with a loss, in order.
      num_calls: number of calls so far.
      recorded: CUDA graph that takes (coefficients, index); None before it is recorded.
    """

    def __init__(self, function: CompiledFunction, trained: list[str]):
        self.function = function
        self.trained = trained
        self.num_calls = 0
        self.recorded: RecordedFunction | None = None


def _check_key(algorithm: RLAlgorithm) -> None:
    """Raises UsageError if `graph_key` returns an unhashable object, or a tensor, which would never equal a key."""
    key = algorithm.graph_key()
    parts = key if isinstance(key, tuple) else (key,)
    if any(isinstance(part, torch.Tensor) or not isinstance(part, Hashable) for part in parts):
        raise UsageError(
            f"graph_key of {type(algorithm).__name__} returned {kind_of(key)}; it must return a plain value, such as "
            "int(...), or a tuple of plain values"
        )
