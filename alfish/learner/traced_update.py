"""The update as a function of tensors, from the gather of a minibatch to the optimizer step."""

from typing import Any

import torch

from alfish.compiler import torch_internals
from alfish.compiler.inductor import NotCompilable
from alfish.learner.batches import take
from alfish.learner.kl_adaptive import follow
from alfish.learner.optimizers import FlatOptimizer
from alfish.learner.updates import Updates, counted, extra_sums, write_buffers
from alfish.nest import Nest


class TracedUpdate:
    """One update as a function for tracing, `function((tensors, coefficients, index, source))`.

    The function reads and writes tensors of its arguments only, so another process can trace it.

    Args:
      updates: plain updates.

    Attributes:
      optimizers: optimizers that can be part of a graph, by name.
      tensors: value for `tensors` in the argument: tensors that an update reads and writes in place. They are never
        replaced by other tensors.
      num_coefficients: length of `coefficients` in the argument: number of coefficients of all optimizers.
      notes: names of the groups with a loss, in order; known after the first call.
    """

    def __init__(self, updates: Updates):
        self._updates = updates
        algorithm, groups = updates.algorithm, updates.groups
        self.optimizers = {n: each for n, each in updates.optimizers.items() if isinstance(each, FlatOptimizer)}
        names = {id(tensor): name for name, tensor in algorithm.named_parameters()}
        self._names = {group: [names.pop(id(p)) for p in groups[group].parameters] for group in groups}
        unclaimed = set(names.values())
        others = {name: tensor.detach() for name, tensor in algorithm.named_parameters() if name in unclaimed}
        self.tensors = {
            "parameters": {name: group.flat for name, group in groups.items()},
            "moments": {name: optimizer.tensors for name, optimizer in self.optimizers.items()},
            "rates": updates.rates,
            # On a CPU, `stop` is read after each update, so stopped updates need no counter.
            "counters": [
                updates.num_applied,
                updates.consecutive_skips,
                *([] if updates.on_cpu else [updates.num_stopped]),
            ],
            "others": others | dict(algorithm.named_buffers()),
        }
        self.num_coefficients = sum(each.num_coefficients for each in self.optimizers.values())
        self.notes: list[str] = []

    def check(self) -> None:
        """Raises NotCompilable if an optimizer cannot be part of a graph."""
        for name, optimizer in self._updates.optimizers.items():
            if name not in self.optimizers:
                raise NotCompilable(f"the optimizer of {name!r}, {type(optimizer).__name__}, has no `apply`")
        # For a KL-adaptive rate, the graph multiplies the coefficients for a learning rate of 1 by the rate.
        for name in self._updates.leads:
            optimizer = self.optimizers[name]
            if optimizer.scaled(optimizer.coefficients(1.0), 2.0) != optimizer.coefficients(2.0):
                raise NotCompilable(
                    f"`in_proportion` of {type(optimizer).__name__} does not name the coefficients that are "
                    "proportional to the learning rate"
                )

    def __call__(self, arguments: Nest) -> dict[str, Any]:
        """Makes an update; returns `total` and `stop` of `Gradients`, `extra` and `priority` of `UpdateStats`."""
        updates, algorithm = self._updates, self._updates.algorithm
        tensors, coefficients, index, source = arguments
        batch = take(source, index)
        parameters, of_module = {}, dict(tensors["others"])
        for name, group in updates.groups.items():
            views = group.views(tensors["parameters"][name])
            parameters[name] = [view.detach().requires_grad_() for view in views]
            of_module.update(zip(self._names[name], parameters[name]))
        with torch_internals.reparametrize_module(algorithm, of_module, tie_weights=True), torch.enable_grad():
            means, loss_info = updates.means(batch)
            # Tensors that hooks have assigned to buffers become values of these buffers, as `LossInfo.buffers` do.
            found = dict(algorithm.named_buffers(remove_duplicate=False))  # one tensor may be assigned to two
            assigned = {own: found[name] for name, own in of_module.items() if found.get(name, own) is not own}
            gradients = updates.gradients(means, parameters, *tensors["counters"][2:])
        self.notes = list(means.losses)
        with torch.no_grad():
            is_applied = counted(gradients, *tensors["counters"])
            rates = tensors["rates"]
            follow(updates.leads, rates, gradients.kl, is_applied)
            remaining = iter(coefficients.unbind())
            for name, group in updates.groups.items():
                for part, vectors in group.parts:
                    optimizer = self.optimizers[part]
                    own = [next(remaining) for _ in range(optimizer.num_coefficients)]
                    own = optimizer.scaled(own, rates[part]) if part in rates else own
                    if name in means.losses:
                        both = tensors["parameters"][name][vectors], gradients.by_group[name][vectors]
                        optimizer.apply(*both, tensors["moments"][part], own, is_applied)
            if assigned or loss_info.buffers:
                write_buffers(assigned | dict(loss_info.buffers or {}), is_applied)
            extra = extra_sums(loss_info, batch)
            priority = updates.priority(loss_info, batch)
        return {"total": gradients.total, "stop": gradients.stops, "extra": extra, "priority": priority}
