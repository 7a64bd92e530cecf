"""Generations of a population: the settings of each member, and the member whose checkpoint it continues from.

    g000/m0, g000/m1, ...    run directories of `alfish train`, which stop at `steps`
    g001/m0, ...             each continues from the last checkpoint of a member of g000, and stops at 2 x `steps`

A run directory is written by one run, and never changes afterwards. It belongs to the population once it has
`member.json`, which is written last when the directory is created. The members of a generation follow from the
directories of the previous generation and from the specification, so computing them again gives the same members.

Source: Jaderberg et al., 2017, Population based training of neural networks; truncation selection, with generations.
"""

import json
import math
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from alfish.errors import UsageError
from alfish.runs import contents
from alfish.runs.checkpoints import Checkpoints
from alfish.runs.files import make_directory, open_atomically, open_regular, write_atomically, writing
from alfish.sweeps.run_state import RunState, mean_of_means
from alfish.sweeps.search import INTEGER, NUMBER, Parameter, check_range, draw_log
from alfish.training.clock import BUDGETS

MEMBER = "member.json"
PLAIN = re.compile(rf"{NUMBER}|g\d+/m\d+")  # form of the texts in the file of a member: a number, or a parent
FACTORS = (0.8, 1.25)
MAX_DRAWS = 20  # attempts to perturb a copy that would equal another member
OWN = ("seed", "stop_at", *BUDGETS)  # parameters of Trainer that the population sets or relies on


class Perturbed(Parameter):
    """A parameter whose values differ between members, and change between generations."""

    @classmethod
    def parse(cls, argument: str) -> "Perturbed":
        """Returns the parameter of `NAME=LOW..HIGH`. With two whole numbers as bounds, values are whole.

        Raises:
          UsageError: the argument has another form, or no value lies between the bounds.
        """
        said = f"--perturb={argument}"
        match = re.fullmatch(rf"\s*([\w./]+)\s*=\s*({NUMBER})\s*\.\.\s*({NUMBER})\s*", argument)
        if match is None:
            raise UsageError(f"{said} is not NAME=LOW..HIGH, as in --perturb=Learner.learning_rate=1e-5..1e-2")
        name, *items = match.groups()
        low, high = map(float, items)
        check_range(low, high, said, f"{items[1]}..{items[0]}")
        if low < 0:
            raise UsageError(f"{said}: values are multiplied by {FACTORS[0]} or {FACTORS[1]}; LOW is at least 0")
        owner, _, parameter = name.rpartition(".")
        if owner == "Trainer" and parameter in OWN:
            raise UsageError(f"{said}: the population itself needs {name} to be the same for all members")
        is_whole = all(re.fullmatch(INTEGER, item) for item in items)
        return cls(name, "int" if is_whole else "log" if low else "uniform", tuple(items))

    def __str__(self) -> str:
        return "..".join(self.items)

    def draw(self, generator: np.random.Generator) -> str:
        """Returns a random value, with a uniform logarithm unless the lower bound is 0."""
        low, high = self.ends
        return self.text(draw_log(low, high, generator) if low else generator.uniform(low, high))

    def perturb(self, text: str, generator: np.random.Generator) -> str:
        """Returns a value times 0.8 or 1.25, within the bounds; a whole number changes by at least 1."""
        value, is_up = float(text), bool(generator.integers(2))
        new = value * FACTORS[is_up]
        if self.kind == "int":
            new = max(new, value + 1) if is_up else min(new, value - 1)
        return self.text(new)


class Member(NamedTuple):
    """A member in one generation.

    Attributes:
      generation, number: numbers of the generation and of the member in it, from 0.
      parent: name of the member that this one continues from; None if it begins with new parameters.
      bindings: gin texts of the perturbed parameters.
    """

    generation: int
    number: int
    parent: str | None
    bindings: Mapping[str, str]

    @property
    def name(self) -> str:
        """Directory of the member within the population's directory, such as 'g003/m2'."""
        return f"g{self.generation:03d}/m{self.number}"

    def write(self, root: Path) -> "Member":
        """Creates the run directory, unless it exists; returns the member that is stored there.

        Args:
          root: directory of the population.

        Raises:
          UsageError: the directory is not a member of this population.
        """
        path = root / self.name / MEMBER
        if os.path.lexists(path):
            return self._read(path)
        make_directory(path.parent)
        if self.parent is not None:
            for kind in ("replay", "checkpoints"):  # the newest rows of replay belong to the newest checkpoint
                saved = Checkpoints(root / self.parent / kind)
                for newest in saved.steps()[-1:]:
                    make_directory(path.parent / kind)
                    _link(saved.path(newest), Checkpoints(path.parent / kind).path(newest))
        content = {"parent": self.parent, "bindings": dict(self.bindings)}
        write_atomically(path, json.dumps(content, indent=2) + "\n")
        return self

    def _read(self, path: Path) -> "Member":
        """Returns the member that a file describes; its texts become arguments of a command, so they are checked."""
        content = contents.record(path.parent, path.name, {"bindings": dict})
        if content is None or content.keys() != {"parent", "bindings"}:
            raise UsageError(f"{path} does not describe a member; choose another --root_dir")
        found = self._replace(**content)
        is_right = found.bindings.keys() == self.bindings.keys() and (found.parent is None) == (self.parent is None)
        texts = [*found.bindings.values(), *([] if found.parent is None else [found.parent])]
        if not is_right or not all(isinstance(text, str) and PLAIN.fullmatch(text) for text in texts):
            raise UsageError(f"{path} describes a member of another population; choose another --root_dir")
        return found


class MemberResult(NamedTuple):
    """Result of a member at the end of its generation.

    Attributes:
      member: member in its generation.
      value: mean return over the member's last evaluations; -inf if the member has failed, or the mean is not finite.
      variance: variance of `value`, estimated from the episodes of these evaluations; inf for a single episode.
    """

    member: Member
    value: float
    variance: float

    @classmethod
    def of(cls, member: Member, state: RunState, last: int) -> "MemberResult":
        """Returns the result of a member.

        Args:
          member: member whose result is wanted.
          state: state of the member's run.
          last: number of evaluations at the end of the generation that count.
        """
        counting = list(state.evaluations.values())[-last:]
        value = mean_of_means(counting)
        if state.failure is not None or value is None or not math.isfinite(value):
            return cls(member, -math.inf, 0.0)
        variances = [float(np.var(one, ddof=1)) / len(one) if len(one) > 1 else math.inf for one in counting]
        return cls(member, value, sum(variances) / len(counting) ** 2)

    @property
    def has_failed(self) -> bool:
        return self.value == -math.inf

    def beats(self, other: "MemberResult", gap: float) -> bool:
        """Returns whether this value is higher by more than `gap` standard errors of the difference."""
        margin = gap * math.sqrt(self.variance + other.variance) if gap else 0.0
        return other.has_failed or self.value - other.value > margin


def first_generation(num_members: int, perturbed: Sequence[Perturbed], seed: int) -> list[Member]:
    """Returns members with random values of the perturbed parameters."""
    generators = [np.random.default_rng([seed, 0, number]) for number in range(num_members)]
    drawn = [{one.name: one.draw(generator) for one in perturbed} for generator in generators]
    return [Member(0, number, None, bindings) for number, bindings in enumerate(drawn)]


def next_generation(
    results: Sequence[MemberResult], perturbed: Sequence[Perturbed], seed: int, num_replaced: int, gap: float
) -> list[Member]:
    """Returns the members that follow a complete generation.

    Each of the worst `num_replaced` members, and each failed member, continues from the checkpoint of one of the best
    `num_replaced` members, with that member's settings perturbed. All other members continue with their own settings. A
    failed member that is not replaced ends.

    Args:
      results: results of a generation, ordered by the members' numbers.
      perturbed: parameters that differ between members.
      seed: seed of the population.
      num_replaced: number of members that are replaced, at most half of them.
      gap: number of standard errors by which a member must be worse than the member that replaces it.
    """
    ranked = sorted(results, key=lambda result: -result.value)
    best = [result for result in ranked[:num_replaced] if not result.has_failed]
    worst = ranked[len(ranked) - num_replaced :]
    followers = [_follower(result, result) for result in results if not result.has_failed]
    settings = [(one.parent, one.bindings) for one in followers]  # copies must differ from these
    members = {one.number: one for one in followers}
    for result in results:
        if not best or not (result in worst or result.has_failed):
            continue
        generator = np.random.default_rng([seed, result.member.generation + 1, result.member.number])
        for _ in range(MAX_DRAWS):
            parent = best[generator.integers(len(best))]
            copy = _follower(result, parent)
            copy = copy._replace(bindings={p.name: p.perturb(copy.bindings[p.name], generator) for p in perturbed})
            if (copy.parent, copy.bindings) not in settings:
                break
        if parent.beats(result, gap):
            settings.append((copy.parent, copy.bindings))
            members[copy.number] = copy
    return [members[number] for number in sorted(members)]


def _follower(result: MemberResult, parent: MemberResult) -> Member:
    """Returns the member that takes the place of `result`, and continues from `parent` with its settings."""
    generation, number = result.member.generation + 1, result.member.number
    return Member(generation, number, parent.member.name, parent.member.bindings)


def _link(source: Path, target: Path) -> None:
    """Makes `target` a hard link of a file that is never written again; a copy, if hard links are impossible."""
    with writing(target):
        if target.exists():  # left by a command that was killed
            return
        try:
            os.link(source, target)
        except OSError:
            with open_regular(source) as read, open_atomically(target) as file:
                shutil.copyfileobj(read, file)
