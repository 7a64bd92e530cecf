"""On-policy batches: the unroll itself."""

import functools
import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import gin
import torch

from alfish import nest
from alfish.algorithms.acting import reset_state, tensors_of, with_tensors
from alfish.algorithms.contract import kind_of
from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.compiler.checked_function import CheckedFunction
from alfish.data import Batch, Experience, in_line, trainable
from alfish.errors import UsageError
from alfish.learner.batches.batches import Batches, Minibatches
from alfish.nest import Nest
from alfish.parameters import PositiveInt, Range, checked
from alfish.processes import replicas
from alfish.transforms import Transforms

AUTO_SIZE = 64  # approximate number of rows of a minibatch with `minibatch_size = 'auto'`
FEW_ROWS = 256  # number of rows of an unroll below which several epochs are too noisy


@gin.configurable(module="alfish")
@checked
class EpochBatches(Batches):
    """On-policy: trains on the unroll itself for several epochs, in minibatches drawn without replacement.

    Args:
      num_epochs: number of passes over the unroll; None means 10, or 1 if the algorithm's `unroll_use` has
        `single_epoch`. Such an algorithm accepts no other number.
      minibatch_size: number of rows in a gradient step, a divisor of the unroll's rows (unroll length x environments).
        With memory, minibatches consist of whole sequences, so the number must also be a multiple of `sequence_length`.
        'auto' means the allowed number nearest to 64 by ratio. None means all rows.
      sequence_length: number of rows of each sequence that a memory trains on, a divisor of the unroll length. A
        sequence begins with the recurrent state of the rollout; gradients do not flow to earlier rows. None means the
        unroll length.

    Attributes:
      expected_rows: expected number of rows of an unroll if some agents do not act in every step; set before `bind`.
        Minibatches are then drawn from the trainable rows, or from the sequences with at least one trainable row. All
        minibatches are full, unless there are too few rows for one. Their size need not divide the rows of an unroll.
        None means that agents act in every step.
    """

    on_policy = True
    has_auxiliary_phase = False  # whether there are minibatches for `preprocess_auxiliary` of an algorithm
    expected_rows: float | None = None

    def __init__(
        self,
        num_epochs: PositiveInt | None = None,
        minibatch_size: PositiveInt | Literal["auto"] | None = None,
        sequence_length: Annotated[int, Range(2)] | None = None,
    ):
        self._given_epochs = num_epochs
        self._given_size = minibatch_size
        self._given_length = sequence_length
        self._checked: set[str] = set()  # hooks whose result was checked
        name = "the preparation of unrolls"
        self._graph = CheckedFunction(self._traced, name)
        # For unrolls in which few episodes end: this graph computes fewer rows of padding.
        self._short_graph = CheckedFunction(functools.partial(self._traced, is_short=True), name)

    def bind(self, algorithm: RLAlgorithm, transforms: Transforms, unroll_length: float, num_envs: int) -> None:
        super().bind(algorithm, transforms, unroll_length, num_envs)
        if algorithm.unroll_use.has_auxiliary_phase and not self.has_auxiliary_phase:
            raise UsageError(
                f"{type(algorithm).__name__} has an auxiliary phase, for which {type(self).__name__} has no "
                "minibatches; bind Trainer.batches = @PhasicBatches"
            )
        if augmenting := [type(each).__name__ for each in transforms.others if each.augments]:
            raise UsageError(
                f"{augmenting[0]} changes rows in training, but {type(algorithm).__name__} needs them as the policy "
                "saw them; leave the transform out, or train off-policy (DQN, SAC)"
            )
        self._has_state = algorithm.has_state
        self._num_epochs = self._given_epochs or (1 if algorithm.unroll_use.single_epoch else 10)
        if algorithm.unroll_use.single_epoch and self._num_epochs > 1:
            raise UsageError(
                f"EpochBatches.num_epochs is {self._num_epochs}, but {type(algorithm).__name__} can train on an unroll "
                "only once: no ratio in its loss corrects for earlier updates; set num_epochs to 1, or train with PPO "
                "(your own algorithm with such a ratio, or without a policy gradient, sets unroll_use = "
                "UnrollUse(single_epoch=False))"
            )
        if unroll_length < 1 or unroll_length != int(unroll_length):
            raise UsageError(f"Trainer.unroll_length is {unroll_length}; on-policy it must be an integer of at least 1")
        if self._has_state and unroll_length < 2:
            raise UsageError(
                f"Trainer.unroll_length is 1, but the memory of {type(algorithm).__name__} learns across the rows of "
                "an unroll; set unroll_length to 2 or more (ppo_recall.gin has 32)"
            )
        self._sequence_length = self._given_length or int(unroll_length)
        if self._given_length and not self._has_state:
            raise UsageError(
                f"EpochBatches.sequence_length is {self._given_length}, but {type(algorithm).__name__} has no memory; "
                "remove the setting, or give the policy a memory (Torso.memory = @GRU)"
            )
        if unroll_length % self._sequence_length:
            raise UsageError(
                f"EpochBatches.sequence_length is {self._sequence_length}, which does not divide Trainer.unroll_length "
                f"= {unroll_length}; set it to a divisor"
            )
        self.stores_states = self._sequence_length < unroll_length
        num_envs *= replicas.size()
        self._rows = rows = int(unroll_length) * num_envs
        multiple = (self._sequence_length if self._has_state else 1) * replicas.size()
        size = _nearest(AUTO_SIZE, rows, multiple) if self._given_size == "auto" else self._given_size
        self._minibatch_size = None if size is None else replicas.fraction(size, "EpochBatches.minibatch_size")
        self.updates_per_iteration, self.rows_per_update = float(self._num_epochs), (size or rows) // replicas.size()
        if size is None:
            return
        if self.expected_rows is not None:
            if size > rows:
                raise UsageError(
                    f"EpochBatches.minibatch_size is {size}, but an unroll has at most {rows} rows ({unroll_length} "
                    f"steps x {num_envs} environments); lower it, or raise Trainer.unroll_length"
                )
            rows = max(size, int(self.expected_rows) // size * size)
        if size < 1 or rows % size:
            fitting = [divisor for divisor in range(multiple, rows + 1, multiple) if rows % divisor == 0]
            nearest = sorted(sorted(fitting, key=lambda divisor: abs(divisor - size))[:2])
            raise UsageError(
                f"EpochBatches.minibatch_size is {size}, which does not divide the {rows} rows of an unroll "
                f"({unroll_length} steps x {num_envs} environments); the nearest that do are "
                f"{' and '.join(str(n) for n in nearest)}"
            )
        if self._has_state and size % multiple:
            whole = "EpochBatches.sequence_length" if self.stores_states else "the unroll length"
            of_learners = "" if replicas.size() == 1 else f" times the number of learners, {multiple}"
            raise UsageError(
                f"EpochBatches.minibatch_size is {size}; a policy with memory trains on whole sequences, so it must be "
                f"a multiple of {whole} {self._sequence_length}{of_learners}"
            )
        self.updates_per_iteration *= rows / size

    @property
    def few_rows(self) -> str:
        if self._num_epochs == 1 or self._rows >= FEW_ROWS:
            return ""
        return (
            f"An unroll has {self._rows} rows, which is few for {self._num_epochs} epochs of updates; raise "
            "make_environment.num_envs or Trainer.unroll_length (ppo.gin, or conf='ppo' of alfish.train, has 2048 "
            "rows), or lower EpochBatches.num_epochs"
        )

    def add(self, experience: Experience) -> None:
        self._experience = nest.tensors(experience, self.algorithm.progress.device)

    def chunks(self, steps: int, for_graph: bool = False) -> Iterator[Minibatches]:
        for epoch in range(self._num_epochs):
            if epoch == 0 or self.algorithm.unroll_use.preprocess_each_epoch:
                batch = self._trained_rows(for_graph)
            length, columns = batch.mask.shape
            size = columns if self._minibatch_size is None else self._minibatch_size // length
            if self.expected_rows is not None:
                if len(index := _drawn(batch.mask.any(0), size)):
                    yield Minibatches(batch, index)
                continue
            # The permutation is drawn on the CPU, so that a seed gives the same minibatches on every device.
            index = nest.to(torch.randperm(columns), batch.mask.device)
            yield Minibatches(batch, index.view(-1, size))

    def _trained_rows(self, for_graph: bool) -> Batch:
        """Returns the rows of the unroll to train on."""
        # With several learners, the graph is not used: if one learner fell back to plain Python, the other learners
        # would wait for it in a sum.
        ends = self._experience.ends
        if not for_graph or ends is None or replicas.is_joined():
            return self._batch(self._experience)
        # On a GPU, the host would have to wait for this value, so `_graph` is used.
        is_short = ends.ended.device.type == "cpu" and int(ends.ended.sum(0).max()) <= _few_ends(len(ends.ended))
        prepare = self._short_graph if is_short else self._graph
        return prepare((nest.detach(tensors_of(self.algorithm, self.transforms)), self._experience))

    def _traced(self, arguments: Nest, is_short: bool = False) -> Batch:
        """Computes `_batch` as a function of tensors: the tensors of algorithm and transforms, and the experience.

        `is_short` requires that at most `_few_ends` episodes end in each column.
        """
        tensors, experience = arguments
        length = len(experience.ends.ended)
        with with_tensors(tensors, self.algorithm, self.transforms):
            return self._batch(experience, length + 1 + (_few_ends(length) if is_short else length))

    def _batch(self, experience: Experience, num_rows: int | None = None, hook: str = "preprocess_experience") -> Batch:
        """Returns the T rows to train on, as sequences `[L, T / L * B]`; without memory, as `[1, T * B]`.

        Args:
          experience: unroll.
          num_rows: argument `num_rows` of `in_line`; None means that it is computed.
          hook: name of the algorithm's hook that prepares the unroll.
        """
        lines = in_line(experience, num_rows)
        if len(lines.experience.time_step.step_type) < 2:  # all rows are PAD, but returns need a next row
            lines = in_line(experience, 2)
        experience, places = lines
        states = None
        if self.stores_states:
            info, states = experience.info
            experience = experience._replace(info=info)
        experience = self._prepare(experience, hook=hook)
        mask = trainable(experience.time_step.step_type)
        self._check_info(experience.info, len(mask), mask.shape[1], hook)
        index: Any = slice(len(mask))
        trains = mask
        if places is not None:
            place = places[:-1]
            index = place.clamp(0, len(mask) - 1), torch.arange(mask.shape[1], device=mask.device)
            trains = mask[index] & (place == index[0])  # PAD rows and rows without a next row do not train

        def rows(leaves: Nest) -> Nest:
            if self.stores_states:
                return nest.map(self._sequences, leaves)
            return leaves if self._has_state else nest.merge_leading(leaves)

        given = experience.time_step, experience.action, experience.info
        time_step, action, info, trains = rows((*nest.at(given, index), trains))
        state = experience.state if self._has_state else None
        if self.stores_states:
            stored = nest.map(lambda leaf: leaf[index][:: self._sequence_length].flatten(0, 1), states)
            initial = nest.to(self.algorithm.initial_state(trains.shape[1]), mask.device)
            state = reset_state(stored, initial, time_step.step_type[0])
        return Batch(Experience(time_step, action, info, state), trains)

    def _sequences(self, leaf: torch.Tensor) -> torch.Tensor:
        """Returns rows `[T, B, ...]` as sequences `[L, T / L * B, ...]`; sequences of the first rows come first."""
        return leaf.unflatten(0, (-1, self._sequence_length)).transpose(0, 1).flatten(1, 2)

    def _check_info(self, info: Nest, length: int, num_envs: int, hook: str) -> None:
        """Checks the shape of the info that a hook returned; only once for each hook."""
        if hook in self._checked:
            return
        self._checked.add(hook)
        for name, leaf in nest.named_leaves(info, "info"):
            if getattr(leaf, "shape", ())[:2] not in ((length, num_envs), (length + 1, num_envs)):
                raise UsageError(
                    f"{hook} of {type(self.algorithm).__name__} returned {name}, {kind_of(leaf)}; its "
                    f"shape must begin with [{length}, {num_envs}], the rows that train"
                )


def _few_ends(length: int) -> int:
    """Returns the largest number of episode ends per column for which the short graph is used."""
    return math.ceil(length / 4)


def _nearest(size: int, rows: int, multiple: int) -> int:
    """Returns the divisor of `rows` nearest to `size` by ratio, among multiples of `multiple` if there are any."""
    divisors = [number for number in range(1, rows + 1) if rows % number == 0]
    fitting = [number for number in divisors if number % multiple == 0] or divisors
    return min(fitting, key=lambda number: abs(math.log(number / size)))


def _drawn(trains: torch.Tensor, size: int) -> torch.Tensor:
    """Returns minibatches of columns that train, in random order, `[K, size]` int64; K is 0 if no column trains.

    Args:
      trains: mask of the columns that train, `[N]` bool.
      size: number of columns of a minibatch. If fewer columns train, the only minibatch also has columns that do not
        train.
    """
    columns = trains.nonzero()[:, 0]
    # Drawn on the CPU, so that a seed gives the same minibatches on every device.
    columns = columns[nest.to(torch.randperm(len(columns)), columns.device)]
    if 0 < len(columns) < size:
        columns = torch.cat([columns, (~trains).nonzero()[: size - len(columns), 0]])
    return columns[: len(columns) // size * size].view(-1, size)
