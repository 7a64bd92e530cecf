"""The learner: trains an algorithm's parameters on batches.

For each minibatch it calls train_step and calc_loss. For each parameter group it takes the mean of the loss over
trainable rows, the gradient of that loss for this group's parameters only, and an optimizer step with the clipped
gradient (`updates`). Then it calls after_update. With `Learner.compile` everything up to the optimizer step is one
graph (`compiled_updates`).

Numbers for summaries stay on the device until a summary is due.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import gin
import torch
from absl import logging

from alfish import nest, replicas
from alfish.algorithms.acting import in_eval_mode
from alfish.algorithms.delayed_actor import DelayedActor
from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.batches import Minibatches
from alfish.compiler.inductor import NotCompilable
from alfish.compiler.torch_internals import TorchChanged
from alfish.data import Batch
from alfish.errors import UsageError
from alfish.learner import compile_plan
from alfish.learner.compiled_later import CompiledLater
from alfish.learner.compiled_updates import CompiledUpdates
from alfish.learner.optimizers import Adam, Optimizer
from alfish.learner.parts import FrozenParts
from alfish.learner.update_means import UpdateMeans
from alfish.learner.updates import Updates, UpdateStats, extra_sums
from alfish.nest import Nest
from alfish.parameters import NonNegativeFloat, PositiveFloat, PositiveInt, checked
from alfish.runs import random_state
from alfish.schedules import Schedule, as_schedule

# A compiled update with fewer multiplications takes less than 2 ms on a CPU, and a sum over learners 0.25 to 0.7 ms.
SMALL_UPDATE = 20_000_000


@gin.configurable(module="alfish")
@checked
class Learner:
    """Makes the updates of an iteration, plain or compiled, and computes their summaries.

    Args:
      algorithm: to train, on its device.
      optimizer: class or factory of an optimizer; its argument is a group's flat vectors; see
        `alfish.learner.optimizers`.
      learning_rate: a number, a schedule of progress, or a dict from each group to one of these. The dict may also have
        parts, by the prefix of their parameters' names: `{'all': 1e-3, 'network.actor_torso.encoder': 1e-5}`.
      frozen_parts: parts of the algorithm that do not train, by the prefix of their parameters' names
        (`['network.actor_torso.encoder']`); they stay in evaluation mode.
      max_grad_norm: the largest norm of a group's gradient, to which longer ones are scaled; None: no limit.
      max_nonfinite_updates: the run ends after this number of consecutive updates with a loss or gradient that is not
        finite; such updates are skipped.
      compile: whether to compile the whole update as one graph. 'auto': in another process beside plain updates, if the
        run is long enough to save time (with a budget of seconds, from 300). The graph is used from an update on whose
        number depends on the configuration only. True: at the first batch, while training waits, which takes 10 to 15
        seconds, or 3 with a graph in the cache. Hooks that cannot be compiled run as plain updates, after a warning.
      cuda_graphs: whether to launch a compiled update on a GPU as one CUDA graph, which copies the rows; it is not done
        with several learners.
      precision: of large products and convolutions in a compiled update on a CPU, 'float32' or 'bfloat16'.

    Attributes:
      frozen: parts that do not train.
      updates: number of updates so far.
      is_small: whether updates of all rows together take less time than sums over several learners save; set by `plan`.
      log: is called with a line for each compiled update.
      before_update: is called before each update of a call with `summarize`, with the rows and the index of its
        minibatch; returns a function that is called after the update if it was made, or None. None: nothing is called.
    """

    def __init__(
        self,
        algorithm: RLAlgorithm,
        *,
        optimizer: Callable[..., Optimizer] = Adam,
        learning_rate: NonNegativeFloat | Schedule | Mapping[str, NonNegativeFloat | Schedule] = 3e-4,
        frozen_parts: Sequence[str] = (),
        max_grad_norm: PositiveFloat | None = None,
        max_nonfinite_updates: PositiveInt = 10,
        compile: bool | Literal["auto"] = "auto",
        cuda_graphs: bool = False,
        precision: Literal["float32", "bfloat16"] = "float32",
    ):
        if precision != "float32" and compile is not True:
            raise UsageError(f"Learner.precision = {precision!r} requires Learner.compile = True")
        if cuda_graphs and compile is False:
            raise UsageError("Learner.cuda_graphs = True requires Learner.compile = True or 'auto'")
        self._algorithm = algorithm
        self._progress = nest.host_view(algorithm.progress)
        self.frozen = FrozenParts(algorithm, frozen_parts)
        self._plain = Updates(algorithm, optimizer, max_grad_norm, _parts_of(learning_rate, algorithm))
        self.frozen.check(self._plain.groups)
        self.log: Callable[[str], Any] = logging.info
        self.before_update: Callable[[Minibatches, Nest], Callable[[], None] | None] | None = None
        self._compile = functools.partial(
            CompiledUpdates, self._plain, precision, cuda_graphs, lambda line: self.log(line)
        )
        self._compiled: CompiledUpdates | CompiledLater | None = self._compile() if compile is True else None
        self._decides = compile == "auto"
        self._learning_rates = self._schedules(learning_rate)
        self._max_nonfinite_updates = max_nonfinite_updates
        self._fell_back = False
        self.updates, self.is_small = 0, False
        self._means = UpdateMeans(self._plain.groups)

    @property
    def is_plain(self) -> bool:
        """True if updates are plain, not compiled."""
        return self._compiled is None

    def plan(self, num_updates: float, num_rows: int) -> None:
        """Decides whether `compile = 'auto'` compiles.

        Args:
          num_updates: number of updates of the whole run.
          num_rows: number of rows in each.
        """
        num_parameters = sum(flat.numel() for group in self._plain.groups.values() for flat in group.flat)
        self.is_small = num_rows * replicas.size() * num_parameters < SMALL_UPDATE
        work = num_rows * num_parameters
        if not self._decides or self._compiled is not None:
            return
        pays = compile_plan.pays_in_foreground(num_updates, work)
        is_alone = self._plain.on_cpu and not replicas.is_joined()
        if is_alone and compile_plan.pays_beside(num_updates, work):
            first = compile_plan.first_compiled_update(work)
            self._compiled = CompiledLater(self._plain, self._compile(), first, pays, lambda line: self.log(line))
        elif pays:
            self._compiled = self._compile()

    @property
    def is_switching(self) -> bool:
        """True if the next call of `train` begins to use the compiled update, for which it may wait."""
        later = self._compiled
        return type(later) is CompiledLater and self.updates >= later.first

    def switch(self, waiting: contextlib.AbstractContextManager[None] | None = None) -> None:
        """Waits for the compiled update and uses it from now on; only if `is_switching`.

        Args:
          waiting: context in which to wait, which a signal may end; None: nothing ends it.
        """
        assert isinstance(self._compiled, CompiledLater)
        try:
            with waiting or contextlib.nullcontext():
                self._compiled.wait(self.updates)
            self._compiled = self._compiled.finished(self.updates)
        except (NotCompilable, TorchChanged) as error:
            self._fall_back(error)

    def close(self) -> None:
        """Ends a compilation that is not in use yet."""
        if self._compiled is not None:
            self._compiled.close()

    def train(self, chunks: Iterable[Minibatches], summarize: bool = True) -> dict[str, float]:
        """Updates on every minibatch of the chunks.

        Args:
          chunks: rows and the minibatches in them, from a source of batches.
          summarize: whether to return scalars, which waits for the device.

        Returns:
          `loss` and `grad_norm`, means of finite values over the updates since the last summary (with several groups
          `loss/critic` and so on); the `learning_rate`; `nonfinite_updates` so far; and means of `LossInfo.extra`.
          Plain updates compute `extra` in calls with `summarize` only, compiled ones always. An empty dict if this call
          made no update.

        Raises:
          RunError: `max_nonfinite_updates` consecutive updates were not finite. On a GPU a call that does not summarize
            leaves its own updates to the next call.
        """
        if not self._plain.on_cpu:  # after the updates it would wait for them
            self._plain.check_skips(self._max_nonfinite_updates, self.updates)
        progress = float(self._progress)
        self._learning_rate = {name: float(schedule(progress)) for name, schedule in self._learning_rates.items()}
        before = self.updates
        if self._compiled is not None and self.is_switching:
            self.switch()
        with torch.no_grad():  # an update enables gradients itself
            self._means.add(self._updates(chunks, summarize))
        if self._compiled is not None:
            self._compiled.forget_batch()
        return self._finish(summarize and self.updates > before)

    def unreported(self) -> dict[str, float]:
        """Returns the scalars of updates since the last summary, as `train` does; empty if there were none."""
        return self._finish(summarize=not self._means.is_empty)

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> dict[str, float]:
        """Returns the losses and extras of a batch as `train` does, without training; no random state changes."""
        with self._showing_losses():
            means, loss_info = self._plain.means(batch)
        values = {self._means.name("loss", name): float(loss.detach()) for name, loss in means.losses.items()}
        sums = extra_sums(loss_info, batch)
        return values | {name: float(total / count.clamp(min=1)) for name, (total, count) in sums.items()}

    def gradients(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Returns the gradient of each trained parameter's own loss on a batch, by name; no random state changes.

        Gradients are those of this learner's rows, and are not clipped.
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

    @contextlib.contextmanager
    def _showing_losses(self) -> Iterator[None]:
        """Prepares the algorithm for losses that are only shown: all of them, with gradients, which a loss may need."""
        delayed = [part for part in self._algorithm.modules() if isinstance(part, DelayedActor)]
        with in_eval_mode(self._algorithm), random_state.preserved(), replicas.apart(), torch.enable_grad():
            try:
                for part in delayed:
                    part.shows_all_losses = True
                yield
            finally:
                for part in delayed:
                    part.shows_all_losses = False

    def state_dict(self) -> dict[str, Any]:
        plain = self._plain
        optimizers = {name: optimizer.state_dict() for name, optimizer in plain.optimizers.items()}
        counters = {
            "num_applied": plain.num_applied,
            "consecutive_skips": plain.consecutive_skips,
            "updates": self.updates,
        }
        frozen = {"frozen_parts": self.frozen.names} if self.frozen.names else {}
        later = self._compiled
        falls_back = type(later) is CompiledLater and self.is_switching and later.has_failed  # at the next update
        return {"optimizers": optimizers, "fell_back": self._fell_back or falls_back, **frozen, **counters}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        there = list(state["optimizers"]), state.get("frozen_parts", [])
        here = list(self._plain.optimizers), self.frozen.names
        if there != here:
            raise UsageError(
                f"the checkpoint has optimizers of {there[0]} and frozen parts {there[1]}, and this run of {here[0]} "
                f"and {here[1]}; keep the parts in Learner.learning_rate and in Learner.frozen_parts, or start in an "
                "empty directory"
            )
        for name, optimizer in self._plain.optimizers.items():
            optimizer.load_state_dict(state["optimizers"][name])
        for name in ("num_applied", "consecutive_skips"):
            if not state[name].isfinite():
                raise ValueError(f"{name} is {state[name]}")
        self._plain.num_applied.copy_(state["num_applied"])
        self._plain.consecutive_skips.copy_(state["consecutive_skips"])
        self.updates = state["updates"]
        if state.get("fell_back"):  # a new graph might find the difference later
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
                stops = record is None  # the algorithm requests it
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
            self.updates += 1
            self._algorithm.after_update()
        return record

    def _fall_back(self, error: Exception) -> None:
        logging.warning("%s cannot be compiled, and its updates stay plain: %s", type(self._algorithm).__name__, error)
        self.close()
        self._compiled, self._fell_back = None, True

    def _priority(self, record: UpdateStats) -> torch.Tensor:
        if record.priority is None:
            raise UsageError(
                f"replay draws windows by priority, and calc_loss of {type(self._algorithm).__name__} returns no "
                "LossInfo.priority; use @Uniform"
            )
        return record.priority

    def _finish(self, summarize: bool) -> dict[str, float]:
        if summarize or self._plain.on_cpu:
            self._plain.check_skips(self._max_nonfinite_updates, self.updates)
        if not summarize:
            return {}
        result = self._means.take()
        for name, learning_rate in self._learning_rate.items():
            is_only = len(self._learning_rate) == 1
            result["learning_rate" if is_only else f"learning_rate/{name}"] = learning_rate
        result["nonfinite_updates"] = self.updates - float(self._plain.num_applied)
        return result

    def _schedules(self, learning_rate: Any) -> dict[str, Schedule]:
        """Returns the learning rate of each optimizer."""
        names = list(self._plain.optimizers)
        if not isinstance(learning_rate, Mapping):
            return {name: as_schedule(learning_rate) for name in names}
        missing = [group for group in self._plain.groups if group not in learning_rate]
        if missing:
            raise UsageError(
                f"Learner.learning_rate is for {sorted(learning_rate)}, and the groups are "
                f"{sorted(self._plain.groups)}; give each a number"
            )
        keys = {
            name: name.removeprefix(f"{group}/") for group, own in self._plain.groups.items() for name, _ in own.parts
        }
        return {name: as_schedule(learning_rate[keys[name]]) for name in names}


def _parts_of(learning_rate: Any, algorithm: RLAlgorithm) -> list[str]:
    """Returns the keys of a learning rate that are no groups."""
    if not isinstance(learning_rate, Mapping):
        return []
    groups = algorithm.parameter_groups()
    return [name for name in learning_rate if name not in groups]
