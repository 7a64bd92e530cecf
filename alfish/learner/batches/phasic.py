"""On-policy batches of the current unroll, and in auxiliary phases of the last k unrolls."""

from collections import deque
from collections.abc import Iterator
from typing import Any

import gin
import torch

from alfish import nest
from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.data import Batch, Experience
from alfish.errors import UsageError
from alfish.learner.batches.batches import Minibatches
from alfish.learner.batches.epochs import EpochBatches
from alfish.nest import Nest
from alfish.parameters import PositiveInt, checked
from alfish.processes import replicas
from alfish.transforms import Transforms


@gin.configurable(module="alfish")
@checked
class PhasicBatches(EpochBatches):
    """On-policy: trains on each unroll as `EpochBatches` does, and in auxiliary phases on the last k unrolls.

    An algorithm with auxiliary phases sets `unroll_use = UnrollUse(has_auxiliary_phase=True, ...)` and has one more
    hook:

        preprocess_auxiliary(experience) -> Experience

    At the beginning of a phase, this source calls the hook with each kept unroll, `[T+1, B]`. As for
    `preprocess_experience`, the unroll has whole sequences after transforms, with current statistics, and gradients are
    disabled. The hook returns an info of a separate NamedTuple class. By this class, `train_step` and `calc_loss`
    recognize the minibatches of a phase.

    Unrolls are kept as they were before transforms. Every checkpoint has the kept unrolls, so a resumed run has the
    same phases.

    Args:
      num_unrolls: number of last unrolls that are kept, k; a phase trains on all k unrolls.
      auxiliary_period: number of iterations between phases; None means `num_unrolls`, so that each unroll is used in
        one phase. No phase starts before k unrolls are kept.
      num_auxiliary_epochs: number of passes over the kept unrolls in a phase.
      auxiliary_minibatch_size: number of rows in a gradient step of a phase, a divisor of the rows of k unrolls. With
        memory, it must also be a multiple of `sequence_length`. None means `minibatch_size`, or the rows of one unroll
        if `minibatch_size` is None.
      epoch_arguments: settings of `EpochBatches`.
    """

    has_auxiliary_phase = True

    def __init__(
        self,
        *,
        num_unrolls: PositiveInt = 32,
        auxiliary_period: PositiveInt | None = None,
        num_auxiliary_epochs: PositiveInt = 6,
        auxiliary_minibatch_size: PositiveInt | None = None,
        **epoch_arguments: Any,
    ):
        super().__init__(**epoch_arguments)
        self._num_unrolls, self._period = num_unrolls, auxiliary_period or num_unrolls
        self._num_auxiliary_epochs = num_auxiliary_epochs
        self._given_auxiliary_size = auxiliary_minibatch_size
        # Leaves of each kept unroll; the oldest unroll comes first.
        self._kept: deque[list[torch.Tensor]] = deque(maxlen=num_unrolls)
        self._structure: Any = None  # structure of the unrolls
        self._since_phase = 0  # number of iterations since the last phase, or since the run began

    def bind(self, algorithm: RLAlgorithm, transforms: Transforms, unroll_length: float, num_envs: int) -> None:
        super().bind(algorithm, transforms, unroll_length, num_envs)
        name = type(algorithm).__name__
        if not callable(getattr(algorithm, "preprocess_auxiliary", None)):
            raise UsageError(
                f"PhasicBatches have an auxiliary phase, but {name} has no preprocess_auxiliary; train with PPG, bind "
                "Trainer.batches = @EpochBatches, or define the hook"
            )
        if self.expected_rows is not None:
            raise UsageError(
                f"PhasicBatches keep unrolls whose columns are complete, but {name} plays agents that do not act in "
                "every step; bind another source of batches"
            )
        rows = self._num_unrolls * self._rows
        multiple = (self._sequence_length if self._has_state else 1) * replicas.size()
        size = self._given_auxiliary_size
        if size is not None and (rows % size or size % multiple):
            raise UsageError(
                f"PhasicBatches.auxiliary_minibatch_size is {size}; it must be a divisor of the {rows} rows of "
                f"{self._num_unrolls} unrolls and a multiple of {multiple}"
            )
        self._auxiliary_size = size or self._minibatch_size and self._minibatch_size * replicas.size() or self._rows
        self.updates_per_iteration += self._num_auxiliary_epochs * rows / self._auxiliary_size / self._period

    def add(self, experience: Experience) -> None:
        super().add(experience)
        leaves, self._structure = nest.flatten(self._experience)
        if self._kept and _forms(self._kept[-1]) != _forms(leaves):
            raise UsageError(
                "the checkpoint keeps unrolls of another length, or of another number of environments, for the next "
                "auxiliary phase; keep Trainer.unroll_length and make_environment.num_envs, or start a new run"
            )
        self._kept.append([leaf.clone() for leaf in leaves])  # unrollers reuse the memory of an unroll

    def chunks(self, steps: int, for_graph: bool = False) -> Iterator[Minibatches]:
        self._since_phase += 1
        yield from super().chunks(steps, for_graph)
        if self._since_phase >= self._period and len(self._kept) == self._num_unrolls:
            self._since_phase = 0
            yield from self._phase()

    def state_dict(self) -> dict[str, Any]:
        return {"since_phase": self._since_phase, "unrolls": list(self._kept)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        device = self.algorithm.progress.device
        self._since_phase = int(state["since_phase"])
        self._kept.clear()
        self._kept.extend([leaf.to(device) for leaf in leaves] for leaves in state["unrolls"])

    def _phase(self) -> Iterator[Minibatches]:
        """Yields the minibatches of an auxiliary phase."""
        unrolls = [nest.unflatten(self._structure, leaves) for leaves in self._kept]
        source = _side_by_side([self._batch(unroll, hook="preprocess_auxiliary") for unroll in unrolls])
        length, columns = source.mask.shape
        size = self._auxiliary_size // replicas.size() // length
        for _ in range(self._num_auxiliary_epochs):
            # The permutation is drawn on the CPU, so that a seed gives the same minibatches on every device.
            index = nest.to(torch.randperm(columns), source.mask.device)
            yield Minibatches(source, index.view(-1, size))


def _forms(leaves: list[torch.Tensor]) -> list[tuple[Any, ...]]:
    """Returns the shape and the dtype of each tensor."""
    return [(leaf.shape, leaf.dtype) for leaf in leaves]


def _side_by_side(batches: list[Batch]) -> Batch:
    """Returns the columns of several batches as one batch."""

    def joined(dim: int, *nests: Nest) -> Nest:
        return nest.map(lambda *leaves: torch.cat(leaves, dim), *nests)

    state = joined(0, *(batch.experience.state for batch in batches))
    rows = [batch._replace(experience=batch.experience._replace(state=None)) for batch in batches]
    batch: Batch = joined(1, *rows)
    return batch._replace(experience=batch.experience._replace(state=state))
