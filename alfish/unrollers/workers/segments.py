"""Segments of workers: joined into one Experience and one StepRecords, and statistics of their collection.

On-policy, segments are side by side. Off-policy, each environment has one column with all its segments, one after
another; shorter columns end with PAD rows.
"""

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from alfish import nest
from alfish.data import Experience, StepType
from alfish.nest import Nest
from alfish.processes.messages import Seconds
from alfish.unrollers.unroller import StepRecords, without_infos


def joined(
    parts: Sequence[tuple[Experience | None, StepRecords]], workers: Sequence[int], num_workers: int, on_policy: bool
) -> tuple[Experience | None, StepRecords]:
    """Joins a policy's parts of several segments.

    Args:
      parts: the policy's rows and records in each segment, in order of arrival. Rows are None if they are not needed.
      workers: index of the worker of each segment.
      num_workers: number of workers.
      on_policy: whether segments are side by side; if not, rows are in the columns of their environments.

    Returns:
      Rows as arrays, or None; and records, with a column for each environment.
    """
    by_worker: list[list[Any]] = [[] for _ in range(num_workers)]
    for worker, part in zip(workers, parts, strict=True):
        by_worker[worker].append(part)
    records = records_in_columns([[arrived for _, arrived in own] for own in by_worker])
    rows = [experience for experience, _ in parts if experience is not None]
    if not rows:
        return None, records
    if on_policy:
        return nest.arrays(side_by_side(rows)), records
    return nest.arrays(in_columns([[experience for experience, _ in own] for own in by_worker])), records


def side_by_side(parts: list[Experience]) -> Experience:
    """Joins parts `[T, B, ...]` along columns: `[T, B + B + ..., ...]`. A single part is returned without a copy."""
    if len(parts) == 1:
        return parts[0]
    rows, starts = zip(*map(_taken_apart, parts))
    joined = nest.map(lambda *leaves: torch.cat(leaves, dim=1), *rows)
    return _experience(joined, nest.map(lambda *leaves: torch.cat(leaves), *starts))


def one_after_another(parts: list[Experience]) -> Experience:
    """Copies off-policy parts `[T, B, ...]` into one `[T + T + ..., B, ...]`. PAD rows of a part move to the end."""
    rows, starts = zip(*map(_taken_apart, parts))
    joined = nest.map(lambda *leaves: torch.cat(leaves), *rows)
    return _experience(_closed_up(joined), nest.map(torch.clone, starts[0]))


def in_columns(parts: list[list[Experience]]) -> Experience:
    """Copies the parts of all workers into one experience with a column for each environment.

    Args:
      parts: parts of each worker, in the order of their arrival. At least one worker has a part.
    """
    columns = [one_after_another(own) if own else None for own in parts]
    given = [part for part in columns if part is not None]
    num_rows = max(len(part.time_step.step_type) for part in given)
    return side_by_side([_filled_up(_nothing_like(given[0]) if part is None else part, num_rows) for part in columns])


def masked(experience: Experience, columns: np.ndarray) -> Experience:
    """Returns an experience of arrays in which all rows of some columns (`[B]` bool) are PAD."""
    step_type = experience.time_step.step_type.copy()  # a copy, because segments must not change
    step_type[:, columns] = StepType.PAD
    ends = experience.ends and experience.ends._replace(ended=experience.ends.ended & ~columns)
    return experience._replace(time_step=experience.time_step._replace(step_type=step_type), ends=ends)


def records_in_columns(parts: list[list[StepRecords]]) -> StepRecords:
    """Copies the records of all workers into records with a column for each environment; see `in_columns`."""
    example = next(part for own in parts for part in own)
    num_rows = max(sum(len(part.step_type) for part in own) for own in parts)
    own_envs = example.step_type.shape[1]
    num_envs = len(parts) * own_envs
    joined: StepRecords = nest.map(
        lambda leaf: np.zeros((num_rows, num_envs, *leaf.shape[2:]), leaf.dtype), without_infos(example)
    )
    joined.step_type.fill(StepType.PAD)
    infos: list[tuple[int, dict[str, Any]]] = []
    for worker_index, own in enumerate(parts):
        columns = slice(worker_index * own_envs, (worker_index + 1) * own_envs)
        begin = 0
        for part in own:
            end = begin + len(part.step_type)
            for target, leaf in zip(nest.leaves(joined), nest.leaves(without_infos(part)), strict=True):
                target[begin:end, columns] = leaf
            infos += [(begin + t, _widened(info, columns, num_envs)) for t, info in part.infos]
            begin = end
    return joined._replace(infos=infos)


class Stats:
    """Accumulates the lags of segments, and the seconds of workers and trainer, between two summaries."""

    def __init__(self) -> None:
        self._clear()

    def filled(self, seconds: Seconds) -> None:
        """Adds the seconds that a worker spent on a segment."""
        self._seconds += seconds

    def waited(self, seconds: float) -> None:
        """Adds the seconds that the trainer waited for segments."""
        self._waited += seconds

    def delivered(self, lags: list[int]) -> None:
        """Adds the lags of segments: iterations since the publication of their weights."""
        self._lags += lags

    def masked(self, num_rows: int, name: str = "") -> None:
        """Adds the number of rows that were masked because they were too old.

        Args:
          num_rows: number of rows.
          name: name of the policy of the rows; '' if there is only one policy.
        """
        self._num_masked[name] += num_rows

    def take(self) -> dict[str, float]:
        """Returns scalars by name, and resets the sums. Times are fractions of the workers' or the trainer's time."""
        total = self._seconds.sum() or 1.0
        result = {f"worker_{name}_fraction": float(part / total) for name, part in zip(Seconds._fields, self._seconds)}
        result["trainer_wait_fraction"] = self._waited / max(time.perf_counter() - self._began, 1e-9)
        if self._lags:
            result["lag_min"] = float(min(self._lags))
            result["lag_mean"] = float(np.mean(self._lags))
            result["lag_max"] = float(max(self._lags))
        result["masked_rows"] = float(self._num_masked.total())
        result |= {f"{name}/masked_rows": float(count) for name, count in self._num_masked.items() if name}
        self._clear()
        return result

    def _clear(self) -> None:
        self._began = time.perf_counter()
        self._seconds = np.zeros(len(Seconds._fields))  # seconds of all workers
        self._waited = 0.0
        self._lags: list[int] = []
        self._num_masked = Counter[str]()


def _taken_apart(part: Experience) -> tuple[Nest, Nest]:
    """Returns the leaves `[T, B, ...]` of an experience, and its leaves `[B, ...]` of row 0."""
    rows = part.time_step, part.action, part.info, part.ends
    return rows, (part.state, part.policy_version, part.transform_state)


def _experience(rows: Nest, start: Nest) -> Experience:
    """Returns an experience from its leaves, the inverse of `_taken_apart`."""
    time_step, action, info, ends = rows
    return Experience(time_step, action, info, *start)._replace(ends=ends)


def _closed_up(rows: Nest) -> Nest:
    """Moves PAD rows to the ends of columns, if PAD rows precede other rows.

    Args:
      rows: first result of `_taken_apart`. If it has ends, it does not change, because ends belong to steps, not to
        rows.
    """
    time_step, *_, ends = rows
    is_pad = time_step.step_type == StepType.PAD
    if ends is not None or not (is_pad[:-1] & ~is_pad[1:]).any():
        return rows
    order = torch.argsort(is_pad.byte(), dim=0, stable=True)
    columns = torch.arange(is_pad.shape[1])
    return nest.map(lambda leaf: leaf[order, columns], rows)


def _filled_up(part: Experience, num_rows: int) -> Experience:
    """Appends PAD rows until the part has `num_rows`."""
    missing = num_rows - len(part.time_step.step_type)
    if not missing:
        return part
    rows, start = _taken_apart(part)
    filler = nest.map(lambda leaf: leaf.new_zeros(missing, *leaf.shape[1:]), rows)
    filler[0].step_type.fill_(StepType.PAD)
    return _experience(nest.map(lambda *leaves: torch.cat(leaves), rows, filler), start)


def _nothing_like(part: Experience) -> Experience:
    """Returns an experience without rows that has the columns of `part`, and version -1."""
    rows, start = _taken_apart(part)
    nothing = _experience(nest.at(rows, slice(0, 0)), nest.map(torch.zeros_like, start))
    return nothing._replace(policy_version=torch.full_like(part.policy_version, -1))  # type: ignore[arg-type]


def _widened(info: dict[str, Any], columns: slice, num_envs: int) -> dict[str, Any]:
    """Extends the info of some environments to all environments, with a mask for each key."""
    wide: dict[str, Any] = {}
    masks = {f"_{key}" for key in info}
    for key, value in info.items():
        if key in masks:
            continue
        mask = np.zeros(num_envs, bool)
        mask[columns] = info.get(f"_{key}", True)
        if isinstance(value, torch.Tensor):
            value = (value.double() if value.is_floating_point() else value).detach().cpu().numpy()
        if isinstance(value, dict):
            wide[key] = _widened(value, columns, num_envs)
        elif isinstance(value, np.ndarray) and value.shape[:1] == (columns.stop - columns.start,):
            wide[key] = np.zeros((num_envs, *value.shape[1:]), value.dtype)
            wide[key][columns] = value
        else:
            continue
        wide[f"_{key}"] = mask
    return wide
