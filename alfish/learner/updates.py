"""One update as it is written: losses, gradients of each parameter group, clipping, a step of its optimizer.

A group's parameters are views of one flat vector, so that every optimizer call, norm and clip is one operation however
many layers there are. No value is read from the device inside an update, but for one flag on a CPU.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from alfish import nest
from alfish.algorithms.contract import check_loss_info, return_error
from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.batches import Minibatches, take
from alfish.data import AlgStep, Batch, LossInfo
from alfish.errors import UsageError
from alfish.learner.optimizers import Optimizer
from alfish.losses import masked_mean
from alfish.nest import Nest
from alfish.networks import flat_parameters

# Of the priority of a window with memory, the part that is its largest row's; the rest is the mean's (Kapturowski et
# al., 2019, section 2.3).
LARGEST_SHARE = 0.9


class UpdateStats(NamedTuple):
    """What summaries need of one update, still on the device."""

    groups: list[str]
    total: torch.Tensor  # see `Gradients`
    extra: dict[str, torch.Tensor]  # [2] each, a sum over trained rows and the number of these
    priority: torch.Tensor | None = None  # [N], where windows were drawn by priority


class Gradients(NamedTuple):
    """Gradients of one batch, and the losses they are of."""

    by_group: dict[str, list[torch.Tensor]]  # one flat vector for each dtype, clipped
    total: torch.Tensor  # the groups' losses, then the norms of their gradients before clipping
    is_finite: torch.Tensor  # 0-d float32: 1, or 0 where the update must be skipped


class Updates:
    """Gradient steps as they are written: hooks, losses, gradients, clipping, one optimizer call a group.

    Args:
      algorithm: what to train, on its device.
      optimizer: class or factory, takes a group's flat vectors.
      max_grad_norm: a group's gradient is scaled down to this norm; None: not clipped.

    Attributes:
      groups, optimizers: by name.
      num_applied: 0-d float64, updates made, without those skipped.
      consecutive_skips: 0-d.
    """

    def __init__(self, algorithm: RLAlgorithm, optimizer: Callable[..., Optimizer], max_grad_norm: float | None):
        self.algorithm = algorithm
        self.groups = {name: Group(parameters) for name, parameters in _claimed_parameters(algorithm).items()}
        self.optimizers = {name: optimizer(group.flat) for name, group in self.groups.items()}
        self._max_grad_norm = max_grad_norm
        device = algorithm.progress.device
        self.on_cpu = device.type == "cpu"
        self.num_applied = torch.zeros((), dtype=torch.float64, device=device)
        self.consecutive_skips = torch.zeros((), device=device)
        self._consecutive_skips = nest.host_view(self.consecutive_skips)

    def __call__(
        self, chunk: Minibatches, index: Nest, learning_rate: Mapping[str, float], summarize: bool
    ) -> UpdateStats | None:
        """Updates on a minibatch.

        Args:
          chunk: of batches.
          index: one of its `minibatches`.
          learning_rate: a group's.
          summarize: whether the record's `extra` is wanted.

        Returns:
          None where the algorithm asked to stop, and nothing has changed.
        """
        batch = take(chunk.source, index)
        with torch.enable_grad():
            losses, loss_info = self.losses(batch)
            try:
                if loss_info.stop is not None and bool(loss_info.stop):
                    return None
                gradients = self.gradients(losses, {name: group.parameters for name, group in self.groups.items()})
            except Exception:
                check_loss_info(loss_info, self.algorithm)
                raise
        is_finite = gradients.is_finite
        self.num_applied += is_finite
        self.consecutive_skips.add_(1).mul_(1 - is_finite)
        for name, vectors in gradients.by_group.items():
            for parameters, gradient in zip(self.groups[name].flat, vectors):
                parameters.grad = gradient
            if not self.on_cpu:
                self.optimizers[name].step(learning_rate[name], is_finite)
            elif is_finite:
                self.optimizers[name].step(learning_rate[name])
        extra = extra_sums(loss_info, batch) if summarize else {}
        return UpdateStats(list(losses), gradients.total, extra, self.priority(loss_info, batch))

    def num_consecutive_skips(self) -> int:
        """Up to the last update; waits for the device."""
        return int(self._consecutive_skips)

    def losses(self, batch: Batch) -> tuple[dict[str, torch.Tensor], LossInfo]:
        """Each group's, 0-d."""
        algorithm, experience = self.algorithm, batch.experience
        step = algorithm.train_step(experience, experience.state)
        if not isinstance(step, AlgStep):
            raise return_error(step, "AlgStep(info=...)", algorithm, "train_step")
        loss_info = algorithm.calc_loss(experience, step.info)
        if not isinstance(loss_info, LossInfo):
            raise return_error(loss_info, "LossInfo(loss, ...)", algorithm, "calc_loss")
        try:
            return self._reduce(loss_info, batch), loss_info
        except Exception:
            check_loss_info(loss_info, algorithm)
            raise

    def priority(self, loss_info: LossInfo, batch: Batch) -> torch.Tensor | None:
        """`[N]`, of windows, for the replay that weighed the batch: that of the row a window starts with or, where
        memory replays it whole, of all its rows that train. None where replay did not, or the algorithm has none."""
        if batch.weight is None or loss_info.priority is None:
            return None
        rows = loss_info.priority.detach()
        mask = batch.mask[: len(rows)] if rows.ndim else batch.mask
        if rows.shape != mask.shape:
            raise UsageError(
                f"LossInfo.priority of {type(self.algorithm).__name__} has shape {tuple(rows.shape)}; it must be one "
                f"number for each row of {tuple(mask.shape)}"
            )
        if not self.algorithm.replay_needs.recurrent_state:
            return rows[0]
        rows = torch.where(mask, rows, 0)
        mean = rows.sum(0) / mask.sum(0).clamp(min=1)
        return LARGEST_SHARE * rows.amax(0) + (1 - LARGEST_SHARE) * mean

    def gradients(self, losses: dict[str, torch.Tensor], parameters: Mapping[str, list[Any]]) -> Gradients:
        """Gradients of each group's loss by the group's `parameters`."""
        by_group, norms, last = {}, [], list(losses)[-1]
        for name, loss in losses.items():
            by_group[name] = self.groups[name].gradients(loss, parameters[name], retain_graph=name != last)
            norms.append(_norm(by_group[name]))
        total = torch.stack([*losses.values(), *norms]).detach()
        is_finite = torch.isfinite(total.sum()).float()
        if self._max_grad_norm is not None:
            for norm, each in zip(norms, by_group.values()):
                scale = (self._max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
                for gradient in each:
                    gradient.mul_(scale)
        return Gradients(by_group, total, is_finite)

    def _reduce(self, loss_info: LossInfo, batch: Batch) -> dict[str, torch.Tensor]:
        """One 0-d loss a group: the mean over trained rows, weighted where replay says so, plus its scalar loss."""
        per_row = loss_info.loss if isinstance(loss_info.loss, dict) else {self._only_group(): loss_info.loss}
        losses, weighted = {}, self.algorithm.weighted_losses
        scalar = loss_info.scalar or {}
        for name in (*per_row, *scalar):
            if name not in self.groups:
                raise UsageError(
                    f"calc_loss returned a loss for {name!r}; the parameter groups are {list(self.groups)}"
                )
        for name, loss in per_row.items():
            num_rows = len(loss) if loss.ndim else 0
            mask = batch.mask[:num_rows] if num_rows else batch.mask
            if loss.shape != mask.shape:
                raise UsageError(
                    f"calc_loss must return one loss per row: {name!r} has shape {tuple(loss.shape)} for rows of "
                    f"{tuple(mask.shape)}"
                )
            if batch.weight is not None and (weighted is None or name in weighted):
                loss = loss * batch.weight
            losses[name] = masked_mean(loss, mask)
        for name, loss in scalar.items():
            losses[name] = losses[name] + loss if name in losses else loss
        for name, loss in losses.items():
            if not loss.requires_grad and torch.is_grad_enabled():
                raise UsageError(
                    f"the loss {name!r} of {type(self.algorithm).__name__} does not depend on any parameter; look for "
                    "what is detached, or computed under no_grad"
                )
        if not losses:
            raise UsageError(f"calc_loss returned no loss; the parameter groups are {list(self.groups)}")
        return losses

    def _only_group(self) -> str:
        if len(self.groups) > 1:
            raise UsageError(f"calc_loss must return a dict of losses, one for each of the groups {list(self.groups)}")
        if not self.groups:
            raise UsageError(f"{type(self.algorithm).__name__} has no parameter to train; make networks its attributes")
        return next(iter(self.groups))


def extra_sums(loss_info: LossInfo, batch: Batch) -> dict[str, torch.Tensor]:
    """`LossInfo.extra` as `UpdateStats.extra`; what is 0-d counts as one row."""
    sums = {}
    for name, value in (loss_info.extra or {}).items():
        if not isinstance(value, torch.Tensor):
            raise UsageError(
                f"LossInfo.extra[{name!r}] is a {type(value).__name__}; it is a tensor, 0-d or one per row"
            )
        value = value.detach().float()
        if value.ndim:
            mask = batch.mask[: len(value)]
            if value.shape[: mask.ndim] != mask.shape:
                raise UsageError(
                    f"LossInfo.extra[{name!r}] has shape {list(value.shape)}; it is 0-d, or begins with the rows "
                    f"{list(batch.mask.shape)}"
                )
            mask = nest.widened(mask, value).expand_as(value)
            sums[name] = torch.stack([torch.where(mask, value, 0).sum(), mask.sum()])
        else:
            sums[name] = torch.stack([value, torch.ones_like(value)])
    return sums


class Group:
    """Parameters that one loss drives, as views of a flat vector for each dtype."""

    def __init__(self, parameters: list[nn.Parameter]):
        by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in parameters:
            by_dtype.setdefault(parameter.dtype, []).append(parameter)
        self.parameters = [parameter for same in by_dtype.values() for parameter in same]
        self._members = list(by_dtype.values())
        self.flat = [flat_parameters.lay_side_by_side(same) for same in self._members]

    def views(self, vectors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Vectors like `self.flat` as tensors like `self.parameters`."""
        return [view for vector, same in zip(vectors, self._members) for view in flat_parameters.views(vector, same)]

    def gradients(self, loss: torch.Tensor, parameters: list[Any], retain_graph: bool) -> list[torch.Tensor]:
        gradients = torch.autograd.grad(
            loss, parameters, retain_graph=retain_graph, allow_unused=True, materialize_grads=True
        )
        remaining = iter(gradients)
        return [torch.cat([next(remaining).reshape(-1) for _ in same]) for same in self._members]


def _norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    norms = [torch.linalg.vector_norm(gradient).float() for gradient in gradients]
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


def _claimed_parameters(algorithm: RLAlgorithm) -> dict[str, list[nn.Parameter]]:
    """Each group's trainable parameters; refuses one that no group, or more than one, claims."""
    names = {id(parameter): name for name, parameter in algorithm.named_parameters()}
    groups: dict[str, list[nn.Parameter]] = {}
    owner: dict[int, str] = {}
    claims = algorithm.parameter_groups()
    if not isinstance(claims, Mapping) or not all(isinstance(each, Iterable) for each in claims.values()):
        words = "a dict from a group's name to its parameters, as {'all': self.parameters()}"
        raise return_error(claims, words, algorithm, "parameter_groups")
    for group, parameters in claims.items():
        groups[group] = [parameter for parameter in parameters if parameter.requires_grad]
        for parameter in groups[group]:
            if id(parameter) not in names:
                raise UsageError(
                    f"the group {group!r} has a parameter that is not registered with {type(algorithm).__name__}, so "
                    "it would not be saved; make it an attribute, or keep it in an nn.ParameterList"
                )
            if id(parameter) in owner:
                raise UsageError(
                    f"parameter {names[id(parameter)]} is in the groups {owner[id(parameter)]!r} and "
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
