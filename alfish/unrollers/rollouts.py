"""Unrolls that are written while rows arrive.

`UnevenRollout` is for environments that make two rows, LAST and FIRST, in the step in which an episode ends. Each
column is written at its own pace, and PAD rows complete the shorter columns at the end. An extra row in all columns
would split transitions of the other columns. The functions are for environments in which each step makes one row of
every column.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from alfish import nest
from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.data import StepType, TimeStep
from alfish.errors import UsageError
from alfish.nest import Array, Nest, as_array, as_tensor
from alfish.processes import replicas
from alfish.unrollers.unroller import SHOWN_FIELDS, StepRecords


class UnevenRollout:
    """Rows and records of one unroll. The first rows determine the layout.

    All leaves are arrays, or all are tensors on one device.

    Args:
      num_rows: largest number of rows of a column.
      env_id: global ids of the environments, `[B]`, an array or a tensor as all other leaves.
      has_gaps: whether rows may be PAD rows, which are not written.
    """

    def __init__(self, num_rows: int, env_id: Array, has_gaps: bool = False):
        self._rows, self._columns = nest.arange(num_rows, env_id), nest.arange(len(env_id), env_id)
        self._cursor = self._columns * 0  # index of each column's next row
        self._has_gaps, self._num_steps = has_gaps, 0
        self._targets: list[Array] = []  # leaves `[num_rows, B, ...]`
        self._arrived: list[tuple[TimeStep, Array | None]] = []
        self._infos: list[tuple[int, dict[str, Any]]] = []

    @property
    def room(self) -> int:
        """Number of rows for which the fullest column has room. A step counts as a row even if columns have gaps."""
        return len(self._rows) - max(int(self._cursor.max()), self._num_steps)

    def append(self, rows: tuple[TimeStep, Nest, Nest], which: Array | None = None) -> None:
        """Writes the next row of each column.

        Args:
          rows: time step, action and info, leaves `[B, ...]`.
          which: columns that receive a row, `[B]` bool; None means all.
        """
        leaves, self._structure = nest.flatten(rows)
        if not self._targets:
            self._targets = [zero_rows(len(self._rows), leaf) for leaf in leaves]
        self._num_steps += which is None
        if self._has_gaps:
            present = rows[0].step_type != StepType.PAD
            which = present if which is None else which & present
        row, column = self._cursor, self._columns
        if which is not None:
            row, column, leaves = row[which], column[which], [leaf[which] for leaf in leaves]
        for target, leaf in zip(self._targets, leaves):
            target[row, column] = leaf
        self._cursor += 1 if which is None else which

    def arrive(self, time_step: TimeStep, which: Array | None = None, info: dict[str, Any] | None = None) -> None:
        """Adds rows to `records`.

        Args:
          time_step: rows `[B, ...]`.
          which: columns in which a row arrived, `[B]` bool; None means all.
          info: info of the step, in gymnasium's format.
        """
        if info:
            self._infos.append((len(self._arrived), info))
        self._arrived.append((time_step, which))

    def records(self, shown: Sequence[str] = ()) -> StepRecords:
        """Returns the rows given to `arrive`, in their order, with the fields `shown` of `SHOWN_FIELDS`."""

        def arrived(field: str) -> Nest:
            rows = [getattr(time_step, field) for time_step, _ in self._arrived]
            return nest.map(lambda *leaves: np.stack([as_array(leaf) for leaf in leaves]), *rows)

        step_type = arrived("step_type")
        for kinds, (_, which) in zip(step_type, self._arrived):
            if which is not None:
                kinds[~as_array(which)] = StepType.PAD
        fields = {name: arrived(SHOWN_FIELDS[name]) for name in shown}
        return StepRecords(step_type, arrived("reward"), self._infos, **fields)

    def filled_up(self) -> tuple[TimeStep, Nest, Nest]:
        """Returns the rows given to `append`, `[num_rows, B, ...]`, with PAD rows after shorter columns."""
        time_step, action, info = nest.unflatten(self._structure, self._targets)
        time_step.step_type[self._rows[:, None] >= self._cursor] = StepType.PAD
        return time_step, action, info


def zero_rows(num_rows: int, leaf: Array) -> Array:
    """Returns zeros `[num_rows, B, ...]` for rows with this leaf's shape."""
    shape = (num_rows, *leaf.shape)
    return np.zeros(shape, leaf.dtype) if type(leaf) is np.ndarray else leaf.new_zeros(shape)


def stacked(rows: Sequence[tuple[TimeStep, Nest, Nest]]) -> tuple[TimeStep, Nest, Nest]:
    """Returns time step, action and info of all rows, leaves `[T, B, ...]`."""
    # Stacked field by field: most fields are bare leaves, and walking through whole rows takes longer than stacking.
    time_steps, actions, infos = zip(*rows)
    return TimeStep(*map(_stacked, zip(*time_steps))), _stacked(actions), _stacked(infos)


def records(
    time_step: TimeStep,
    last: TimeStep | None,
    unseen: bool,
    infos: list[tuple[int, dict[str, Any]]],
    shown: Sequence[str] = (),
) -> StepRecords:
    """Returns the records of an unroll.

    Args:
      time_step: time step of the unroll, `[T, B]`.
      last: newest row, `[B]`; None if it is the last row of `time_step`.
      unseen: whether row 0 is new.
      infos: infos of the steps, see `StepRecords`.
      shown: optional fields of the records.
    """
    step_type, reward = as_array(time_step.step_type), as_array(time_step.reward)
    if last is not None:
        step_type = np.concatenate([step_type, as_array(last.step_type)[None]])
        reward = np.concatenate([reward, as_array(last.reward)[None]])
    arrived = StepRecords(step_type[1 - unseen :], reward[1 - unseen :], infos)
    if not shown:
        return arrived

    def field(name: str) -> Nest:
        rows = nest.arrays(getattr(time_step, name))
        if last is not None:
            end = nest.arrays(getattr(last, name))
            rows = nest.map(lambda leaf, newest: np.concatenate([leaf, newest[None]]), rows, end)
        return nest.at(rows, slice(1 - unseen, None))

    return arrived._replace(**{name: field(SHOWN_FIELDS[name]) for name in shown})


def ended(time_step: TimeStep, broken: np.ndarray) -> TimeStep:
    """Returns the row that was acted from, with LAST where an environment (`[B]` bool) then broke: its episode ends."""
    step_type = as_array(time_step.step_type).copy()
    step_type[broken & (step_type == StepType.MID)] = StepType.LAST
    return time_step._replace(step_type=step_type)


def filled_up(rows: tuple[TimeStep, Nest, Nest], num_rows: int) -> tuple[TimeStep, Nest, Nest]:
    """Returns the rows, with PAD rows appended up to `num_rows`."""
    length = len(rows[0].step_type)
    if length == num_rows:
        return rows

    def longer(leaf: Array) -> Array:
        target = zero_rows(num_rows, leaf[0])
        target[:length] = leaf
        return target

    time_step, action, info = nest.map(longer, rows)
    time_step.step_type[length:] = StepType.PAD
    return time_step, action, info


def _stacked(nests: tuple[Nest, ...]) -> Nest:
    """Stacks nests leaf by leaf: arrays into an array, which takes a fraction of torch's time, all else into a tensor.

    If acting changes to or from numpy within an unroll, the first or the last leaf is a tensor.
    """
    if type(nests[0]) is np.ndarray and type(nests[-1]) is np.ndarray:
        return np.array(nests)
    if nests[0] is None:
        return None
    if type(nests[0]) in (np.ndarray, torch.Tensor):
        return torch.stack([as_tensor(leaf) for leaf in nests])
    return nest.map(lambda *leaves: _stacked(leaves), *nests)


# Fraction of an unroll that every learner completes, because many unrolls of a few rows each would give poor gradients.
LEAST_FRACTION = 0.25


class StragglerCut:
    """Yields the steps of an unroll until it is cut, because enough other learners have finished theirs.

    Args:
      fraction: fraction of the learners, in (0, 1]; once this fraction has finished an unroll, the others end their
        unrolls.
      algorithm: algorithm that acts in the unrolls.

    Raises:
      UsageError: the algorithm is off-policy.
    """

    def __init__(self, fraction: float, algorithm: RLAlgorithm):
        if not algorithm.on_policy:
            raise UsageError(
                f"SyncUnroller.sync_fraction is {fraction}, and {type(algorithm).__name__} is off-policy, so that "
                "learners may take rows from replay while others collect; leave it out"
            )
        self._fraction = fraction
        self._finished: replicas.Counter | None = None  # counter of finished unrolls, shared by all learners
        self._num_before = 0  # number of unrolls that all learners have finished before this one

    def check(self) -> None:
        """Checks that there are several learners, whose unrolls can be cut.

        Raises:
          UsageError: there is only one learner, or there are too few learners for the fraction.
        """
        size = replicas.size()
        if size == 1:
            raise UsageError(
                f"SyncUnroller.sync_fraction is {self._fraction}, and there is one learner, which waits for no other; "
                "start several with torchrun, or leave it out"
            )
        if self._num_enough() == size:
            raise UsageError(
                f"SyncUnroller.sync_fraction is {self._fraction}, and {size} learners are cut only once all have "
                f"finished; take {math.floor(100 * (size - 1) / size) / 100} at most, or leave it out"
            )

    def steps(self, length: int) -> Iterator[int]:
        """Yields 0, 1, ... for each vector step of an unroll of `length` rows, until enough learners have finished."""
        if self._finished is None:
            self.check()
            self._finished = replicas.Counter()
        enough = self._num_before + self._num_enough()
        at_least = max(1, math.ceil(LEAST_FRACTION * length))
        for t in range(length):
            if t >= at_least and self._finished.add(0) >= enough:
                return
            yield t

    def finish(self) -> None:
        """Counts this learner's unroll as finished. The next unroll begins after all learners have called `finish`."""
        assert self._finished is not None
        self._finished.add(1)
        self._num_before += replicas.size()

    def _num_enough(self) -> int:
        return math.ceil(self._fraction * replicas.size() - 1e-9)  # 0.7 * 10 is above 7
