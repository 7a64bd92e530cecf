"""Plain updates, which are not compiled: losses, gradients of each parameter group, clipping, and optimizer steps.

A group's parameters are views of one flat vector (one for each part and dtype). So an optimizer step, a norm and a clip
are a few operations for any number of layers. On a GPU, an update does not wait for the device.

With several learners, means and gradients are over the rows of all learners. Each learner multiplies its means and
gradients by their number of rows. One sum over learners adds up these products and the numbers of rows. Each sum of
products is divided by the total number of rows.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

import torch

from alfish import host, nest
from alfish.algorithms.contract import check_detached, check_loss_info, losses_error, refuse_hooks, return_error
from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.data import AlgStep, Batch, LossInfo
from alfish.errors import RunError, UsageError
from alfish.functional.losses import masked_mean
from alfish.learner.batches import Minibatches, take
from alfish.learner.groups import ParameterGroup, claimed_parameters, split_into_parts, unit_rows_of
from alfish.learner.kl_adaptive import KLAdaptive, follow, multiplied
from alfish.learner.optimizers import FlatOptimizer, Optimizer, make_optimizer
from alfish.nest import Nest
from alfish.networks.bodies.batch_norm import check_batch_norms
from alfish.processes import replicas

OWN_SCALARS = ("loss", "grad_norm", "learning_rate", "nonfinite_updates")  # a suffix may follow: 'loss/actor'

EARLY = 10  # each group must have a loss in at least one of the first EARLY x (largest update period) updates

# Weight of the largest row priority in the priority of a window; the weight of the mean row priority is
# 1 - LARGEST_FRACTION (Kapturowski et al., 2019, section 2.3).
LARGEST_FRACTION = 0.9


class UpdateStats(NamedTuple):
    """Statistics of one update for summaries and replay; the tensors are on the device."""

    groups: list[str]  # groups with a loss in this update
    total: torch.Tensor  # see `Gradients`
    extra: dict[str, torch.Tensor]  # [2] by name: the sum over trainable rows, and the number of these rows
    priority: torch.Tensor | None = None  # [N], if windows were drawn by priority


class Means(NamedTuple):
    """Means of a batch over its trainable rows."""

    losses: dict[str, torch.Tensor]  # 0-d loss of each group
    stop: torch.Tensor | None  # 0-d mean of `LossInfo.stop`
    kl: torch.Tensor | None  # 0-d mean of `LossInfo.kl`, if a learning rate follows it
    num_rows: torch.Tensor | None  # number of rows in each loss, in `stop` and in `kl`; None with one learner


class Gradients(NamedTuple):
    """Gradients of one batch, with their norms and losses."""

    by_group: dict[str, list[torch.Tensor]]  # clipped gradients, laid out like `ParameterGroup.flat`
    total: torch.Tensor  # the groups' losses, then their gradients' norms before clipping
    is_finite: torch.Tensor  # 0-d float32: 1 if `total` is finite, else 0, which skips the update
    stops: torch.Tensor | None  # 0-d bool, whether the algorithm requests a stop; None if it never does
    kl: torch.Tensor | None  # 0-d mean of `LossInfo.kl`, if a learning rate follows it


class Updates:
    """Plain updates: hooks, losses, gradients, clipping, and one optimizer step for each part of a group.

    Args:
      algorithm: algorithm to train, on its device.
      optimizer: class or factory of an optimizer; called with a list of flat parameter vectors.
      max_grad_norm: maximum norm of a group's gradient; larger gradients are scaled down. None means no limit.
      parts: name prefixes of the parameters that have separate optimizers.

    Attributes:
      groups: parameter groups by name.
      optimizers: optimizers by the name of their group, and by `group/part` for parts.
      num_applied: 0-d float64, number of updates that were not skipped.
      consecutive_skips: 0-d, number of consecutive updates that were skipped because a value was not finite.
      num_stopped: 0-d, number of updates of this iteration that a stop skipped; 0 on a CPU.
      leads: KL-adaptive learning rates, by the name of their optimizer; see `lead`.
      rates: current value of each rate in `leads`, 0-d float32, by the same names.
    """

    def __init__(
        self,
        algorithm: RLAlgorithm,
        optimizer: Callable[..., Optimizer],
        max_grad_norm: float | None,
        parts: Collection[str] = (),
    ):
        self.algorithm = algorithm
        claimed = split_into_parts(algorithm, claimed_parameters(algorithm), parts)
        self.groups = {name: ParameterGroup(name, parameters) for name, parameters in claimed.items()}
        self.optimizers = {
            name: make_optimizer(optimizer, group.flat[vectors])
            for group in self.groups.values()
            for name, vectors in group.parts
        }
        check_batch_norms(algorithm)
        self._is_first, self._without_loss, self._num_early = True, set(self.groups), 0
        self._unit_rows = unit_rows_of(algorithm, self.groups)
        self._max_grad_norm = max_grad_norm
        device = algorithm.progress.device
        self.on_cpu = device.type == "cpu"
        self.num_applied = torch.zeros((), dtype=torch.float64, device=device)
        self.consecutive_skips = torch.zeros((), device=device)
        self.num_stopped = torch.zeros((), device=device)
        self.leads: dict[str, KLAdaptive] = {}
        self.rates: dict[str, torch.Tensor] = {}
        self._consecutive_skips = nest.host_view(self.consecutive_skips)
        self._noted: Callable[[], Any] | None = None  # see `note`
        # For each update since `settle` that a stop may have skipped: the groups with a loss.
        self._may_have_stopped: list[list[str]] = []

    def check_parameters(self) -> None:
        """Raises UsageError if updates do not reach a parameter, see `ParameterGroup.check`."""
        names = {id(parameter): name for name, parameter in self.algorithm.named_parameters()}
        for group in self.groups.values():
            group.check(names)

    def lead(self, leads: dict[str, KLAdaptive]) -> None:
        """Sets the KL-adaptive learning rates, by the name of their optimizer; call before the first update."""
        self.leads = leads
        self.rates = {name: torch.full_like(self.consecutive_skips, each.initial) for name, each in leads.items()}

    def __call__(
        self, chunk: Minibatches, index: Nest, learning_rate: Mapping[str, float], summarize: bool
    ) -> UpdateStats | None:
        """Makes an update on a minibatch.

        Args:
          chunk: rows and the minibatches in them.
          index: an entry of `chunk.minibatches()`.
          learning_rate: learning rate of each optimizer, by name; multiplied by the KL-adaptive rate if there is one.
          summarize: whether to compute `extra` of the result.

        Returns:
          Statistics of the update. On a CPU, the result is None if the algorithm requests a stop; the update then
          changes nothing. On a GPU, a stop skips this and all further updates until `settle`. The host does not wait to
          know of the stop, so a skipped update also returns statistics.
        """
        batch = take(chunk.source, index)
        with torch.enable_grad():
            means, loss_info = self.means(batch)
            if self.on_cpu and means.stop is not None and means.num_rows is None and means.stop > 0:
                return None  # with several learners, the mean over learners is tested below
            try:
                trained = {name: group.parameters for name, group in self.groups.items()}
                gradients = self.gradients(means, trained, self.num_stopped)
            except Exception:  # torch raises various errors for wrong losses; the check names the mistake
                check_loss_info(loss_info, self.algorithm)
                raise
        stops = gradients.stops
        if self.on_cpu and stops is not None and means.num_rows is not None and stops:
            return None
        is_applied = gradients.is_finite
        if self.on_cpu or stops is None:
            self.num_applied += is_applied
            self.consecutive_skips.add_(1).mul_(1 - is_applied)
        else:
            is_applied = counted(gradients, self.num_applied, self.consecutive_skips, self.num_stopped)
        if self.leads:
            follow(self.leads, self.rates, gradients.kl, is_applied)
            learning_rate = multiplied(learning_rate, self.rates, self.on_cpu)
        for name, vectors in gradients.by_group.items():
            group = self.groups[name]
            for parameters, gradient in zip(group.flat, vectors):
                parameters.grad = gradient
            for part, _ in group.parts:
                if not self.on_cpu:
                    self.optimizers[part].step(learning_rate[part], is_applied)
                elif is_applied:
                    self.optimizers[part].step(learning_rate[part])
        self.project(means.losses)
        try:
            if loss_info.buffers and (not self.on_cpu or is_applied):
                write_buffers(loss_info.buffers, None if self.on_cpu else is_applied)
            if self._is_first:
                extra_sums(loss_info, batch)  # checks it, because the first summary may be much later
            extra = extra_sums(loss_info, batch) if summarize else {}
            priority = self.priority(loss_info, batch)
        except Exception:  # raised by fields of wrong types; the check below names the field
            check_loss_info(loss_info, self.algorithm)
            raise
        if self._without_loss:
            self._check_groups(means.losses)
        if self._is_first:
            self._is_first = False
            check_detached(self.algorithm)
        stats = UpdateStats(list(means.losses), gradients.total, extra, priority)
        return stats if self.on_cpu or stops is None else self.unless_stopped(stats, stops)

    def unless_stopped(self, stats: UpdateStats, stops: torch.Tensor) -> UpdateStats:
        """Returns the statistics of an update; if a stop skipped the update, each statistic is replaced by nan or 0."""
        self._may_have_stopped.append(stats.groups)
        extra = {name: torch.where(stops, 0, pair) for name, pair in stats.extra.items()}
        priority = None if stats.priority is None else torch.where(stops, torch.nan, stats.priority)
        return UpdateStats(stats.groups, torch.where(stops, torch.nan, stats.total), extra, priority)

    def project(self, names: Iterable[str]) -> None:
        """Projects the weights of `Projected` layers to their fixed norm, after an update of the named groups."""
        if self._unit_rows:
            for name in names:
                for layer in self._unit_rows.get(name, ()):
                    layer.project()

    def num_consecutive_skips(self) -> int:
        """Returns `consecutive_skips` as a number; waits for the device."""
        return int(self._consecutive_skips)

    def note(self) -> None:
        """Begins to copy the device's counts to the host, for `settle` and `check_noted_skips`."""
        self._noted = host.read_later((self.consecutive_skips, self.num_stopped))

    def settle(self) -> int:
        """Returns the number of updates since the last call that a stop skipped on a GPU.

        This method subtracts these updates from the optimizers' step counts. The caller must correct its own count.
        """
        if not self._may_have_stopped or self._noted is None:
            return 0
        num_stopped = int(self._noted()[1])
        for name in [name for groups in self._may_have_stopped[::-1][:num_stopped] for name in groups]:
            for part, _ in self.groups[name].parts:
                if isinstance(optimizer := self.optimizers[part], FlatOptimizer):
                    optimizer.uncount()
        self._may_have_stopped.clear()
        self.num_stopped.zero_()
        return num_stopped

    def check_noted_skips(self, limit: int, num_updates: int) -> None:
        """Raises RunError as `check_skips` does, for the number that `note` began to copy."""
        if self._noted is not None:
            self._check_number(int(self._noted()[0]), limit, num_updates)

    def check_skips(self, limit: int, num_updates: int) -> None:
        """Raises RunError if the last `limit` of `num_updates` updates were not finite; waits for the device."""
        self._check_number(int(self._consecutive_skips), limit, num_updates)

    @staticmethod
    def _check_number(num_skipped: int, limit: int, num_updates: int) -> None:
        if num_skipped >= limit:
            remedy = "lower Learner.learning_rate, set Learner.max_grad_norm, or scale the rewards"
            if num_skipped >= num_updates:  # the parameters are the initial ones
                remedy = "these are all updates so far, so check your own networks, transforms and losses"
            raise RunError(
                f"loss or gradient was not finite in {num_skipped} consecutive updates, up to update {num_updates}; "
                f"{remedy}"
            )

    def means(self, batch: Batch) -> tuple[Means, LossInfo]:
        """Returns the means over the rows of this learner's batch, and the result of calc_loss."""
        algorithm, experience = self.algorithm, batch.experience._replace(trains=batch.mask)
        try:
            step = algorithm.train_step(experience, experience.state)
            if not isinstance(step, AlgStep):
                raise return_error(step, "AlgStep(info=...)", algorithm, "train_step")
            loss_info = algorithm.calc_loss(experience, step.info)
            if not isinstance(loss_info, LossInfo):
                raise return_error(loss_info, "LossInfo(loss, ...)", algorithm, "calc_loss")
        except Exception as error:
            refuse_hooks(error, algorithm)  # names the hooks of a variant; other errors are raised as they are
            raise
        try:
            return self._means(loss_info, batch), loss_info
        except Exception:  # the check names the field of `loss_info` that is wrong
            check_loss_info(loss_info, algorithm)
            raise

    def priority(self, loss_info: LossInfo, batch: Batch) -> torch.Tensor | None:
        """Returns priorities `[N]` of windows; None if replay is not prioritized, or if calc_loss returned none.

        The priority of a window is that of its first row; with recurrent states from replay, it is a mix of the largest
        priority and the mean priority of its trainable rows.
        """
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
        return LARGEST_FRACTION * rows.amax(0) + (1 - LARGEST_FRACTION) * mean

    def gradients(
        self, means: Means, parameters: Mapping[str, list[Any]], num_stopped: torch.Tensor | None = None
    ) -> Gradients:
        """Returns the gradients of each group's loss with respect to the group's `parameters`.

        Losses are means over the rows of all learners. On a GPU, `num_stopped` counts the updates of this iteration
        that a stop skipped. If it is positive, this update is skipped, too.
        """
        by_group, last = {}, list(means.losses)[-1]
        for name, loss in means.losses.items():
            try:
                by_group[name] = self.groups[name].gradients(loss, parameters[name], retain_graph=name != last)
            except RuntimeError:  # the check names a parameter that was frozen
                self.check_parameters()
                raise
        means, by_group = over_learners(means, by_group)
        norms = [_norm(vectors) for vectors in by_group.values()]
        total = torch.stack([*means.losses.values(), *norms]).detach()
        is_finite = torch.isfinite(total.sum()).float()
        if self._max_grad_norm is not None:
            for norm, each in zip(norms, by_group.values()):
                scale = (self._max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
                for gradient in each:
                    gradient.mul_(scale)
        stops = None if means.stop is None else means.stop > 0
        if stops is not None and num_stopped is not None and not self.on_cpu:
            stops |= num_stopped > 0
        return Gradients(by_group, total, is_finite, stops, means.kl)

    def _means(self, loss_info: LossInfo, batch: Batch) -> Means:
        """Averages over trainable rows: each group's importance-weighted loss plus its scalar loss, and `stop`."""
        per_row = loss_info.loss if isinstance(loss_info.loss, dict) else {self._only_group(): loss_info.loss}
        losses, weighted = {}, self.algorithm.weighted_losses
        scalar = loss_info.scalar or {}
        for name in (*per_row, *scalar):
            if name not in self.groups:
                raise UsageError(
                    f"calc_loss returned a loss for {name!r}; the parameter groups are {list(self.groups)}"
                )
        masks = dict.fromkeys(scalar, batch.mask)
        for name, loss in per_row.items():
            mask = masks[name] = _mask(batch, loss)
            if loss.shape != mask.shape:
                raise UsageError(
                    "calc_loss must return one loss per trainable row (in a replay window, row 0 or all rows but the "
                    f"last): {name!r} has shape {tuple(loss.shape)} for rows of {tuple(mask.shape)}"
                )
            if batch.weight is not None and (weighted is None or name in weighted):
                loss = loss * batch.weight
            losses[name] = masked_mean(loss, mask)
        for name, loss in scalar.items():
            losses[name] = losses[name] + loss if name in losses else loss
        for name, loss in losses.items():
            if not loss.requires_grad and torch.is_grad_enabled():
                raise UsageError(
                    f"the loss {name!r} of {type(self.algorithm).__name__} does not depend on any parameter; a tensor "
                    "is detached, or computed under no_grad"
                )
        if not losses:
            raise UsageError(f"calc_loss returned no loss; the parameter groups are {list(self.groups)}")
        followed = loss_info.kl if self.leads else None
        if self.leads and followed is None:
            raise UsageError(
                f"Learner.learning_rate is a KLAdaptive, and calc_loss of {type(self.algorithm).__name__} returns no "
                "LossInfo.kl; set a number or a schedule, or train with PPO or APPO"
            )
        counted, means = [masks[name] for name in losses], {}
        for name, rows in (("stop", loss_info.stop), ("kl", followed)):
            if rows is not None:
                counted.append(_mask(batch, rows))
                means[name] = _mean_of(name, rows, counted[-1], self.algorithm)
        num_rows = torch.stack([mask.sum() for mask in counted]) if replicas.is_joined() else None
        return Means(losses, means.get("stop"), means.get("kl"), num_rows)

    def _check_groups(self, losses: Collection[str]) -> None:
        """Raises UsageError if no early update (`EARLY`) had a loss for a group, unless `graph_key` is overridden."""
        self._without_loss.difference_update(losses)
        self._num_early += 1
        is_enough = self._num_early == EARLY * max([1, *self.algorithm.update_periods.values()])
        if self._without_loss and is_enough and not self.algorithm.overrides("graph_key"):
            raise UsageError(
                f"calc_loss of {type(self.algorithm).__name__} returned no loss for the group "
                f"{min(self._without_loss)!r} in {self._num_early} updates, so the group does not train; return a "
                "loss, or distinguish the updates in which the group trains with graph_key"
            )

    def _only_group(self) -> str:
        if len(self.groups) > 1:
            raise losses_error(self.groups)
        if not self.groups:
            raise UsageError(
                f"{type(self.algorithm).__name__} has no parameters to train; assign its networks to attributes"
            )
        return next(iter(self.groups))


def counted(
    gradients: Gradients,
    num_applied: torch.Tensor,
    consecutive_skips: torch.Tensor,
    num_stopped: torch.Tensor | None = None,
) -> torch.Tensor:
    """Counts an update in the given 0-d tensors; returns a 0-d flag: 1 if the update is applied, else 0."""
    is_applied, skips = gradients.is_finite, (consecutive_skips + 1) * (1 - gradients.is_finite)
    if gradients.stops is not None:
        is_applied = is_applied * ~gradients.stops
        skips = torch.where(gradients.stops, consecutive_skips, skips)
        if num_stopped is not None:
            num_stopped.add_(gradients.stops)
    num_applied.add_(is_applied)
    consecutive_skips.copy_(skips)
    return is_applied


def extra_sums(loss_info: LossInfo, batch: Batch) -> dict[str, torch.Tensor]:
    """Returns `LossInfo.extra` as `UpdateStats.extra`; a 0-d tensor counts as one row.

    Raises:
      UsageError: an entry is not a tensor, does not have the batch's rows, or has the name of a scalar of the learner.
    """
    sums = {}
    for name, value in (loss_info.extra or {}).items():
        if not isinstance(value, torch.Tensor):
            raise UsageError(
                f"LossInfo.extra[{name!r}] is a {type(value).__name__}; it must be a tensor, 0-d or one per row"
            )
        if name.partition("/")[0] in OWN_SCALARS:
            raise UsageError(
                f"LossInfo.extra has {name!r}, which the learner uses for one of its own scalars; rename it"
            )
        value = value.detach().float()
        if value.ndim:
            mask = batch.mask[: len(value)]
            if value.shape[: mask.ndim] != mask.shape:
                raise UsageError(
                    f"LossInfo.extra[{name!r}] has shape {list(value.shape)}; it must be 0-d, or its shape must begin "
                    f"with {list(batch.mask.shape)}"
                )
            mask = nest.widened(mask, value).expand_as(value)
            sums[name] = torch.stack([torch.where(mask, value, 0).sum(), mask.sum()])
        else:
            sums[name] = torch.stack([value, torch.ones_like(value)])
    return sums


@torch.no_grad()
def write_buffers(buffers: Mapping[torch.Tensor, torch.Tensor], is_applied: torch.Tensor | None) -> None:
    """Writes new values to buffers; with several learners, the mean over learners.

    Args:
      buffers: `LossInfo.buffers`.
      is_applied: 0-d tensor; 0 means that the buffers do not change. None means that they change.
    """
    found, new = list(buffers), [value.detach() for value in buffers.values()]
    for buffer, value in buffers.items():
        if buffer.shape != value.shape:
            raise UsageError(
                f"LossInfo.buffers has a value of shape {list(value.shape)} for a buffer of shape "
                f"{list(buffer.shape)}; the shapes must be equal"
            )
    if replicas.is_joined():
        mean = replicas.total(torch.cat([value.reshape(-1).double() for value in new])) / replicas.size()
        parts = mean.split([value.numel() for value in new])
        new = [part.view(value.shape).to(value.dtype) for part, value in zip(parts, new)]
    if is_applied is not None:
        new = [torch.where(is_applied > 0, value, buffer) for buffer, value in zip(found, new)]
    torch._foreach_copy_(found, new)


def over_learners(means: Means, by_group: dict[str, list[torch.Tensor]]) -> tuple[Means, dict[str, list[torch.Tensor]]]:
    """Returns means and gradients over the rows of all learners; with one learner, returns the arguments.

    Args:
      means: means of this learner.
      by_group: gradients of this learner's losses, in the order of the losses; may be empty.
    """
    if means.num_rows is None:
        return means, by_group
    others = [each for each in (means.stop, means.kl) if each is not None]
    numbers = torch.stack([*means.losses.values(), *others]).detach()
    vectors = [(vector, k) for k, vectors in enumerate(by_group.values()) for vector in vectors]
    parts = [means.num_rows, numbers * means.num_rows, *(vector * means.num_rows[k] for vector, k in vectors)]
    summed = replicas.total(torch.cat(parts)).split([len(part) for part in parts])
    num_rows = summed[0].clamp(min=1)
    numbers = summed[1] / num_rows
    remaining = iter(numbers)
    losses = {name: next(remaining) for name in means.losses}
    stop, kl = (None if each is None else next(remaining) for each in (means.stop, means.kl))
    divided = iter((each / num_rows[k]).to(vector.dtype) for each, (vector, k) in zip(summed[2:], vectors))
    return Means(losses, stop, kl, num_rows), {name: [next(divided) for _ in each] for name, each in by_group.items()}


def _mean_of(name: str, rows: torch.Tensor, mask: torch.Tensor, algorithm: RLAlgorithm) -> torch.Tensor:
    """Returns the 0-d mean of a field of `LossInfo` over the rows that train."""
    if rows.shape != mask.shape:
        raise UsageError(
            f"LossInfo.{name} of {type(algorithm).__name__} has shape {tuple(rows.shape)}; it must be one number for "
            f"each row of {tuple(mask.shape)}"
        )
    return masked_mean(rows.detach(), mask)


def _mask(batch: Batch, rows: torch.Tensor) -> torch.Tensor:
    """Returns the mask of the first T' rows of a batch, where `rows` is `[T', N]`."""
    return batch.mask[: len(rows)] if rows.ndim and len(rows) else batch.mask


def _norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    norms = [torch.linalg.vector_norm(gradient).float() for gradient in gradients]
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
