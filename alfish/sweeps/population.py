"""Populations: generations of runs, each of which begins with the best checkpoints of the one before it."""

import contextlib
import csv
import dataclasses
import io
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alfish.errors import RunError, UsageError
from alfish.formatting import counted, significant
from alfish.parameters import imports
from alfish.runs.files import make_directory, write_atomically, writing
from alfish.runs.stop_signals import StopSignals
from alfish.sweeps.base import Base, gin_file, refuse_other_content
from alfish.sweeps.generations import Member, Perturbed, Result, first_generation, next_generation
from alfish.sweeps.jobs import Ended, Jobs
from alfish.sweeps.run_state import Endings, RunState, mark_failed

FILE = "population.json"
CSV = "members.csv"
BEST = "best"  # a link to the best member of the newest whole generation
PERIOD_SECONDS = 1.0  # between two looks at the signals


@dataclass(frozen=True)
class Specification:
    """What a population does.

    Attributes:
      perturb: bounds of each parameter that differs between members, as `--perturb` has them.
      seed: `Trainer.seed` of member 0, and of what the population draws; member m trains with seed + m.
      members: number of members.
      generations: number of generations.
      steps: clock steps of a generation.
      share: fraction of members that are replaced after a generation, in [0, 0.5].
      gap: standard errors by which a member must be worse than the one that replaces it.
      last: number of evaluations at the end of a generation whose mean is a member's value.
    """

    perturb: Mapping[str, str]
    seed: int
    members: int
    generations: int
    steps: int
    share: float
    gap: float
    last: int

    @property
    def perturbed(self) -> list[Perturbed]:
        """The parameters that differ between members."""
        return [Perturbed.parse(f"{name}={bounds}") for name, bounds in self.perturb.items()]

    @property
    def num_replaced(self) -> int:
        """Number of members that are replaced after a generation."""
        return int(self.share * self.members)

    @classmethod
    def read(cls, directory: Path) -> "Specification":
        """Reads the specification of an existing population."""
        path = directory / FILE
        try:
            return cls(**json.loads(path.read_text()))
        except (ValueError, TypeError) as error:
            raise UsageError(
                f"{path} is not the specification of a population ({error}); choose another --root_dir"
            ) from error

    def write(self, directory: Path) -> None:
        """Writes `population.json`, whose presence makes a directory a population."""
        write_atomically(directory / FILE, json.dumps(dataclasses.asdict(self), indent=2) + "\n")


def open_specification(
    directory: Path,
    gin_files: Sequence[str],
    bindings: Sequence[str],
    given: Mapping[str, Any],
    allow_import: Sequence[str] = (),
) -> Specification:
    """Returns the specification of a new population, or that of the population in a directory.

    A new one is checked, and written with the configuration. For an existing one, whatever is given must be as it was
    then, except that the number of generations may change; what is not given is as it was.

    Args:
      directory: of the population.
      gin_files, bindings: as `reading.read` takes them.
      given: values of flags by name: perturb (a list), members, generations, steps, share, gap, last. None, or an
        empty list: not given.
      allow_import: modules that the configuration of an existing population may import, where no file is named.

    Raises:
      UsageError: the population cannot be as it is given; or the directory has another one, or something else.
    """
    refuse_other_content(directory, FILE)
    stored = Specification.read(directory) if (directory / FILE).is_file() else None
    given = {name: value for name, value in given.items() if value not in (None, [])}
    if "perturb" in given:
        given["perturb"] = _bounds(given["perturb"])
    if stored is None and not gin_files:
        raise UsageError("--gin_file is missing: `alfish confs` lists what can be trained")
    if stored is None and "perturb" not in given:
        raise UsageError("--perturb is missing: name what differs, as in --perturb=Learner.learning_rate=1e-5..1e-2")
    if bindings and not gin_files:
        raise UsageError("--gin_param needs --gin_file; without both, the population keeps its configuration")
    known = (dataclasses.asdict(stored) if stored is not None else {}) | given
    with contextlib.ExitStack() as stack:
        copy = gin_file(directory).removeprefix("--gin_file=")
        if not gin_files:  # the copy may come from another person
            stack.enter_context(imports.restricted(allow_import))
        base = Base.read(gin_files or [copy], bindings, _variants(known["perturb"]))
    specification = _checked(known, base)
    if stored is not None:
        same = dataclasses.replace(stored, generations=specification.generations)
        others = base.difference(directory) if gin_files else ""
        if lines := "\n".join(part for part in (others, _difference(same, specification)) if part):
            raise UsageError(
                f"{directory} is a population with another specification (- then, + now):\n{lines}\n"
                "choose another --root_dir, or leave out what is not to change"
            )
    if gin_files:
        make_directory(directory)
        base.write(directory)  # also where it is the same: this is the text that the user trusts
    if specification != stored:
        specification.write(directory)
    return specification


def _bounds(arguments: Sequence[str]) -> dict[str, str]:
    """Returns the bounds of each parameter of `--perturb`."""
    found = [Perturbed.parse(argument) for argument in arguments]
    names = [one.name for one in found]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"--perturb names {name} {names.count(name)} times; give its bounds once")
    return {one.name: f"{one.low}..{one.high}" for one in found}


def _variants(perturb: Mapping[str, str]) -> list[list[str]]:
    """Returns the bindings of the lower bounds, and of the upper ones."""
    parameters = [Perturbed.parse(f"{name}={bounds}") for name, bounds in perturb.items()]
    return [[f"{one.name}={one.low}" for one in parameters], [f"{one.name}={one.high}" for one in parameters]]


def _checked(known: Mapping[str, Any], base: Base) -> Specification:
    """Returns the specification with these values and the defaults of others.

    Raises:
      UsageError: values do not fit each other, or the configuration.
    """
    generations = known.get("generations", 10)
    steps, (name, size, _) = known.get("steps"), base.budget
    if steps is None and name != "num_env_steps":
        raise UsageError(f"--steps is missing: the budget is Trainer.{name}; say how many steps a generation has")
    steps = steps or math.ceil(size / generations)
    specification = Specification(
        perturb=known["perturb"],
        seed=base.seed,
        members=known.get("members", 8),
        generations=generations,
        steps=steps,
        share=known.get("share", 0.25),
        gap=known.get("gap", 0.0),
        last=known.get("last", 1),
    )
    if name == "num_env_steps" and (generations - 1) * steps >= size:
        raise UsageError(
            f"{counted(generations, 'generation')} of {steps:,} steps are more than Trainer.num_env_steps = {size:,}; "
            "give fewer --generations or --steps"
        )
    period = base.evaluation_period
    if not period or steps % period:
        raise UsageError(
            f"a generation of {steps:,} steps does not end with an evaluation (Evaluate.period is {period:,}); bind "
            f"--gin_param=Evaluate.period={steps}, or give other --steps"
        )
    if base.iteration_steps > steps:
        raise UsageError(
            f"an iteration takes {base.iteration_steps:,} steps, and a generation has {steps:,}; give more --steps"
        )
    if specification.share and not specification.num_replaced:
        raise UsageError(
            f"--share={specification.share:g} of {counted(specification.members, 'member')} is less than one; give "
            "more, or --share=0 for members that are separate runs"
        )
    return specification


def _difference(before: Specification, after: Specification) -> str:
    """Returns the lines by which two specifications differ."""
    pairs = zip(dataclasses.asdict(before).items(), dataclasses.asdict(after).values())
    return "\n".join(f"-{name} = {old}\n+{name} = {new}" for (name, old), new in pairs if old != new)


class Population:
    """Runs a population. It keeps nothing that the directories do not have, so that it can be killed at any moment.

    Args:
      directory: of the population, with its specification and its configuration.
      specification: of the population.
      jobs: for the processes of its runs.
      signals: of this process; after the first one, `run` returns.
      log: receives a line for each event.
    """

    def __init__(
        self,
        directory: Path,
        specification: Specification,
        jobs: Jobs,
        signals: StopSignals,
        log: Callable[[str], None],
    ):
        self._directory, self._specification, self._jobs = directory, specification, jobs
        self._signals, self._log = signals, log
        self._endings = Endings()
        self._results: list[Result] = []  # of all whole generations

    def run(self) -> None:
        """Runs the population to its end, or until a signal is received. The caller closes the jobs.

        Raises:
          RunError: all members of a generation have failed.
        """
        specification = self._specification
        members = first_generation(specification.members, specification.perturbed, specification.seed)
        for generation in range(specification.generations):
            members = [member.write(self._directory) for member in members]
            if not self._train(members):
                return
            results = [Result.of(member, self._state(member), specification.last) for member in members]
            self._settle_generation(generation, results)
            members = next_generation(
                results,
                specification.perturbed,
                specification.seed,
                specification.num_replaced,
                specification.gap,
            )

    def _train(self, members: Sequence[Member]) -> bool:
        """Trains the members of a generation to its end; returns False if a signal was received before."""
        by_directory = {self._directory / member.name: member for member in members}
        due = [member for member in members if not self._is_over(member)]
        if due:
            self._log(f"Generation {members[0].generation}: {counted(len(due), 'member')} of {len(members)} to train")
        while (due or self._jobs.running) and self._signals.number is None:
            while due and len(self._jobs.running) < self._jobs.size:
                self._start(due.pop(0))
            for ended in self._jobs.wait(PERIOD_SECONDS):
                member = by_directory[ended.directory]
                self._settle(member, ended)
                if not self._is_over(member):
                    due.append(member)
        return self._signals.number is None

    def _start(self, member: Member) -> None:
        settings = {
            **member.bindings,
            "Trainer.seed": self._specification.seed + member.number,
            "Trainer.stop_at": self._end(member),
        }
        bindings = [f"--gin_param={name}={value}" for name, value in settings.items()]
        # A perturbation is another configuration than that of the parent's checkpoint.
        arguments = [gin_file(self._directory), *bindings, "--on_config_change=new"]
        self._jobs.start(self._directory / member.name, arguments)

    def _settle(self, member: Member, ended: Ended) -> None:
        """Marks a member as failed if its process shows that it cannot go on."""
        reason = self._endings.failure(ended)
        if reason is None and ended.status == 0 and not self._is_over(member):
            reason = f"ended without an evaluation at {self._end(member):,} steps"
        if reason is not None:
            mark_failed(ended.directory, reason)
            self._log(f"{member.name} failed: {reason}")
        elif ended.status:
            self._log(f"{member.name} was stopped with status {ended.status}; it is continued")

    def _settle_generation(self, generation: int, results: Sequence[Result]) -> None:
        """Reports a whole generation, and makes the link to its best member."""
        self._results += results
        self._write_csv()
        best = max(results, key=lambda result: result.value)
        if best.has_failed:
            reasons = [self._state(result.member).failure or "its return is not finite" for result in results]
            raise RunError(f"all members of generation {generation} have failed; the first one: {reasons[0]}")
        self._log(
            f"Generation {generation}: best return {significant(best.value)} by {best.member.name} "
            f"({', '.join(f'{name} = {value}' for name, value in best.member.bindings.items())})"
        )
        link = self._directory / BEST
        temporary = link.with_name(f".{BEST}.{os.getpid()}.tmp")
        with writing(link):
            temporary.unlink(missing_ok=True)
            temporary.symlink_to(best.member.name)
            os.replace(temporary, link)

    def _write_csv(self) -> None:
        """Writes a row for each member of each whole generation: its parent, its settings and its value."""
        text = io.StringIO()
        rows = csv.writer(text, lineterminator="\n")
        names = list(self._specification.perturb)
        rows.writerow(["generation", "member", "parent", *names, "value"])
        for member, value, _ in self._results:
            settings = [member.bindings[name] for name in names]
            rows.writerow([member.generation, member.number, member.parent or "", *settings, value])
        write_atomically(self._directory / CSV, text.getvalue())

    def _end(self, member: Member) -> int:
        """Returns the clock at which a member's generation ends."""
        return (member.generation + 1) * self._specification.steps

    def _is_over(self, member: Member) -> bool:
        """Returns True if a member has reached the end of its generation, or has failed."""
        state = self._state(member)
        if state.failure is not None or state.is_done:
            return True
        is_evaluated = any(clock >= self._end(member) for clock in state.evaluations)
        return is_evaluated and state.checkpoint is not None and state.checkpoint >= self._end(member)

    def _state(self, member: Member) -> RunState:
        return RunState.read(self._directory / member.name)
