"""A learner's updates as graphs: from the hooks to the optimizer, one graph for each layout of batches."""

from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np
import torch
from absl import logging
from torch.nn.utils.stateless import _reparametrize_module

from alfish import nest
from alfish.batches import Chunk, take
from alfish.checkpoint import rng_state, set_rng_state
from alfish.compiled import CompiledFunction, NotCompilable, is_checked
from alfish.data import Batch
from alfish.nest import Nest
from alfish.replay import StoredRows
from alfish.updates import Record, Updates, extra_sums


class CompiledUpdates:
    """The same as `updates`, by one graph for each layout of batches and each kind of update.

    Now and then (`is_checked`) a graph's losses are compared with the plain update's: a hook that is not pure may
    depend on something that tracing took for constant.

    Args:
      updates: the plain ones, whose parameters, optimizers and books these share.
      precision: see `CompiledFunction`.
    """

    def __init__(self, updates: Updates, precision: str):
        self._plain, self._precision = updates, precision
        self._tolerance = 1e-3 if precision == "float32" else 0.1
        self._made: dict[Hashable, _Graph] = {}
        self._source: Any = None  # of the last chunk
        self._rows: list[torch.Tensor] = []  # its leaves
        self._layout: Hashable = None
        algorithm, groups, optimizers = updates.algorithm, updates.groups, updates.optimizers
        names = {id(tensor): name for name, tensor in algorithm.named_parameters()}
        self._names = {group: [names.pop(id(p)) for p in groups[group].parameters] for group in groups}
        unclaimed = set(names.values())
        others = {name: tensor.detach() for name, tensor in algorithm.named_parameters() if name in unclaimed}
        # All of these are written in place and never rebound.
        self._tensors = {
            "parameters": {name: group.flat for name, group in groups.items()},
            "moments": {name: getattr(optimizer, "tensors", []) for name, optimizer in optimizers.items()},
            "books": [updates.kept, updates.skipped_in_row],
            "others": others | dict(algorithm.named_buffers()),
        }
        self._leaves = nest.leaves(self._tensors)

    def __call__(self, chunk: Chunk, index: Nest, learning_rate: Mapping[str, float], summarize: bool) -> Record | None:
        """See `Updates`; the graph sums up in any case.

        Raises:
          NotCompilable: what is to be done has to be done by the plain updates; nothing has changed.
        """
        plain = self._plain
        if not chunk.is_steady:
            chunk, index = Chunk(take(chunk.source, index), None), None
        source = chunk.source
        if source is not self._source:
            self._source, self._rows = source, nest.leaves(source)
            self._layout = tuple((leaf.dtype, leaf.shape, leaf.stride()) for leaf in self._rows)
        at = nest.leaves(index)
        key = (plain.algorithm.update_kind(), *[leaf.shape for leaf in at], self._layout)
        graph = self._made.get(key)
        if graph is None:
            graph = self._made[key] = self._make(source, index)
        rows = [*at, *self._rows]
        if is_checked(graph.num_calls):
            self._compare(graph, take(source, index), rows)
        graph.num_calls += 1
        coefficients: list[float] = []
        for name, optimizer in plain.optimizers.items():
            coefficients += optimizer.coefficients(learning_rate[name])  # type: ignore[attr-defined]
        result = graph.function.call_flat([*self._leaves, self._tensor(coefficients), *rows])
        if result["stop"] is not None and bool(result["stop"]):
            return None
        if not plain.on_cpu or not plain.skipped_in_row:  # on a CPU, a skipped step does not count
            for name in graph.trained:
                plain.optimizers[name].count()  # type: ignore[attr-defined]
        return Record(graph.trained, result["total"], result["extra"], result["priority"])

    def forget_batch(self) -> None:
        """Lets go of the last chunk's memory, unless it is a ring's."""
        if isinstance(self._source, Batch):
            self._source, self._rows = None, []

    def _make(self, source: Batch | StoredRows, index: Nest) -> "_Graph":
        plain, algorithm = self._plain, self._plain.algorithm
        for name, optimizer in plain.optimizers.items():
            if not hasattr(optimizer, "apply"):
                raise NotCompilable(f"the optimizer of {name!r}, {type(optimizer).__name__}, has no `apply`")
        logging.info("Compiling the update of %s", type(algorithm).__name__)
        trained: list[str] = []

        def update(arguments: Nest) -> Nest:
            tensors, coefficients, index, source = arguments
            batch = take(source, index)
            parameters, of_module = {}, dict(tensors["others"])
            for name, group in plain.groups.items():
                views = group.views(tensors["parameters"][name])
                parameters[name] = [view.detach().requires_grad_() for view in views]
                of_module.update(zip(self._names[name], parameters[name]))
            with _reparametrize_module(algorithm, of_module, tie_weights=True), torch.enable_grad():
                losses, loss_info = plain.losses(batch)
                measured = plain.measure(losses, parameters)
            trained[:] = losses
            kept, skipped_in_row = tensors["books"]
            with torch.no_grad():
                keep, missed = measured.keep, (skipped_in_row + 1) * (1 - measured.keep)
                if loss_info.stop is not None:
                    keep = keep * ~loss_info.stop
                    missed = torch.where(loss_info.stop, skipped_in_row, missed)
                kept.add_(keep)
                skipped_in_row.copy_(missed)
                remaining = iter(coefficients.unbind())
                for name, optimizer in plain.optimizers.items():
                    own = [next(remaining) for _ in range(optimizer.num_coefficients)]  # type: ignore[attr-defined]
                    if name in losses:
                        state = tensors["parameters"][name], measured.gradients[name], tensors["moments"][name]
                        optimizer.apply(*state, own, keep)  # type: ignore[attr-defined]
                extra = extra_sums(loss_info, batch)
                priority = plain.priority(loss_info, batch)
            return {"total": measured.total, "stop": loss_info.stop, "extra": extra, "priority": priority}

        arguments = self._tensors, self._tensor([0.0] * self._num_coefficients()), index, source
        return _Graph(CompiledFunction(update, arguments, self._precision), trained)

    def _compare(self, graph: "_Graph", batch: Batch, rows: list[torch.Tensor]) -> None:
        plain = self._plain
        generators = rng_state()
        losses, _ = plain.losses(batch)
        expected = torch.stack([loss.detach() for loss in losses.values()])
        set_rng_state(generators)
        copies = [leaf.clone() for leaf in self._leaves]
        coefficients = self._tensor([1.0] * self._num_coefficients())
        total = graph.function.call_flat([*copies, coefficients, *rows])["total"]
        set_rng_state(generators)
        if list(losses) != graph.trained or not torch.allclose(
            total[: len(expected)], expected, self._tolerance, self._tolerance, equal_nan=True
        ):
            raise NotCompilable(
                f"compiled, the losses {graph.trained} are {total[: len(graph.trained)].tolist()}, and {list(losses)} "
                f"are {expected.tolist()} as they should be: train_step or calc_loss depends on a value that changes "
                "between updates; make it a buffer, or tell it by `update_kind`"
            )

    def _num_coefficients(self) -> int:
        return sum(optimizer.num_coefficients for optimizer in self._plain.optimizers.values())  # type: ignore[attr-defined]

    def _tensor(self, numbers: list[float]) -> torch.Tensor:
        return torch.from_numpy(np.array(numbers, np.float32)).to(self._plain.kept.device)


class _Graph:
    """Attributes:
    function: of (tensors, coefficients, index, source).
    trained: the groups that have a loss, in order.
    num_calls: so far.
    """

    def __init__(self, function: CompiledFunction, trained: list[str]):
        self.function, self.trained, self.num_calls = function, trained, 0
