"""Populations: generations of runs that begin with the best checkpoints of the previous generation.

    g000/m0, g000/m1, ...    run directories of `alfish train`, which stop at `steps`
    g001/m0, ...             each continues from the last checkpoint of a member of g000, and stops at 2 x `steps`

A run directory is written by one run, and does not change afterwards. The directory belongs to the population if it has
`member.json`, the last file written when the directory is created. The members of a generation depend only on the
directories of the previous generation and the specification, so computing them again gives the same members.
`alfish.training.generations` selects the members.
"""

import functools
import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from alfish.errors import RunError, UsageError, counted, significant
from alfish.parameters import NonNegativeFloat, PositiveInt, Range, checked
from alfish.parameters.varied import NUMBER
from alfish.runs import contents
from alfish.runs.checkpoints import Checkpoints
from alfish.runs.files import make_directory, open_atomically, open_regular, temporary_of, write_atomically, writing
from alfish.sweeps.base import Base
from alfish.sweeps.group import Due, RunGroup, Specification, bindings_text, write_rows
from alfish.sweeps.run_state import RunState, mean_of_means
from alfish.training.generations import Member, MemberResult, Perturbed, first_generation, next_generation

MEMBER = "member.json"  # file in the directory of a member, written last
CSV = "members.csv"
BEST = "best"  # name of the link to the best member of the newest complete generation
PLAIN = re.compile(rf"{NUMBER}|g\d+/m\d+")  # format of texts in a member's file: a number, or the name of a parent


@checked
@dataclass(frozen=True)
class PopulationSpecification(Specification):
    """Settings of a population. Member m trains with `Trainer.seed` = seed + m.

    Attributes:
      perturb: bounds of each parameter that differs between members, written as in `--perturb`.
      members: number of members.
      generations: number of generations.
      steps: number of clock steps of each generation.
      share: fraction of members that are replaced after a generation, in [0, 0.5].
      gap: number of standard errors by which a member must be worse than the member that replaces it.
    """

    group = "population"
    varied = "perturb"
    example = "Learner.learning_rate=1e-5..1e-2"
    extendable = "generations"
    factors = "members", "generations"

    perturb: Mapping[str, str]
    members: PositiveInt
    generations: PositiveInt
    steps: PositiveInt
    share: Annotated[float, Range(0, 0.5)]
    gap: NonNegativeFloat

    @staticmethod
    def parse(argument: str) -> Perturbed:
        return Perturbed.parse(argument)

    @property
    def num_replaced(self) -> int:
        """Number of members that are replaced after a generation."""
        return int(self.share * self.members)

    @classmethod
    def completed(cls, known: Mapping[str, Any], base: Base) -> "PopulationSpecification":
        defaults = {"members": 8, "generations": 10, "share": 0.25, "gap": 0.0, "last": 1}
        values, (name, size, _) = {**defaults, **known}, base.budget
        if "steps" not in values and name != "num_env_steps":
            raise UsageError(f"--steps is missing: the budget is Trainer.{name}; say how many steps a generation has")
        generations = values["generations"]
        steps = values.setdefault("steps", math.ceil(size / generations))
        specification = cls(**values)
        if name == "num_env_steps" and (generations - 1) * steps >= size:
            asked = f"{counted(generations, 'generation')} of {steps:,} steps"
            raise UsageError(
                f"{asked} are more than Trainer.num_env_steps = {size:,}; give fewer --generations or --steps, or "
                "start a new population with a larger budget"
            )
        if not base.evaluation_period or steps % base.evaluation_period:
            raise UsageError(
                f"a generation of {steps:,} steps does not end with an evaluation (Evaluate.period is "
                f"{base.evaluation_period:,}); bind --gin_param=Evaluate.period={steps}, or give other --steps"
            )
        if base.iteration_steps > steps:
            raise UsageError(
                f"an iteration has {base.iteration_steps:,} steps, but a generation only {steps:,}; give more --steps"
            )
        if specification.share and not specification.num_replaced:
            raise UsageError(
                f"--share={specification.share:g} of {counted(specification.members, 'member')} is less than one "
                "member; give a larger --share, or --share=0 for independent members"
            )
        return specification


class Population(RunGroup[PopulationSpecification]):
    """Trains the generations of a population.

    Raises:
      RunError: all members of a generation have failed.
    """

    def run(self) -> None:
        specification, parameters = self.specification, self.specification.parameters
        results: list[MemberResult] = []  # results of all complete generations
        members = first_generation(specification.members, parameters, specification.seed)
        for generation in range(specification.generations):
            members = [write_member(member, self.directory) for member in members]
            self._train_generation(members, (generation + 1) * specification.steps)
            if self.signals.number is not None:
                return
            own = [result_of(member, self._state(member), specification.last) for member in members]
            results += own
            self._write_csv(results)
            self._link_best(own)
            is_last = generation + 1 == specification.generations
            if not is_last and (done := [member.name for member in members if self._state(member).is_done]):
                why = f"{done[0]} has finished: its budget is spent, or a listener has stopped it"
                self.log(f"Generation {generation} is the last one, because {why}")
                return
            members = next_generation(
                own, parameters, specification.seed, specification.num_replaced, specification.gap
            )

    def _train_generation(self, members: Sequence[Member], end: int) -> None:
        """Trains members until their clocks are at `end`, or a signal is received."""
        due = functools.partial(self._due, members, end)
        if number := len(list(due())):
            self.log(f"Generation {members[0].generation}: {counted(number, 'member')} of {len(members)} to train")
        is_over = functools.partial(_is_over, end=end)
        self._train(due, is_over, f"ended without an evaluation at {end:,} steps")

    def _due(self, members: Sequence[Member], end: int) -> Iterator[Due]:
        """Yields the members to train."""
        for member in members:
            directory = self.directory / member.name
            if not _is_over(directory, end):
                own = {"Trainer.seed": self.specification.seed + member.number, "Trainer.stop_at": end}
                # Perturbed settings differ from the configuration of the parent's checkpoint, which this flag permits.
                yield Due(directory, {**member.bindings, **own}, ["--on_config_change=new"])

    def _link_best(self, results: Sequence[MemberResult]) -> None:
        """Makes the link to the best member of a generation.

        Raises:
          RunError: all members of the generation have failed.
        """
        best = max(results, key=lambda result: result.value)
        generation = best.member.generation
        if best.has_failed:
            unfit = f"{self.specification.objective} is missing or not finite"
            reasons = [self._state(result.member).failure or unfit for result in results]
            raise RunError(f"all members of generation {generation} have failed; the first failure: {reasons[0]}")
        settings = bindings_text(best.member.bindings)
        self.log(f"Generation {generation}: best value {significant(best.value)} by {best.member.name} ({settings})")
        link = self.directory / BEST
        temporary = temporary_of(link)
        with writing(link):
            temporary.unlink(missing_ok=True)
            temporary.symlink_to(best.member.name)
            os.replace(temporary, link)

    def _write_csv(self, results: Sequence[MemberResult]) -> None:
        """Writes a row for each member of each complete generation: its parent, its settings and its value."""
        names = list(self.specification.perturb)
        rows: list[list[Any]] = [["generation", "member", "parent", *names, "value"]]
        for member, value, _ in results:
            settings = [member.bindings[name] for name in names]
            rows.append([member.generation, member.number, member.parent, *settings, value])
        write_rows(self.directory / CSV, rows)

    def _state(self, member: Member) -> RunState:
        return RunState.read(self.directory / member.name, self.specification.column)


def write_member(member: Member, root: Path) -> Member:
    """Creates the run directory of a member if it does not exist; returns the member stored there.

    Args:
      member: member to store.
      root: directory of the population, in which the run directory has the member's name.

    Raises:
      UsageError: the directory is not a member of this population.
    """
    path = root / member.name / MEMBER
    if os.path.lexists(path):
        return _read_member(member, path)
    make_directory(path.parent)
    if member.parent is not None:
        for kind in ("replay", "checkpoints"):  # only the newest of each, which belong together
            saved = Checkpoints(root / member.parent / kind)
            for newest in saved.steps()[-1:]:
                make_directory(path.parent / kind)
                _link(saved.path(newest), Checkpoints(path.parent / kind).path(newest))
    content = {"parent": member.parent, "bindings": dict(member.bindings)}
    write_atomically(path, json.dumps(content, indent=2) + "\n")
    return member


def result_of(member: Member, state: RunState, last: int) -> MemberResult:
    """Returns the result of a member.

    Args:
      member: member that has been trained to the end of its generation.
      state: state of the member's run.
      last: number of final evaluations of the generation that count.
    """
    counting = list(state.evaluations.values())[-last:]
    value = mean_of_means(counting)
    if state.failure is not None or value is None or not math.isfinite(value):
        return MemberResult(member, -math.inf, 0.0)
    variances = [float(np.var(one, ddof=1)) / len(one) if len(one) > 1 else math.inf for one in counting]
    return MemberResult(member, value, sum(variances) / len(counting) ** 2)


def _is_over(directory: Path, end: int) -> bool:
    """Returns True if a member was evaluated and saved at the end of its generation, is done, or has failed."""
    state = RunState.read(directory)
    if state.failure is not None or state.is_done:
        return True
    is_evaluated = any(clock >= end for clock in state.evaluations)
    return is_evaluated and state.checkpoint is not None and state.checkpoint >= end


def _read_member(member: Member, path: Path) -> Member:
    """Returns the member in a file, after checking its texts, which become arguments of a command."""
    content = contents.record(path.parent, path.name, {"bindings": dict})
    if content is None or content.keys() != {"parent", "bindings"}:
        raise UsageError(f"{path} does not describe a member; choose another --root_dir")
    found = member._replace(**content)
    is_right = found.bindings.keys() == member.bindings.keys() and (found.parent is None) == (member.parent is None)
    texts = [*found.bindings.values(), *([] if found.parent is None else [found.parent])]
    if not is_right or not all(isinstance(text, str) and PLAIN.fullmatch(text) for text in texts):
        raise UsageError(f"{path} describes a member of another population; choose another --root_dir")
    return found


def _link(source: Path, target: Path) -> None:
    """Makes `target` a hard link to a file that does not change, or a copy if hard links are impossible."""
    with writing(target):
        if target.exists():  # left by a killed command
            return
        try:
            os.link(source, target)
        except OSError:
            with open_regular(source) as read, open_atomically(target) as file:
                shutil.copyfileobj(read, file)
