"""The learner: batches in, parameters changed.

For each minibatch: train_step, calc_loss, then per parameter group the mean of its loss over trained rows, its gradient
for that group's parameters alone, clipping, one step of the optimizer, and after_update. A group's parameters are views
of one flat vector, so that every optimizer call, norm and clip is one operation however many layers there are.

No value is read from the device inside an update: what summaries need is kept, and read once an iteration.

With `Learner.compile` the same update, from the hooks to the optimizer, becomes one graph (`alfish.compiled`).
"""

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, NamedTuple

import gin
import torch
from absl import logging
from torch import nn
from torch.nn.utils.stateless import _reparametrize_module

from alfish import nest
from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.batches import Chunk, minibatches
from alfish.checkpoint import rng_state, set_rng_state
from alfish.compiled import PRECISIONS, CompiledFunction, NotCompilable, is_checked
from alfish.data import Batch, LossInfo
from alfish.errors import RunError, UsageError
from alfish.losses import masked_mean
from alfish.nest import Nest
from alfish.optimizers import Adam, Optimizer
from alfish.schedules import Schedule, as_schedule


@gin.configurable(module="alfish")
class Learner:
    """Args:
    algorithm: what to train, on its device.
    optimizer: class or factory, takes a group's flat vectors; see `alfish.optimizers`.
    learning_rate: number or schedule of progress; or a dict of these from group to value.
    max_grad_norm: a group's gradient is scaled down to this norm; None: not clipped.
    max_nonfinite_updates: an update whose loss or gradient is not finite is skipped and counted; so many in a row end
      the run.
    compile: make one graph of the whole update at its first batch. It takes 5 to 20 seconds, and pays in runs of some
      ten thousand updates and more. Hooks that cannot be compiled run as they are, after a warning.
    precision: of large products in a compiled update on a CPU: 'float32', or 'bfloat16', whose sums are float32.
    """

    def __init__(
        self,
        algorithm: RLAlgorithm,
        *,
        optimizer: Callable[..., Optimizer] = Adam,
        learning_rate: float | Schedule | Mapping[str, float | Schedule] = 3e-4,
        max_grad_norm: float | None = None,
        max_nonfinite_updates: int = 10,
        compile: bool = False,
        precision: str = "float32",
    ):
        if precision not in PRECISIONS:
            raise UsageError(f"Learner.precision is {precision!r}; it is one of {PRECISIONS}")
        if precision != "float32" and not compile:
            raise UsageError(f"Learner.precision is {precision!r}, which takes Learner.compile = True")
        self._algorithm = algorithm
        self._groups = {name: _Group(parameters) for name, parameters in _claimed_parameters(algorithm).items()}
        self._learning_rates = self._schedule_per_group(learning_rate)
        self._optimizers = {name: optimizer(group.flat) for name, group in self._groups.items()}
        self._max_grad_norm = max_grad_norm
        self._max_nonfinite_updates = max_nonfinite_updates
        self.updates = 0
        device = algorithm.progress.device
        self._on_cpu = device.type == "cpu"
        self._kept = torch.zeros((), dtype=torch.float64, device=device)  # updates made, without those skipped
        self._skipped_in_row = torch.zeros((), device=device)
        self._compiled = _CompiledUpdates(self, precision) if compile else None

    @property
    def is_plain(self) -> bool:
        """Whether updates run as they are written, not as a graph."""
        return self._compiled is None

    def train(self, chunks: Iterable[Chunk], summarize: bool = True) -> dict[str, float]:
        """Updates on every minibatch of the chunks.

        Args:
          chunks: from a source of batches.
          summarize: whether to read and return scalars, which waits for the device.

        Returns:
          Means over the updates: `loss`, `grad_norm`, `learning_rate` (with several groups, `loss/critic` and so on),
          whatever the algorithm put into `LossInfo.extra`, and `nonfinite_updates` so far.

        Raises:
          RunError: after `max_nonfinite_updates` updates in a row that were not finite.
        """
        progress = float(self._algorithm.progress)
        self._learning_rate = {name: float(schedule(progress)) for name, schedule in self._learning_rates.items()}
        records: list[_Record] = []
        for chunk in chunks:
            for batch in minibatches(chunk):
                record = self._update(batch)
                if record is None:  # the algorithm asked to stop
                    return self._finish(records, summarize)
                records.append(record)
        return self._finish(records, summarize)

    def state_dict(self) -> dict[str, Any]:
        optimizers = {name: optimizer.state_dict() for name, optimizer in self._optimizers.items()}
        counters = {"kept": self._kept, "skipped_in_row": self._skipped_in_row, "updates": self.updates}
        return {"optimizers": optimizers, **counters}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, optimizer in self._optimizers.items():
            optimizer.load_state_dict(state["optimizers"][name])
        self._kept.copy_(state["kept"])
        self._skipped_in_row.copy_(state["skipped_in_row"])
        self.updates = state["updates"]

    def _update(self, batch: Batch) -> "_Record | None":
        if self._compiled is not None:
            try:
                record = self._compiled(batch)
            except NotCompilable as error:
                logging.warning("%s cannot be compiled, and runs as it is: %s", type(self._algorithm).__name__, error)
                self._compiled = None
                return self._update(batch)
        else:
            record = self._plain_update(batch)
        if record is not None:
            self.updates += 1
            with torch.no_grad():
                self._algorithm.after_update()
        return record

    def _plain_update(self, batch: Batch) -> "_Record | None":
        losses, loss_info = self._losses(batch)
        if loss_info.stop is not None and bool(loss_info.stop):
            return None
        measured = self._measure(losses, {name: group.parameters for name, group in self._groups.items()})
        keep = measured.keep
        self._kept += keep
        self._skipped_in_row.add_(1).mul_(1 - keep)
        for name, gradients in measured.gradients.items():
            for flat, gradient in zip(self._groups[name].flat, gradients):
                flat.grad = gradient
            if not self._on_cpu:
                self._optimizers[name].step(self._learning_rate[name], keep)
            elif keep:
                self._optimizers[name].step(self._learning_rate[name])
        return _Record(list(losses), measured.total, batch.mask, loss_info.extra or {})

    def _losses(self, batch: Batch) -> tuple[dict[str, torch.Tensor], LossInfo]:
        """Each group's, 0-d."""
        algorithm, experience = self._algorithm, batch.experience
        step = algorithm.train_step(experience, experience.state)
        loss_info: LossInfo = algorithm.calc_loss(experience, step.info)
        return self._reduce(loss_info, batch), loss_info

    def _measure(self, losses: dict[str, torch.Tensor], parameters: Mapping[str, list[Any]]) -> "_Measured":
        """Gradients of each group's loss by the group's `parameters`."""
        gradients, norms, last = {}, [], list(losses)[-1]
        for name, loss in losses.items():
            gradients[name] = self._groups[name].gradients(loss, parameters[name], retain_graph=name != last)
            norms.append(_norm(gradients[name]))
        total = torch.stack([*losses.values(), *norms]).detach()
        keep = torch.isfinite(total.sum()).float()
        if self._max_grad_norm is not None:
            for norm, each in zip(norms, gradients.values()):
                scale = (self._max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
                for gradient in each:
                    gradient.mul_(scale)
        return _Measured(gradients, total, keep)

    def _reduce(self, loss_info: LossInfo, batch: Batch) -> dict[str, torch.Tensor]:
        """One 0-d loss a group: the mean over trained rows, weighted where replay says so, plus its scalar loss."""
        per_row = loss_info.loss if isinstance(loss_info.loss, dict) else {self._only_group(): loss_info.loss}
        losses = {}
        scalar = loss_info.scalar or {}
        for name in (*per_row, *scalar):
            if name not in self._groups:
                raise UsageError(
                    f"calc_loss returned a loss for {name!r}; the parameter groups are {list(self._groups)}"
                )
        for name, loss in per_row.items():
            mask = batch.mask[: len(loss)] if loss.ndim else batch.mask
            if loss.shape != mask.shape:
                raise UsageError(
                    f"calc_loss must return one loss per row: {name!r} has shape {tuple(loss.shape)} for rows of "
                    f"{tuple(mask.shape)}"
                )
            if batch.weight is not None:
                loss = loss * batch.weight
            losses[name] = masked_mean(loss, mask)
        for name, loss in scalar.items():
            losses[name] = losses[name] + loss if name in losses else loss
        if not losses:
            raise UsageError(f"calc_loss returned no loss; the parameter groups are {list(self._groups)}")
        return losses

    def _finish(self, records: "list[_Record]", summarize: bool) -> dict[str, float]:
        if int(self._skipped_in_row) >= self._max_nonfinite_updates:
            raise RunError(
                f"loss or gradient was not finite in {int(self._skipped_in_row)} updates in a row, up to update "
                f"{self.updates}; lower Learner.learning_rate, set Learner.max_grad_norm, or scale the rewards"
            )
        if not records or not summarize:
            return {}
        totals: dict[str, list[torch.Tensor]] = {}
        for record in records:  # a group may train less often than another
            keys = [self._name(kind, name) for kind in ("loss", "grad_norm") for name in record.groups]
            for key, total in zip(keys, record.total):
                totals.setdefault(key, []).append(total)
        values = {key: torch.stack(each).mean() for key, each in totals.items()}
        for key in records[-1].extra:
            kept = [record for record in records if key in record.extra]
            rows = torch.stack([record.extra[key].detach() for record in kept])
            if rows.ndim > 1:
                mask = torch.stack([record.mask[: len(record.extra[key])] for record in kept])
                values[key] = masked_mean(rows, mask)
            else:
                values[key] = rows.float().mean()
        read = torch.stack([value.float() for value in values.values()]).tolist()
        result = dict(zip(values, read))
        for name, learning_rate in self._learning_rate.items():
            result[self._name("learning_rate", name)] = learning_rate
        result["nonfinite_updates"] = self.updates - float(self._kept)
        return result

    def _name(self, kind: str, group: str) -> str:
        return kind if len(self._groups) == 1 else f"{kind}/{group}"

    def _only_group(self) -> str:
        if len(self._groups) > 1:
            raise UsageError(f"calc_loss must return a dict of losses, one for each of the groups {list(self._groups)}")
        return next(iter(self._groups))

    def _schedule_per_group(self, learning_rate: Any) -> dict[str, Schedule]:
        if not isinstance(learning_rate, Mapping):
            return {name: as_schedule(learning_rate) for name in self._groups}
        if set(learning_rate) != set(self._groups):
            raise UsageError(
                f"Learner.learning_rate is for the groups {sorted(learning_rate)}; the algorithm's are "
                f"{sorted(self._groups)}"
            )
        return {name: as_schedule(value) for name, value in learning_rate.items()}


class _Record:
    """What summaries need of one update, still on the device."""

    def __init__(self, groups: list[str], total: torch.Tensor, mask: torch.Tensor, extra: dict[str, torch.Tensor]):
        self.groups, self.total, self.mask, self.extra = groups, total, mask, extra


class _Measured(NamedTuple):
    """What one batch asks for."""

    gradients: dict[str, list[torch.Tensor]]  # a group's, one flat vector for each dtype, clipped
    total: torch.Tensor  # the groups' losses, then the norms of their gradients before clipping
    keep: torch.Tensor  # 0-d float32: 1, or 0 where something is not finite and the update must be skipped


class _Group:
    """Parameters that one loss drives, as views of a flat vector for each dtype."""

    def __init__(self, parameters: list[nn.Parameter]):
        by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in parameters:
            by_dtype.setdefault(parameter.dtype, []).append(parameter)
        self.parameters = [parameter for same in by_dtype.values() for parameter in same]
        self._members = list(by_dtype.values())
        self.flat = []
        for same in self._members:
            flat = torch.cat([parameter.detach().reshape(-1) for parameter in same])
            for parameter, view in zip(same, _views(flat, same)):
                parameter.data = view
            self.flat.append(flat)

    def views(self, flat: list[torch.Tensor]) -> list[torch.Tensor]:
        """Vectors like `self.flat` as tensors like `self.parameters`."""
        return [view for vector, same in zip(flat, self._members) for view in _views(vector, same)]

    def gradients(self, loss: torch.Tensor, parameters: list[Any], retain_graph: bool) -> list[torch.Tensor]:
        gradients = torch.autograd.grad(
            loss, parameters, retain_graph=retain_graph, allow_unused=True, materialize_grads=True
        )
        remaining = iter(gradients)
        return [torch.cat([next(remaining).reshape(-1) for _ in same]) for same in self._members]


class _CompiledUpdates:
    """A learner's updates as graphs: one for each layout of batches and each kind of update.

    Now and then (`is_checked`) a graph's losses are compared with the plain update's: a hook that is not pure may
    depend on something that tracing took for constant.
    """

    def __init__(self, learner: Learner, precision: str):
        self._learner, self._precision = learner, precision
        self._tolerance = 1e-3 if precision == "float32" else 0.1
        self._made: dict[Hashable, tuple[CompiledFunction, list[str]]] = {}
        self._num_calls: dict[Hashable, int] = {}
        algorithm, groups, optimizers = learner._algorithm, learner._groups, learner._optimizers
        names = {id(tensor): name for name, tensor in algorithm.named_parameters()}
        self._names = {group: [names.pop(id(p)) for p in groups[group].parameters] for group in groups}
        unclaimed = set(names.values())
        others = {name: tensor.detach() for name, tensor in algorithm.named_parameters() if name in unclaimed}
        # All of these are written in place and never rebound.
        self._tensors = {
            "parameters": {name: group.flat for name, group in groups.items()},
            "moments": {name: getattr(optimizer, "tensors", []) for name, optimizer in optimizers.items()},
            "books": [learner._kept, learner._skipped_in_row],
            "others": others | dict(algorithm.named_buffers()),
        }
        self._leaves = nest.leaves(self._tensors)

    def __call__(self, batch: Batch) -> "_Record | None":
        learner = self._learner
        leaves = nest.leaves(batch)
        key = (learner._algorithm.update_kind(), *((leaf.shape, leaf.stride()) for leaf in leaves))
        if key not in self._made:
            self._made[key], self._num_calls[key] = self._make(batch), 0
        function, trained = self._made[key]
        if is_checked(self._num_calls[key]):
            self._compare(function, trained, batch)
        self._num_calls[key] += 1
        coefficients: list[float] = []
        for name, optimizer in learner._optimizers.items():
            coefficients += optimizer.coefficients(learner._learning_rate[name])  # type: ignore[attr-defined]
        result = function.call_flat([*self._leaves, self._tensor(coefficients), *leaves])
        if result["stop"] is not None and bool(result["stop"]):
            return None
        if not learner._on_cpu or not learner._skipped_in_row:  # on a CPU, a skipped step does not count
            for name in trained:
                learner._optimizers[name].count()  # type: ignore[attr-defined]
        return _Record(trained, result["total"], batch.mask, result["extra"])

    def _make(self, batch: Batch) -> tuple[CompiledFunction, list[str]]:
        learner, algorithm = self._learner, self._learner._algorithm
        for name, optimizer in learner._optimizers.items():
            if not hasattr(optimizer, "apply"):
                raise NotCompilable(f"the optimizer of {name!r}, {type(optimizer).__name__}, has no `apply`")
        logging.info("Compiling the update of %s", type(algorithm).__name__)
        trained: list[str] = []

        def update(arguments: Nest) -> Nest:
            tensors, coefficients, batch = arguments
            parameters, of_module = {}, dict(tensors["others"])
            for name, group in learner._groups.items():
                views = group.views(tensors["parameters"][name])
                parameters[name] = [view.detach().requires_grad_() for view in views]
                of_module.update(zip(self._names[name], parameters[name]))
            with _reparametrize_module(algorithm, of_module, tie_weights=True), torch.enable_grad():
                losses, loss_info = learner._losses(batch)
                measured = learner._measure(losses, parameters)
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
                for name, optimizer in learner._optimizers.items():
                    own = [next(remaining) for _ in range(optimizer.num_coefficients)]  # type: ignore[attr-defined]
                    if name in losses:
                        state = tensors["parameters"][name], measured.gradients[name], tensors["moments"][name]
                        optimizer.apply(*state, own, keep)  # type: ignore[attr-defined]
            return {"total": measured.total, "stop": loss_info.stop, "extra": loss_info.extra or {}}

        count = sum(optimizer.num_coefficients for optimizer in learner._optimizers.values())  # type: ignore[attr-defined]
        function = CompiledFunction(update, (self._tensors, self._tensor([0.0] * count), batch), self._precision)
        return function, trained

    def _compare(self, function: CompiledFunction, trained: list[str], batch: Batch) -> None:
        learner = self._learner
        generators = rng_state()
        losses, _ = learner._losses(batch)
        plain = torch.stack([loss.detach() for loss in losses.values()])
        set_rng_state(generators)
        count = sum(optimizer.num_coefficients for optimizer in learner._optimizers.values())  # type: ignore[attr-defined]
        copies = [leaf.clone() for leaf in self._leaves]
        total = function.call_flat([*copies, self._tensor([1.0] * count), *nest.leaves(batch)])["total"]
        set_rng_state(generators)
        if list(losses) != trained or not torch.allclose(
            total[: len(plain)], plain, self._tolerance, self._tolerance, equal_nan=True
        ):
            raise NotCompilable(
                f"compiled, the losses {trained} are {total[: len(trained)].tolist()}, and {list(losses)} are "
                f"{plain.tolist()} as they should be: train_step or calc_loss depends on a value that changes between "
                "updates; make it a buffer, or tell it by `update_kind`"
            )

    def _tensor(self, numbers: list[float]) -> torch.Tensor:
        return torch.tensor(numbers, device=self._learner._kept.device)


def _views(flat: torch.Tensor, parameters: list[nn.Parameter]) -> list[torch.Tensor]:
    parts = flat.split([parameter.numel() for parameter in parameters])
    return [part.view(parameter.shape) for part, parameter in zip(parts, parameters)]


def _norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    norms = [torch.linalg.vector_norm(gradient).float() for gradient in gradients]
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


def _claimed_parameters(algorithm: RLAlgorithm) -> dict[str, list[nn.Parameter]]:
    """Each group's trainable parameters; refuses one that no group, or more than one, claims."""
    names = {id(parameter): name for name, parameter in algorithm.named_parameters()}
    groups: dict[str, list[nn.Parameter]] = {}
    owner: dict[int, str] = {}
    for group, parameters in algorithm.parameter_groups().items():
        groups[group] = [parameter for parameter in parameters if parameter.requires_grad]
        for parameter in groups[group]:
            if id(parameter) in owner:
                raise UsageError(
                    f"parameter {names.get(id(parameter), '?')} is in the groups {owner[id(parameter)]!r} and "
                    f"{group!r}; it may be in one"
                )
            owner[id(parameter)] = group
    unclaimed = [name for name, p in algorithm.named_parameters() if p.requires_grad and id(p) not in owner]
    if unclaimed:
        raise UsageError(
            f"no parameter group of {type(algorithm).__name__} claims {', '.join(unclaimed[:3])}; add it to "
            "parameter_groups, or set requires_grad to False"
        )
    return {group: parameters for group, parameters in groups.items() if parameters}
