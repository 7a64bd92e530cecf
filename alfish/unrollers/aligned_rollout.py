"""Unrolls of environments in which each step is one row of every column."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from alfish import nest
from alfish.data import StepType, TimeStep
from alfish.nest import Array, Nest, as_array, as_tensor
from alfish.unrollers.uneven_rollout import zero_rows
from alfish.unrollers.unroller import SHOWN_FIELDS, StepRecords


def stacked(rows: Sequence[tuple[TimeStep, Nest, Nest]]) -> tuple[TimeStep, Nest, Nest]:
    """Returns time step, action and info of all rows, leaves `[T, B, ...]`."""
    # Field by field: most fields are bare leaves, and walking through whole rows takes longer than stacking them.
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
      time_step: the unroll's, `[T, B]`.
      last: the newest row, `[B]`; None: it is the last of `time_step`.
      unseen: whether row 0 is new.
      infos: see `StepRecords`.
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
    """Returns the row acted from with LAST where environments (`[B]` bool) then broke: their episodes end there."""
    step_type = as_array(time_step.step_type).copy()
    step_type[broken & (step_type == StepType.MID)] = StepType.LAST
    return time_step._replace(step_type=step_type)


def filled_up(rows: tuple[TimeStep, Nest, Nest], num_rows: int) -> tuple[TimeStep, Nest, Nest]:
    """Returns the rows, with PAD rows behind them up to `num_rows`."""
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
    """Stacks nests leaf by leaf: arrays into an array, which takes a fraction of torch's time, else into a tensor.

    If a policy changes to or from numpy within an unroll, the first leaf or the last one is a tensor.
    """
    if type(nests[0]) is np.ndarray and type(nests[-1]) is np.ndarray:
        return np.array(nests)
    if nests[0] is None:
        return None
    if type(nests[0]) in (np.ndarray, torch.Tensor):
        return torch.stack([as_tensor(leaf) for leaf in nests])
    return nest.map(lambda *leaves: _stacked(leaves), *nests)
