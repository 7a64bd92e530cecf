"""The interface of diagnostics, and the update that they look at."""

import abc
import contextlib
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import torch

from alfish import replicas
from alfish.algorithms.acting import in_eval_mode
from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.batches import Minibatches
from alfish.batches.batches import take
from alfish.data import Batch, Experience
from alfish.nest import Nest
from alfish.runs import random_state
from alfish.training.listener import Run
from alfish.values import Distribution, Vector
from alfish.writers import Shown


class LastUpdate:
    """The last update of an iteration.

    Args:
      chunk: rows, and the minibatches in them.
      index: of the minibatch; one of `chunk.minibatches()`.
      parameters: of the algorithm, by name; copies are kept.
    """

    def __init__(self, chunk: Minibatches, index: Nest, parameters: Mapping[str, torch.Tensor]):
        self._chunk, self._index = chunk, index
        self.before = {name: value.detach().clone() for name, value in parameters.items() if value.requires_grad}

    @cached_property
    def batch(self) -> Batch:
        """The minibatch."""
        return take(self._chunk.source, self._index)


class Diagnostic(abc.ABC):
    """Shows something of a run. `measure` only reads, and is called from time to time after an iteration."""

    def start(self, run: Run) -> None:
        """Prepares the diagnostic, before the first iteration and after a resume.

        Raises:
          UsageError: it cannot be computed of this run.
        """

    @abc.abstractmethod
    def measure(self, run: Run, update: LastUpdate) -> dict[str, Shown]:
        """Returns values by name; the first segment of a name is the diagnostic's own.

        Args:
          run: after the iteration.
          update: its last update.
        """

    def close(self) -> None:
        """Frees resources of `start`."""


@contextlib.contextmanager
def reading(algorithm: RLAlgorithm) -> Iterator[None]:
    """Runs networks in evaluation mode and without gradient, apart from other learners; no random state changes."""
    with in_eval_mode(algorithm), random_state.preserved(), replicas.apart(), torch.no_grad():
        yield


def info_of(algorithm: RLAlgorithm, experience: Experience) -> Any:
    """Returns the info of `train_step`, which has gradients as in an update, because it may differentiate."""
    with torch.enable_grad():
        return algorithm.train_step(experience, experience.state).info


def module_of(name: str, depth: int) -> str:
    """Returns the module of a parameter or layer, of at most `depth` parts: `critic.mlp` of `critic.mlp.0.weight`."""
    parts = name.split(".")
    return ".".join(parts[: max(1, min(depth, len(parts) - 1))])


def value_estimates(algorithm: RLAlgorithm, info: Any) -> dict[str, torch.Tensor]:
    """Returns the estimates in what `train_step` returned, without gradient, by name: `value` and `q`, if it has them.

    They are `[T', N]`; of a vector reward `[T', N, R]`, unless they are weighted sums already. Distributions and
    ensembles have their means.

    Args:
      algorithm: with `values`; without, an estimate is one number. One that wraps another has it as `algorithm`.
      info: of the AlgStep; that of the wrapped algorithm is in `algorithm`.
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
