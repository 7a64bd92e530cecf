"""The learner: batches in, parameters changed.

For each minibatch: train_step, calc_loss, then per parameter group the mean of its loss over trained rows, its gradient
for that group's parameters alone, clipping, one step of the optimizer, and after_update. A group's parameters are views
of one flat vector, so that every optimizer call, norm and clip is one operation however many layers there are.

No value is read from the device inside an update: what summaries need is kept, and read once an iteration.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import gin
import torch
from torch import nn

from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.batches import Chunk, take
from alfish.data import Batch, LossInfo
from alfish.errors import RunError, UsageError
from alfish.losses import masked_mean
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
    """

    def __init__(
        self,
        algorithm: RLAlgorithm,
        *,
        optimizer: Callable[..., Optimizer] = Adam,
        learning_rate: float | Schedule | Mapping[str, float | Schedule] = 3e-4,
        max_grad_norm: float | None = None,
        max_nonfinite_updates: int = 10,
    ):
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
            for columns in chunk.index:
                record = self._update(take(chunk.batch, columns))
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
        algorithm, experience = self._algorithm, batch.experience
        step = algorithm.train_step(experience, experience.state)
        loss_info: LossInfo = algorithm.calc_loss(experience, step.info)
        if loss_info.stop is not None and bool(loss_info.stop):
            return None
        losses = self._reduce(loss_info, batch)
        norms = self._differentiate(losses)
        total = torch.stack([*losses.values(), *norms.values()]).detach()
        keep = torch.isfinite(total.sum()).float()  # 1, or 0 where the update must be skipped
        self._kept += keep
        self._skipped_in_row.add_(1).mul_(1 - keep)
        if self._on_cpu and not keep:
            losses = {}
        for name in losses:
            self._groups[name].clip(norms[name], self._max_grad_norm)
            self._optimizers[name].step(self._learning_rate[name], None if self._on_cpu else keep)
        self.updates += 1
        with torch.no_grad():
            algorithm.after_update()
        return _Record(list(norms), total, batch.mask, loss_info.extra or {})

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

    def _differentiate(self, losses: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Fills each group's gradient with that of its own loss, and returns their norms."""
        norms, last = {}, list(losses)[-1]
        for name, loss in losses.items():
            norms[name] = self._groups[name].differentiate(loss, retain_graph=name != last)
        return norms

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


class _Group:
    """Parameters that one loss drives, as views of a flat vector for each dtype."""

    def __init__(self, parameters: list[nn.Parameter]):
        by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in parameters:
            by_dtype.setdefault(parameter.dtype, []).append(parameter)
        self._parameters = [parameter for same in by_dtype.values() for parameter in same]
        self._members = list(by_dtype.values())
        self.flat = []
        for same in self._members:
            flat = torch.cat([parameter.detach().reshape(-1) for parameter in same])
            for parameter, view in zip(same, flat.split([parameter.numel() for parameter in same])):
                parameter.data = view.view(parameter.shape)
            flat.grad = torch.zeros_like(flat)
            self.flat.append(flat)

    def differentiate(self, loss: torch.Tensor, retain_graph: bool) -> torch.Tensor:
        gradients = torch.autograd.grad(
            loss, self._parameters, retain_graph=retain_graph, allow_unused=True, materialize_grads=True
        )
        remaining = iter(gradients)
        for flat, same in zip(self.flat, self._members):
            torch.cat([next(remaining).reshape(-1) for _ in same], out=flat.grad)
        norms = [torch.linalg.vector_norm(flat.grad).float() for flat in self.flat]
        return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))

    def clip(self, norm: torch.Tensor, max_norm: float | None) -> None:
        if max_norm is not None:
            scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
            for flat in self.flat:
                flat.grad.mul_(scale)  # type: ignore[union-attr]  # made with the vector


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
