"""Selection between two generations of a population: decides which members continue and which are replaced.

`alfish population` selects among separate runs, and `JointPopulation` among policies of one run.

Source: Jaderberg et al., 2017, Population based training of neural networks; truncation selection, in generations.
"""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from alfish.errors import UsageError
from alfish.parameters.varied import INTEGER, NAME, NUMBER, Parameter, check_range, draw_log
from alfish.training.clock import BUDGETS

FACTORS = (0.8, 1.25)
MAX_DRAWS = 20  # attempts to perturb a copy that would equal another member
OWN = ("seed", "stop_at", *BUDGETS)  # parameters of Trainer that must not be perturbed


class Perturbed(Parameter):
    """A parameter whose values differ between members, and change between generations."""

    @classmethod
    def parse(cls, argument: str) -> "Perturbed":
        """Returns the parameter in `NAME=LOW..HIGH`. If both bounds are whole numbers, values are whole numbers.

        Raises:
          UsageError: the argument has another form, or no value lies between the bounds.
        """
        said = f"--perturb={argument}"
        name, _, bounds = argument.partition("=")
        if re.fullmatch(rf"\s*{NAME}\s*", name) is None or not _bounds_in(bounds):
            raise UsageError(f"{said} is not NAME=LOW..HIGH, as in --perturb=Learner.learning_rate=1e-5..1e-2")
        owner, _, parameter = name.strip().rpartition(".")
        perturbed = cls.of(name.strip(), bounds, said)
        if parameter.partition("[")[0] == "reward_weights":
            raise UsageError(
                f"{said}: weights of rewards are saved with a policy, so a copy would have the weights of its parent; "
                "perturb them among policies of one run, by JointPopulation"
            )
        if owner == "Trainer" and parameter in OWN:
            raise UsageError(f"{said}: the population itself needs {name.strip()} to be the same for all members")
        return perturbed

    @classmethod
    def of(cls, name: str, bounds: str, said: str) -> "Perturbed":
        """Returns the parameter `name` with bounds `LOW..HIGH`.

        Args:
          name: name of the parameter, as in a gin file.
          bounds: text of the bounds.
          said: text of the setting in messages, as the user wrote it.

        Raises:
          UsageError: the bounds have another form, or no value lies between them.
        """
        items = _bounds_in(bounds)
        if not items:
            raise UsageError(f"{said}: bounds are LOW..HIGH, as in 1e-5..1e-2")
        low, high = map(float, items)
        check_range(low, high, said, f"{items[1]}..{items[0]}")
        if low < 0:
            raise UsageError(f"{said}: values are multiplied by {FACTORS[0]} or {FACTORS[1]}; LOW is at least 0")
        is_whole = all(re.fullmatch(INTEGER, item) for item in items)
        return cls(name, "int" if is_whole else "log" if low else "uniform", items)

    def __str__(self) -> str:
        return "..".join(self.items)

    def draw(self, generator: np.random.Generator) -> str:
        """Returns a random value: log-uniform, or uniform if the lower bound is 0."""
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
      parent: name of the member from which this member continues; None if it begins with new parameters.
      bindings: values of the perturbed parameters as gin texts, by the parameter's name.
    """

    generation: int
    number: int
    parent: str | None
    bindings: Mapping[str, str]

    @property
    def name(self) -> str:
        """Name of the member, such as 'g003/m2'."""
        return f"g{self.generation:03d}/m{self.number}"


class MemberResult(NamedTuple):
    """Result of a member at the end of its generation.

    Attributes:
      member: member in its generation.
      value: mean return; -inf if the member has failed, or the mean is not finite.
      variance: variance of `value`, estimated from the episodes; inf for a single episode.
    """

    member: Member
    value: float
    variance: float

    @property
    def has_failed(self) -> bool:
        return self.value == -math.inf

    def beats(self, other: "MemberResult", gap: float) -> bool:
        """Returns whether this value is higher by more than `gap` standard errors, or `other` has failed."""
        margin = gap * math.sqrt(self.variance + other.variance) if gap else 0.0
        return other.has_failed or self.value - other.value > margin


def first_generation(num_members: int, perturbed: Sequence[Perturbed], seed: int) -> list[Member]:
    """Returns members with random values of the perturbed parameters."""
    generators = [np.random.default_rng([seed, 0, number]) for number in range(num_members)]
    drawn = [{one.name: one.draw(generator) for one in perturbed} for generator in generators]
    return [Member(0, number, None, bindings) for number, bindings in enumerate(drawn)]


def next_generation(
    results: Sequence[MemberResult],
    perturbed: Sequence[Perturbed],
    seed: int,
    num_replaced: int,
    gap: float,
    mutation_rate: float = 1.0,
    perturbs_others: bool = False,
    kept: Collection[int] = (),
) -> list[Member]:
    """Returns the members of the next generation.

    Each failed member, and each of the worst `num_replaced` members, is replaced: it continues from one of the best
    `num_replaced` members, with perturbed settings of that member. All other members continue with their own settings.
    A failed member that is not replaced ends.

    Args:
      results: results of a generation, ordered by the members' numbers.
      perturbed: parameters that differ between members.
      seed: seed of the population.
      num_replaced: number of members that are replaced, at most half of them.
      gap: number of standard errors by which a member must be worse than the member that replaces it.
      mutation_rate: probability that a copy's parameter is perturbed, in (0, 1].
      perturbs_others: whether the settings of members that are neither replaced nor among the best are also perturbed.
      kept: numbers of members that are never replaced, and whose settings do not change.
    """
    ranked = sorted(results, key=lambda result: -result.value)
    best = [result for result in ranked[:num_replaced] if not result.has_failed]
    others = [result for result in ranked if result not in best and result.member.number not in kept]
    worst = others[::-1][:num_replaced]
    followers = [_follower(result, result) for result in results if not result.has_failed]
    # Parent and settings of each member. A draw that repeats one of these pairs is rejected.
    settings = [(one.parent, one.bindings) for one in followers]
    members = {one.number: one for one in followers}
    for result in results:
        is_lost = result in worst or result.has_failed
        if not best or result.member.number in kept or not (is_lost or (perturbs_others and result not in best)):
            continue
        generator = np.random.default_rng([seed, result.member.generation + 1, result.member.number])
        parents = best if is_lost else [result]
        for _ in range(MAX_DRAWS):
            parent = parents[generator.integers(len(parents))]
            copy = _perturbed(_follower(result, parent), perturbed, mutation_rate, generator)
            if (copy.parent, copy.bindings) not in settings:
                break
        if parent is result or parent.beats(result, gap):
            settings.append((copy.parent, copy.bindings))
            members[copy.number] = copy
    return [members[number] for number in sorted(members)]


def _perturbed(
    member: Member, perturbed: Sequence[Perturbed], mutation_rate: float, generator: np.random.Generator
) -> Member:
    """Returns a member with perturbed values, each with the probability `mutation_rate`."""
    bindings = dict(member.bindings)
    for one in perturbed:
        if mutation_rate == 1.0 or generator.random() < mutation_rate:
            bindings[one.name] = one.perturb(bindings[one.name], generator)
    return member._replace(bindings=bindings)


def _follower(result: MemberResult, parent: MemberResult) -> Member:
    """Returns the next member with the number of `result`; it continues from `parent` with the settings of `parent`."""
    generation, number = result.member.generation + 1, result.member.number
    return Member(generation, number, parent.member.name, parent.member.bindings)


def _bounds_in(text: str) -> tuple[str, ...]:
    """Returns the two bounds of `LOW..HIGH` as texts; empty if the text has a different form."""
    match = re.fullmatch(rf"\s*({NUMBER})\s*\.\.\s*({NUMBER})\s*", text)
    return match.groups() if match else ()
