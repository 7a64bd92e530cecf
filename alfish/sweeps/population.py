"""Populations: generations of runs that begin with the best checkpoints of the previous generation."""

import functools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from alfish.errors import RunError, UsageError, counted, significant
from alfish.parameters import NonNegativeFloat, PositiveInt, Range, checked
from alfish.runs.files import temporary_of, writing
from alfish.sweeps.base import Base
from alfish.sweeps.generations import result_of, write
from alfish.sweeps.group import Due, RunGroup, Specification, bindings_text, write_rows
from alfish.sweeps.run_state import RunState
from alfish.training.generations import Member, MemberResult, Perturbed, first_generation, next_generation

CSV = "members.csv"
BEST = "best"  # name of the link to the best member of the newest complete generation


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
            members = [write(member, self.directory) for member in members]
            self._train_generation(members, (generation + 1) * specification.steps)
            if self.signals.number is not None:
                return
            own = [result_of(member, self._state(member), specification.last) for member in members]
            results += own
            self._write_csv(results)
            self._link_best(own)
            is_last = generation + 1 == specification.generations
            if not is_last and any(self._state(member).is_done for member in members):
                self.log(f"Generation {generation} is the last one, because the budget of a member is spent")
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
            reasons = [self._state(result.member).failure or "its return is not finite" for result in results]
            raise RunError(f"all members of generation {generation} have failed; the first failure: {reasons[0]}")
        settings = bindings_text(best.member.bindings)
        self.log(f"Generation {generation}: best return {significant(best.value)} by {best.member.name} ({settings})")
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
        return RunState.read(self.directory / member.name)


def _is_over(directory: Path, end: int) -> bool:
    """Returns True if a member was evaluated and saved at the end of its generation, is done, or has failed."""
    state = RunState.read(directory)
    if state.failure is not None or state.is_done:
        return True
    is_evaluated = any(clock >= end for clock in state.evaluations)
    return is_evaluated and state.checkpoint is not None and state.checkpoint >= end
