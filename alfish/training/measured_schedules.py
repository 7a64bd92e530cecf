"""The listener that passes reported numbers to measured schedules (`parameters.measured`)."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from alfish.parameters.measured import MeasuredSchedule
from alfish.processes import replicas
from alfish.training.listener import Listener, Report, Run
from alfish.training.listeners import check_scalar
from alfish.training.run_parts import JointParts, Parts


class MeasuredSchedules(Listener):
    """Passes reported numbers to the measured schedules of all policies; reports the schedules as `schedule/NAME`.

    The trainer adds the listener to runs that have such schedules. It is called after evaluations and before summaries,
    on every learner. Numbers are averaged over the learners that have them, so that all learners have equal schedules.

    Args:
      parts: parts of the run.
    """

    on_every_learner = True

    def __init__(self, parts: Parts):
        self._parts = parts

    def start(self, run: Run) -> None:
        for name, schedule in {**_of_algorithms(self._parts), **_of_learners(self._parts)}.items():
            check_scalar(run, schedule.scalar, f"{type(schedule).__name__}.scalar (of {name})")

    def after_iteration(self, run: Run, report: Report) -> None:
        if report.is_missed and replicas.is_joined():
            return  # only the first learner has this report, so it cannot wait for other learners
        schedules = {**_of_algorithms(self._parts), **_of_learners(self._parts)}
        names = sorted({schedule.scalar for schedule in schedules.values()})
        values = [report.due(name) for name in names]
        measured = dict(zip(names, _means([math.nan if value is None else value for value in values])))
        for schedule in schedules.values():
            if math.isfinite(measured[schedule.scalar]):
                schedule.observe(measured[schedule.scalar])
        if report.is_summary:
            report.scalars |= {f"schedule/{name}": float(schedule.value) for name, schedule in schedules.items()}

    def state_dict(self) -> dict[str, Any]:
        """Returns the values of learning rates; other schedules are buffers of the algorithms."""
        return {name: float(schedule.value) for name, schedule in _of_learners(self._parts).items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, schedule in _of_learners(self._parts).items():
            if name in state:  # absent if the run's learning rate was a number
                schedule.value.fill_(state[name])


def measuring(parts: Parts) -> list[Listener]:
    """Returns the listener for the measured schedules of a run; an empty list if the run has none."""
    return [MeasuredSchedules(parts)] if _of_algorithms(parts) or _of_learners(parts) else []


def _policies(parts: Parts) -> dict[str, Any]:
    """Returns the policies of a run by the prefix of their schedules' names."""
    return {f"{one.name}/": one for one in parts.members} if isinstance(parts, JointParts) else {"": parts}


def _of_algorithms(parts: Parts) -> dict[str, MeasuredSchedule]:
    """Returns the schedules of all algorithms and their parts, by the name of the attribute ('entropy_coef')."""
    found = {}
    for policy, owner in _policies(parts).items():
        for path, module in owner.algorithm.named_modules():
            if isinstance(module, MeasuredSchedule):
                found[policy + ".".join(name.lstrip("_") for name in path.split("."))] = module
    return found


def _of_learners(parts: Parts) -> dict[str, MeasuredSchedule]:
    """Returns the schedules of all learning rates, without duplicates."""
    found: dict[str, MeasuredSchedule] = {}
    for policy, owner in _policies(parts).items():
        for name, rate in owner.learner.learning_rates.items():
            if isinstance(rate, MeasuredSchedule) and rate not in found.values():
                found[f"{policy}learning_rate.{name}"] = rate
    return found


def _means(own: Sequence[float]) -> list[float]:
    """Returns the mean of each number over the learners that have it; nan if no learner has it."""
    numbers = torch.tensor(own, dtype=torch.float64)
    is_known = numbers.isfinite()
    total, count = replicas.total(torch.stack([torch.where(is_known, numbers, 0.0), is_known.double()]))
    return torch.where(count > 0, total / count, torch.nan).tolist()
