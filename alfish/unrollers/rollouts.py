"""Makes the rows and the records of an unroll from the rows of its steps; ends unrolls of slow learners early."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from alfish import nest
from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.data import Ends, StepType, TimeStep
from alfish.errors import UsageError
from alfish.nest import Array, Nest, as_array, as_tensor
from alfish.processes import replicas
from alfish.unrollers.unroller import SHOWN_FIELDS, StepRecords


def stacked(rows: Sequence[tuple[TimeStep, Nest, Nest]]) -> tuple[TimeStep, Nest, Nest]:
    """Returns time step, action and info of all rows, leaves `[T, B, ...]`."""
    time_steps, actions, infos = zip(*rows)
    return time_steps_of(time_steps), _stacked(actions), _stacked(infos)


def ends_of(ends: Sequence[tuple[Array, TimeStep]]) -> Ends:
    """Returns the ends of all steps; see `Ends`."""
    ended, time_steps = zip(*ends)
    return Ends(_stacked(ended), time_steps_of(time_steps))


def time_steps_of(rows: Sequence[TimeStep]) -> TimeStep:
    """Stacks rows `[B]` along time; returns rows `[T, B]`."""
    # Fields are stacked one by one: most are bare leaves, and traversing whole rows takes longer than stacking.
    return TimeStep(*map(_stacked, zip(*rows)))


def recorded(rows: TimeStep, newest: TimeStep | None, ends: Ends | None, shown: Sequence[str] = ()) -> Nest:
    """Returns what `records` needs from the rows of an unroll, as a dict of arrays or tensors.

    Args:
      rows: time step of the unroll, `[T, B]`.
      newest: newest row, `[B]`; None if it is the last row of `rows`.
      ends: LAST rows that are stored separately; None if each step made exactly one row in every column.
      shown: optional fields of the records.
    """
    fields = {"step_type": "step_type", "reward": "reward", **{name: SHOWN_FIELDS[name] for name in shown}}
    parts = rows, newest, ends and ends.time_step
    return {name: [part and getattr(part, field) for part in parts] for name, field in fields.items()}


def records(found: Nest, unseen: bool, infos: list[tuple[int, dict[str, Any]]]) -> StepRecords:
    """Returns the records of an unroll: its new rows in order of time.

    Args:
      found: result of `recorded`, as arrays.
      unseen: whether row 0 is new; otherwise, the previous records have it.
      infos: pairs of a step's index, from 0, and its info.
    """

    def followed(name: str) -> Nest:
        own, end, _ = found[name]
        return own if end is None else nest.map(lambda leaf, last: np.concatenate([leaf, last[None]]), own, end)

    if found["step_type"][2] is None:
        arrived = {name: nest.at(followed(name), slice(1 - unseen, None)) for name in found}
        return StepRecords(infos=[(t + unseen, info) for t, info in infos], **arrived)
    # A step adds its own rows, and then the FIRST rows of resets in this step, with PAD in the other columns.
    begins = (followed("step_type")[1:] == StepType.FIRST) & (found["step_type"][2] != StepType.FIRST)
    is_kept = np.concatenate([[unseen], np.stack([np.ones(len(begins), bool), begins.any(1)], 1).reshape(-1)])

    def interleaved(own: np.ndarray, last: np.ndarray) -> np.ndarray:
        pairs = np.stack([last, own[1:]], 1)
        return np.concatenate([own[:1], pairs.reshape(-1, *own.shape[1:])])[is_kept]

    arrived = {name: nest.map(interleaved, followed(name), found[name][2]) for name in found}
    has_begun = np.repeat(begins, 2, axis=0)
    has_begun[::2] = True
    has_begun = np.concatenate([np.ones((1, begins.shape[1]), bool), has_begun])[is_kept]
    arrived["step_type"] = np.where(has_begun, arrived["step_type"], StepType.PAD)
    places = np.flatnonzero((np.arange(len(is_kept)) % 2 == 1)[is_kept])
    return StepRecords(infos=[(int(places[t]), info) for t, info in infos], **arrived)


def ended(time_step: TimeStep, broken: np.ndarray) -> TimeStep:
    """Returns the row before a step, with LAST in place of MID where `broken`, `[B]` bool, is True.

    The episodes of these environments end with this row.
    """
    step_type = as_array(time_step.step_type).copy()
    step_type[broken & (step_type == StepType.MID)] = StepType.LAST
    return time_step._replace(step_type=step_type)


def filled_up(rows: TimeStep, others: Nest, ends: Ends | None, length: int) -> tuple[TimeStep, Nest, Ends | None]:
    """Returns the rows of an unroll that `StragglerCut` has ended early, with PAD rows appended.

    Args:
      rows: time step, `[T, B]`; no step follows the last row.
      others: actions and infos, leaves `[T, B, ...]`.
      ends: LAST rows that are stored separately.
      length: number of steps of a whole unroll.
    """
    num_rows = len(rows.step_type)
    missing = length + 1 - num_rows

    def longer(leaf: Array) -> Array:
        added = (missing, *leaf.shape[1:])
        if type(leaf) is np.ndarray:
            return np.concatenate([leaf, np.zeros(added, leaf.dtype)])
        return torch.cat([leaf, leaf.new_zeros(added)])

    rows, others, ends = nest.map(longer, (rows, others, ends))
    rows.step_type[num_rows:] = StepType.PAD
    return rows, others, ends


def _stacked(nests: tuple[Nest, ...]) -> Nest:
    """Stacks nests leaf by leaf: arrays into an array, which is faster than torch, and all else into a tensor.

    If acting switches to or from numpy within an unroll, the first or the last leaf is a tensor.
    """
    if type(nests[0]) is np.ndarray and type(nests[-1]) is np.ndarray:
        return np.array(nests)
    if nests[0] is None:
        return None
    if isinstance(nests[0], (np.ndarray, torch.Tensor)):
        return torch.stack([as_tensor(leaf) for leaf in nests])
    return nest.map(lambda *leaves: _stacked(leaves), *nests)


# Fraction of an unroll that every learner completes, because very short unrolls give poor gradients.
LEAST_FRACTION = 0.25


class StragglerCut:
    """Yields the steps of an unroll, and ends it early if enough other learners have finished their unrolls.

    Args:
      fraction: fraction of the learners, in (0, 1]. When this fraction has finished an unroll, the other learners end
        their unrolls early.
      algorithm: algorithm that acts in the unrolls.

    Raises:
      UsageError: the algorithm is off-policy.
    """

    def __init__(self, fraction: float, algorithm: RLAlgorithm):
        if not algorithm.on_policy:
            raise UsageError(
                f"SyncUnroller.sync_fraction is {fraction}, but {type(algorithm).__name__} is off-policy, so learners "
                "can train from replay while others collect; leave sync_fraction out"
            )
        self._fraction = fraction
        self._finished: replicas.Counter | None = None  # counter of finished unrolls, shared by all learners
        self._num_before = 0  # number of unrolls that all learners together finished before this unroll

    def check(self) -> None:
        """Checks that there are enough learners to cut unrolls.

        Raises:
          UsageError: there is only one learner, or there are too few learners for the fraction.
        """
        size = replicas.size()
        if size == 1:
            raise UsageError(
                f"SyncUnroller.sync_fraction is {self._fraction}, but there is only one learner; start several "
                "learners with torchrun, or leave out sync_fraction"
            )
        if self._num_enough() == size:
            raise UsageError(
                f"SyncUnroller.sync_fraction is {self._fraction}, which would let all {size} learners finish; set it "
                f"to at most {math.floor(100 * (size - 1) / size) / 100}, or leave sync_fraction out"
            )

    def steps(self, length: int) -> Iterator[int]:
        """Yields 0, 1, ... for the vector steps of an unroll of `length` rows, until enough learners have finished."""
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
        return math.ceil(self._fraction * replicas.size() - 1e-9)  # because 0.28 * 25 is above 7 in floats
