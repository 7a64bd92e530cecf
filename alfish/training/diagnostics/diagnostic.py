"""The interface of diagnostics, the update that diagnostics receive, and `PhaseTimes`."""

import abc
import contextlib
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import gin
import torch

from alfish.algorithms.acting import in_eval_mode
from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.data import Batch, Experience
from alfish.functional.return_distributions import Distribution
from alfish.functional.values import Vector
from alfish.learner.batches import Minibatches
from alfish.learner.batches.batches import take
from alfish.nest import Nest
from alfish.parameters import checked
from alfish.processes import replicas
from alfish.runs import random_state
from alfish.runs.timer import LOOP
from alfish.runs.writers import Shown
from alfish.training.listener import LISTENERS, Run
from alfish.training.loop import COLLECT, METRICS, SAMPLE, STORE, UPDATE


class LastUpdate:
    """The last update of an iteration.

    Args:
      chunk: chunk that contains the minibatch of the update.
      index: index of this minibatch, one of `chunk.minibatches()`.
      parameters: parameters of the algorithm before the update, by name; the constructor copies them.
    """

    def __init__(self, chunk: Minibatches, index: Nest, parameters: Mapping[str, torch.Tensor]):
        self._chunk, self._index = chunk, index
        self.before = {name: value.detach().clone() for name, value in parameters.items() if value.requires_grad}

    @cached_property
    def batch(self) -> Batch:
        """The minibatch. If transforms augment it, they draw other random numbers than in the update."""
        with random_state.preserved():
            return take(self._chunk.source, self._index)


class Diagnostic(abc.ABC):
    """Computes values for summaries. `measure` is called periodically after an iteration, and must not change the run.

    Attributes:
      is_of_policy: whether the values describe a policy. If True, a run of several policies measures each policy.
    """

    is_of_policy = True

    def start(self, run: Run) -> None:
        """Prepares the diagnostic, before the first iteration and after a resume.

        Raises:
          UsageError: the diagnostic cannot be computed for this run.
        """

    @abc.abstractmethod
    def measure(self, run: Run, update: LastUpdate) -> dict[str, Shown]:
        """Returns values by name; the first segment of each name is unique to the diagnostic.

        Args:
          run: run after the iteration.
          update: last update of the iteration.
        """

    def close(self) -> None:
        """Releases the resources that `start` acquired."""


@contextlib.contextmanager
def reading(algorithm: RLAlgorithm) -> Iterator[None]:
    """Context in evaluation mode, without gradients and sums over learners; restores modes and random states."""
    with in_eval_mode(algorithm), random_state.preserved(), replicas.apart(), torch.no_grad():
        yield


def info_of(algorithm: RLAlgorithm, experience: Experience) -> Any:
    """Returns the info of `train_step`.

    Gradients are enabled, because `train_step` may compute gradients.
    """
    with torch.enable_grad():
        return algorithm.train_step(experience, experience.state).info


def module_of(name: str, depth: int) -> str:
    """Returns the first `depth` parts of a parameter's name: `critic.mlp` for `critic.mlp.0.weight` with depth 2."""
    parts = name.split(".")
    return ".".join(parts[: max(1, min(depth, len(parts) - 1))])


def value_estimates(algorithm: RLAlgorithm, info: Any) -> dict[str, torch.Tensor]:
    """Returns the detached estimates `value` and `q` if the info of `train_step` contains them.

    Estimates are `[T', N]`, or `[T', N, R]` for vector rewards that are not scalarized yet. Distributions and ensembles
    are replaced with their means.

    Args:
      algorithm: algorithm whose `values` convert network outputs to estimates; without `values`, an output is the
        estimate. A wrapper's attribute `algorithm` is the wrapped algorithm.
      info: info that `train_step` returned. The field `algorithm` of a wrapper's info is the info of the wrapped
        algorithm.
    """
    values = getattr(getattr(algorithm, "algorithm", algorithm), "values", None)
    info, estimates = getattr(info, "algorithm", info), {}
    for name in ("value", "q"):
        estimate = getattr(info, name, None)
        if not isinstance(estimate, torch.Tensor):
            continue
        estimate = estimate.detach()
        if isinstance(values, Distribution) and estimate.ndim > 2:
            estimate = values.scalarized(estimate)
        is_ensemble = estimate.ndim > (3 if isinstance(values, Vector) else 2)
        estimates[name] = estimate.mean(0) if is_ensemble else estimate
    return estimates


PHASES = {
    COLLECT: "collect",
    METRICS: "metrics",
    STORE: "store",
    SAMPLE: "sample",
    UPDATE: "update",
    LISTENERS: "listeners",
    LOOP: "rest",
}


@gin.configurable(module="alfish.training.diagnostics")
@checked
class PhaseTimes(Diagnostic):
    """Mean time of each phase of an iteration since the last measurement, in milliseconds."""

    is_of_policy = False

    def start(self, run: Run) -> None:
        run.timer.start()
        self._before, self._iterations = dict(run.timer.seconds), run.clock.iterations

    def measure(self, run: Run, update: LastUpdate) -> dict[str, Shown]:
        now, iterations = dict(run.timer.seconds), run.clock.iterations
        count = max(1, iterations - self._iterations)
        spent = {phase: now.get(phase, 0.0) - self._before.get(phase, 0.0) for phase in PHASES}
        self._before, self._iterations = now, iterations
        return {f"time/phase/{name}_ms": 1000 * spent[phase] / count for phase, name in PHASES.items()}
