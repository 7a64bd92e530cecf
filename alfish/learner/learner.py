"""The learner: trains an algorithm's parameters on batches.

For each minibatch, the learner calls train_step and calc_loss. For each parameter group, it averages the group's loss
over trainable rows, computes the gradient of this mean for the group's parameters only, clips the gradient, and makes
an optimizer step (`updates`). Then the learner calls after_update. With `Learner.compile`, one graph computes
everything from train_step to the optimizer step (`compiled_updates`).

Numbers for summaries stay on the device until a summary is due.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import gin
import torch
from absl import logging

from alfish import nest
from alfish.algorithms.acting import in_eval_mode
from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.compiler.inductor import NotCompilable
from alfish.compiler.torch_internals import TorchChanged
from alfish.data import Batch
from alfish.errors import UsageError
from alfish.learner import compiled_later
from alfish.learner.batches import Minibatches
from alfish.learner.compiled_later import CompiledLater
from alfish.learner.compiled_updates import CompiledUpdates
from alfish.learner.groups import FrozenParts
from alfish.learner.kl_adaptive import KLAdaptive
from alfish.learner.optimizers import Adam, Optimizer
from alfish.learner.update_means import UpdateMeans
from alfish.learner.updates import Updates, UpdateStats, extra_sums
from alfish.nest import Nest
from alfish.networks.buffers import BufferKeeper
from alfish.parameters import NonNegativeFloat, PositiveFloat, PositiveInt, checked
from alfish.parameters.schedules import Schedule, as_schedule
from alfish.processes import replicas
from alfish.runs import random_state

# Number of multiplications (rows * parameters) of an update below which several learners save no time: a smaller
# compiled update takes less than 2 ms on a CPU, and a sum over learners takes 0.25 to 0.7 ms.
SMALL_UPDATE = 20_000_000


@gin.configurable(module="alfish")
@checked
class Learner:
    """Makes the updates of an iteration, as plain Python or compiled, and computes their summaries.

    Args:
      algorithm: algorithm to train, on its device.
      optimizer: class or factory of an optimizer, see `alfish.learner.optimizers`; called with a list of flat parameter
        vectors.
      learning_rate: learning rate of the optimizer: a number, a schedule of progress, a rate that follows the KL
        (`@KLAdaptive()`), or a dict from each group's name to one of these. The dict may also have parts of groups as
        keys, which are prefixes of parameter names: `{'all': 1e-3, 'network.actor_torso.encoder': 1e-5}`.
      frozen_parts: prefixes of the names of parameters that do not train, such as `['network.actor_torso.encoder']`;
        the modules of these parts stay in evaluation mode.
      max_grad_norm: maximum norm of a group's gradient; a gradient with a larger norm is scaled down to this norm. None
        means no limit.
      max_nonfinite_updates: number of consecutive updates with a non-finite loss or gradient after which the run ends;
        each of these updates is skipped.
      compile: whether to compile the whole update as one graph. 'auto' compiles if the run is long enough to save time;
        a budget in seconds must be at least 300. On a CPU with one learner, another process compiles while plain
        updates continue; the number of plain updates depends on the configuration only. True compiles at the first
        batch, while training waits for 10 to 15 seconds, or for 3 seconds if the cache has the graph. If the hooks
        cannot be compiled, a warning is logged, and updates run without compilation.
      cuda_graphs: whether to launch a compiled update on a GPU as one CUDA graph. Rows that are not in a replay ring
        are first copied to fixed memory. Has no effect with several learners.
      precision: precision of matrix products in updates, 'float32', 'tf32' or 'bfloat16'. 'tf32' is for all products on
        a GPU, with 10 bits after the point instead of 23, and has no effect on a CPU. 'bfloat16' is for large products
        and convolutions of a compiled update.

    Attributes:
      frozen: parts that do not train.
      learning_rates: schedule of each optimizer's learning rate, by the optimizer's name.
      updates: number of updates so far. On a GPU, updates that `LossInfo.stop` skipped are included until the next call
        of `train`; a call with `summarize` subtracts them at once.
      is_small: whether several learners save no time because an update is small; set by `plan`.
      log: function that is called with messages about compilation.
      restore_buffers: function that restores the tensors of buffers to which code has assigned other tensors, see
        `BufferKeeper`.
      before_update: function that is called before each update of `train` with `summarize`; its arguments are a chunk
        of minibatches and the index of the minibatch in it. The function may return a second function, which is called
        after the update if the algorithm does not request a stop. None means no function.
    """

    def __init__(
        self,
        algorithm: RLAlgorithm,
        *,
        optimizer: Callable[..., Optimizer] = Adam,
        learning_rate: NonNegativeFloat
        | Schedule
        | KLAdaptive
        | Mapping[str, NonNegativeFloat | Schedule | KLAdaptive] = 3e-4,
        frozen_parts: Sequence[str] = (),
        max_grad_norm: PositiveFloat | None = None,
        max_nonfinite_updates: PositiveInt = 10,
        compile: bool | Literal["auto"] = "auto",
        cuda_graphs: bool = False,
        precision: Literal["float32", "bfloat16", "tf32"] = "float32",
    ):
        if precision == "bfloat16" and compile is not True:
            raise UsageError(f"Learner.precision = {precision!r} requires Learner.compile = True")
        if cuda_graphs and compile is False:
            raise UsageError("Learner.cuda_graphs = True requires Learner.compile = True or 'auto'")
        self._algorithm = algorithm
        self._progress = nest.host_view(algorithm.progress)
        self.frozen = FrozenParts(algorithm, frozen_parts)
        self._plain = Updates(algorithm, optimizer, max_grad_norm, _parts_of(learning_rate, algorithm))
        self.frozen.check(self._plain.groups)
        self._algorithms = [part for part in algorithm.modules() if isinstance(part, RLAlgorithm)]
        self.restore_buffers = BufferKeeper(algorithm).restore
        self.learning_rates = self._schedules(learning_rate)
        self.log: Callable[[str], Any] = logging.info
        self.before_update: Callable[[Minibatches, Nest], Callable[[], None] | None] | None = None
        self._compile = functools.partial(
            CompiledUpdates, self._plain, precision, cuda_graphs, lambda line: self.log(line)
        )
        self._compiled: CompiledUpdates | CompiledLater | None = self._compile() if compile is True else None
        self._decides, self._fell_back = compile == "auto", False
        self._precision, self._max_nonfinite_updates = precision, max_nonfinite_updates
        self._tell(0)
        self.updates, self.is_small = 0, False
        self._learning_rate: dict[str, float] = {}  # rates of the last updates
        self._means = UpdateMeans(self._plain.groups)

    @property
    def is_plain(self) -> bool:
        """True if updates are not compiled."""
        return self._compiled is None

    def plan(self, num_updates: float, num_rows: int) -> None:
        """Decides whether `compile = 'auto'` compiles.

        Args:
          num_updates: number of updates of the whole run.
          num_rows: number of this learner's rows in each update.
        """
        num_parameters = sum(flat.numel() for group in self._plain.groups.values() for flat in group.flat)
        self.is_small = num_rows * replicas.size() * num_parameters < SMALL_UPDATE
        work = num_rows * num_parameters
        if not self._decides or self._compiled is not None:
            return
        pays = compiled_later.pays_in_foreground(num_updates, work)
        is_alone = self._plain.on_cpu and not replicas.is_joined()
        if is_alone and compiled_later.pays_beside(num_updates, work):
            first = compiled_later.first_compiled_update(work)
            self._compiled = CompiledLater(self._plain, self._compile(), first, pays, lambda line: self.log(line))
        elif pays:
            self._compiled = self._compile()

    @property
    def is_switching(self) -> bool:
        """True if the next call of `train` switches to compiled updates; the call may wait for compilation."""
        later = self._compiled
        return type(later) is CompiledLater and self.updates >= later.first

    def switch(self, waiting: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext) -> None:
        """Waits for compilation and switches to compiled updates. Call it only if `is_switching`.

        Args:
          waiting: function that returns a context manager; the wait takes place in its context, so that a signal may
            end the wait.
        """
        assert isinstance(self._compiled, CompiledLater)
        try:
            with waiting():
                self._compiled.wait(self.updates)
            self._compiled = self._compiled.finished(self.updates)
        except (NotCompilable, TorchChanged) as error:
            self._fall_back(error)

    def close(self) -> None:
        """Ends the process that compiles, if there is one."""
        if self._compiled is not None:
            self._compiled.close()

    def train(self, chunks: Iterable[Minibatches], summarize: bool = True) -> dict[str, float]:
        """Makes an update on every minibatch of the chunks.

        Args:
          chunks: rows and the minibatches in them, from a source of batches.
          summarize: whether to return scalars, which waits for the device.

        Returns:
          A dict with the means of the finite values of `loss` and `grad_norm` over the updates since the last summary
          (with several groups `loss/critic` and so on), the `learning_rate`, the number of `nonfinite_updates` so far,
          and means of `LossInfo.extra`. The means of `extra` are over all compiled updates, or over the plain updates
          of calls with `summarize`. The dict is empty if `summarize` is False or if this call made no update.

        Raises:
          RunError: `max_nonfinite_updates` consecutive updates were not finite. On a GPU, a call without `summarize`
            does not check its own updates; the next call checks them.
        """
        if not self._plain.on_cpu:  # a check after the updates would wait for the GPU
            self._plain.check_noted_skips(self._max_nonfinite_updates, self.updates)
            self._settle()
        progress = float(self._progress) if self._plain.on_cpu else self._algorithm.progress_number()
        self._learning_rate = {name: float(schedule(progress)) for name, schedule in self.learning_rates.items()}
        before = self.updates
        if type(self._compiled) is CompiledLater and self.is_switching:
            self.switch()
        updates = self._updates(chunks, summarize)
        if self._precision == "tf32" and not self._plain.on_cpu:
            updates = _in_tf32(updates)
        with torch.no_grad():  # an update enables gradients itself
            self._means.add(updates)
        if self._compiled is not None:
            self._compiled.forget_batch()
        if not self._plain.on_cpu:
            self._plain.note()
            if summarize:
                self._settle()
        return self._finish(summarize and self.updates > before)

    def unreported(self) -> dict[str, float]:
        """Returns the scalars of updates since the last summary, as `train` does; empty without updates."""
        return self._finish(summarize=not self._means.is_empty)

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> dict[str, float]:
        """Returns the losses and extras of a batch as `train` does, without training. Random states stay unchanged."""
        with self._showing_losses():
            means, loss_info = self._plain.means(batch)
        values = {self._means.name("loss", name): float(loss.detach()) for name, loss in means.losses.items()}
        sums = extra_sums(loss_info, batch)
        return values | {name: float(total / count.clamp(min=1)) for name, (total, count) in sums.items()}

    def gradients(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Returns gradients on a batch by parameter name; each parameter has the gradient of its group's loss.

        Random states stay unchanged. Gradients are computed on this learner's rows, and are not clipped.
        """
        plain = self._plain
        names = {id(parameter): name for name, parameter in self._algorithm.named_parameters()}
        found: dict[str, torch.Tensor] = {}
        with self._showing_losses():
            means, _ = plain.means(batch)
            for name, loss in means.losses.items():
                group = plain.groups[name]
                vectors = group.gradients(loss, group.parameters, retain_graph=True)
                found |= {names[id(p)]: view for p, view in zip(group.parameters, group.views(vectors), strict=True)}
        return found

    def num_loss_rows(self, batch: Batch) -> int:
        """Returns how many leading rows of a batch have a loss; without memory, only row 0 has one.

        Random states stay unchanged.
        """
        with self._showing_losses():
            loss = self._plain.means(batch)[1].loss
        return max(map(len, loss.values())) if isinstance(loss, dict) else len(loss)

    @contextlib.contextmanager
    def _showing_losses(self) -> Iterator[None]:
        """Prepares the algorithm for computing the losses of all groups without training."""
        with in_eval_mode(self._algorithm), random_state.preserved(), replicas.apart(), torch.enable_grad():
            try:
                self._tell(-1)  # with this number of updates, each group trains in the next update
                yield
            finally:
                self._tell(self.updates)

    def state_dict(self) -> dict[str, Any]:
        plain = self._plain
        self._settle()
        optimizers = {name: optimizer.state_dict() for name, optimizer in plain.optimizers.items()}
        counters: dict[str, Any] = {
            "num_applied": plain.num_applied,
            "consecutive_skips": plain.consecutive_skips,
            "updates": self.updates,
            "means": self._means.state_dict(),
            "learning_rate": dict(self._learning_rate),  # reported with the means, even if no update follows
        }
        frozen = {"frozen_parts": self.frozen.names} if self.frozen.names else {}
        rates = {"rates": plain.rates} if plain.rates else {}
        later = self._compiled
        # True if the switch that is due will fail, so that updates stay plain.
        falls_back = type(later) is CompiledLater and self.is_switching and later.has_failed
        return {"optimizers": optimizers, "fell_back": self._fell_back or falls_back, **frozen, **rates, **counters}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        there = list(state["optimizers"]), state.get("frozen_parts", [])
        here = list(self._plain.optimizers), self.frozen.names
        if there != here:
            raise UsageError(
                f"the checkpoint has optimizers of {there[0]} and frozen parts {there[1]}, but this run has {here[0]} "
                f"and {here[1]}; keep the parts in Learner.learning_rate and in Learner.frozen_parts, or start in an "
                "empty directory"
            )
        for name, optimizer in self._plain.optimizers.items():
            optimizer.load_state_dict(state["optimizers"][name])
        for name in ("num_applied", "consecutive_skips"):
            if not state[name].isfinite():
                raise ValueError(f"{name} is {state[name]}")
        for name, rate in state.get("rates", {}).items():
            if name in self._plain.rates:
                self._plain.rates[name].copy_(self._plain.leads[name].bounded(rate))
        self._plain.num_applied.copy_(state["num_applied"])
        self._plain.consecutive_skips.copy_(state["consecutive_skips"])
        if not self._plain.on_cpu:
            self._plain.note()
        self.updates = state["updates"]
        self._tell(self.updates)
        self._means.load_state_dict(state.get("means", {}), self._plain.num_applied.device)
        self._learning_rate = dict(state.get("learning_rate", {}))  # older versions did not save it
        if state.get("fell_back"):  # else a new graph would be used until a comparison fails
            self._compiled, self._fell_back = None, True

    def _updates(self, chunks: Iterable[Minibatches], summarize: bool) -> Iterator[UpdateStats]:
        for chunk in chunks:
            priorities: list[torch.Tensor] = []
            stops = False
            for index in chunk.minibatches():
                made = None
                if summarize and self.before_update is not None:
                    made = self.before_update(chunk, index)
                record = self._update(chunk, index, summarize)
                stops = record is None  # the algorithm requests a stop
                if record is None:
                    break
                if made is not None:
                    made()
                if chunk.update_priorities is not None:
                    priorities.append(self._priority(record))
                yield record
            if priorities and chunk.update_priorities is not None:
                chunk.update_priorities(priorities)
            if stops:
                return

    def _update(self, chunk: Minibatches, index: Nest, summarize: bool) -> UpdateStats | None:
        if self._compiled is not None:
            try:
                record = self._compiled(chunk, index, self._learning_rate, summarize)
            except (NotCompilable, TorchChanged) as error:
                self._fall_back(error)
                return self._update(chunk, index, summarize)
        else:
            record = self._plain(chunk, index, self._learning_rate, summarize)
        if record is not None:
            self._algorithm.after_update()
            self.restore_buffers()
            self.updates += 1
            for part in self._algorithms:
                part.__dict__["num_updates"] = self.updates  # faster than a call of `__setattr__`
        return record

    def _settle(self) -> None:
        """On a GPU, subtracts updates that a stop skipped from the number of updates."""
        if num_stopped := self._plain.settle():
            self.updates -= num_stopped
            self._tell(self.updates)

    def _tell(self, updates: int) -> None:
        for part in self._algorithms:
            part.__dict__["num_updates"] = updates  # a module's `__setattr__` takes longer

    def _fall_back(self, error: Exception) -> None:
        self._plain.check_parameters()  # a parameter with other memory is a cause that no plain update cures
        logging.warning(
            "%s cannot be compiled, so its updates run as plain Python: %s", type(self._algorithm).__name__, error
        )
        self.close()
        self._compiled, self._fell_back = None, True

    def _priority(self, record: UpdateStats) -> torch.Tensor:
        if record.priority is None:
            raise UsageError(
                f"replay samples windows by priority, but calc_loss of {type(self._algorithm).__name__} returns no "
                "LossInfo.priority; use @Uniform"
            )
        return record.priority

    def _finish(self, summarize: bool) -> dict[str, float]:
        if summarize or self._plain.on_cpu:
            self._plain.check_skips(self._max_nonfinite_updates, self.updates)
        if not summarize:
            return {}
        self._plain.check_parameters()
        result = self._means.take()
        for name, learning_rate in (self._learning_rate | self._plain.rates).items():
            is_only = len(self._learning_rate) == 1
            result["learning_rate" if is_only else f"learning_rate/{name}"] = float(learning_rate)
        result["nonfinite_updates"] = self.updates - float(self._plain.num_applied)
        return result

    def _schedules(self, learning_rate: Any) -> dict[str, Schedule]:
        """Returns the schedule of each optimizer's learning rate; a KL-adaptive rate has the constant schedule 1."""
        given = self._given_rates(learning_rate)
        leads = {name: rate for name, rate in given.items() if isinstance(rate, KLAdaptive)}
        self._plain.lead(leads)
        if leads:
            for part in self._algorithms:
                part.measures_kl = True
        # Optimizers with the same rate share its schedule.
        own = {id(rate): as_schedule(rate) for rate in given.values() if not isinstance(rate, KLAdaptive)}
        return {name: as_schedule(1.0) if name in leads else own[id(rate)] for name, rate in given.items()}

    def _given_rates(self, learning_rate: Any) -> dict[str, Any]:
        names = list(self._plain.optimizers)
        if not isinstance(learning_rate, Mapping):
            return dict.fromkeys(names, learning_rate)
        missing = [group for group in self._plain.groups if group not in learning_rate]
        if missing:
            raise UsageError(
                f"Learner.learning_rate is for {sorted(learning_rate)}, but the groups are "
                f"{sorted(self._plain.groups)}; give each a number"
            )
        keys = {
            name: name.removeprefix(f"{group}/") for group, own in self._plain.groups.items() for name, _ in own.parts
        }
        return {name: learning_rate[keys[name]] for name in names}


def _parts_of(learning_rate: Any, algorithm: RLAlgorithm) -> list[str]:
    """Returns the keys of a learning rate that are not names of groups."""
    if not isinstance(learning_rate, Mapping):
        return []
    groups = algorithm.parameter_groups()
    return [name for name in learning_rate if name not in groups]


def _in_tf32(updates: Iterable[UpdateStats]) -> Iterator[UpdateStats]:
    """Makes updates, in which a GPU computes matrix products in TF32."""
    settings = torch.backends.cuda.matmul
    # torch refuses its older setting once a program has used the newer one.
    name, value = ("fp32_precision", "tf32") if hasattr(settings, "fp32_precision") else ("allow_tf32", True)
    before = getattr(settings, name)
    setattr(settings, name, value)
    try:
        yield from updates
    finally:
        setattr(settings, name, before)
