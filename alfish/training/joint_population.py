"""Population-based training of the policies of one run.

Source: Jaderberg et al., 2017, Population based training of neural networks.
"""

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import gin
import numpy as np

from alfish.errors import UsageError
from alfish.parameters import NonNegativeFloat, PositiveInt, Range, Rate, checked
from alfish.parameters.kinds import shown
from alfish.parameters.rebinding import Setting, number
from alfish.policies.joint_unroller import JointUnroller
from alfish.policies.member import Member as Policy
from alfish.runs.files import write_atomically
from alfish.specs import reward_names
from alfish.training.generations import Member, MemberResult, Perturbed, first_generation, next_generation
from alfish.training.listener import Listener, Report, Run
from alfish.training.listeners import Evaluate

CSV = "members.csv"  # file in the run's directory
METRICS, MEAN_RETURN = "metrics/", "/mean_return"
_PURPOSE = 13  # makes the seeds of populations differ from other seeds of the run


class Group(NamedTuple):
    """Policies that may replace each other.

    Attributes:
      policies: policies with networks of equal shapes.
      seed: seed of the selection and the perturbations.
      num_replaced: number of policies that are replaced after a generation.
    """

    policies: tuple[Policy, ...]
    seed: int
    num_replaced: int


@gin.configurable(module="alfish")
@checked
class JointPopulation(Listener):
    """Periodically replaces the worst policies of a run by copies of the best policies with perturbed settings.

    Each parameter in `perturb` begins with the value that is bound in the policy's scope, if there is one
    (`p1/Learner.learning_rate = 1e-3`); otherwise with a random value within the bounds: log-uniform, or uniform if the
    lower bound is 0. At the end of a generation, each of the worst policies is replaced: it takes the networks,
    transforms and optimizers of one of the best policies, and that policy's values times 0.8 or 1.25. The replaced
    policy keeps its own rows, counters and random numbers, and its means of metrics begin again. The selection is the
    same as in `alfish population`, and depends only on the results and the run's seed. A policy without a result, for
    example without a finished episode, continues unchanged.

    `members.csv` in the run's directory has the parent, the values and the result of each policy in each generation.

    Args:
      perturb: bounds of each parameter that differs between policies, such as {'Learner.learning_rate': '1e-5..1e-2'}.
        An entry of a list or dict is `NAME[KEY]`, such as 'PPO.reward_weights[1]'. If both bounds are whole numbers,
        values are whole numbers.
      objective: value by which policies are compared. 'metrics/NAME' is the mean of a metric over its window, such as
        'metrics/average_return/win' for an entry of a vector reward. 'evaluation/mean_return' is the mean return of the
        first `Evaluate` listener, here named 'evaluation'.
      period: number of clock steps of a generation.
      first: clock steps at the end of the first generation; None means `period`.
      share: fraction of the policies that are replaced after a generation, in (0, 0.5].
      gap: number of standard errors by which a policy must be worse than the policy that replaces it.
      mutation_rate: probability that a copy's parameter is perturbed, in (0, 1].
      perturbs_others: whether the values of policies that are neither replaced nor among the best are also perturbed.
      among: names of the policies in the population; None means all policies that train. A policy can be replaced only
        by a policy that may play exactly the same agents.
      keeps: name of a policy that is never replaced and keeps the values of the configuration, but may be copied.
    """

    changes_algorithm = True

    def __init__(
        self,
        perturb: Mapping[str, str] = gin.REQUIRED,
        objective: str = "metrics/average_return",
        period: PositiveInt = 100_000,
        first: PositiveInt | None = None,
        share: Annotated[float, Range(0, 0.5, above=True)] = 0.25,
        gap: NonNegativeFloat = 0.0,
        mutation_rate: Rate = 1.0,
        perturbs_others: bool = False,
        among: Sequence[str] | None = None,
        keeps: str | None = None,
    ):
        self._perturbed = [
            Perturbed.of(name, bounds, f"JointPopulation.perturb[{name!r}] = {bounds!r}")
            for name, bounds in perturb.items()
        ]
        if not self._perturbed:
            raise UsageError("JointPopulation.perturb is empty; name a parameter, as in {'PPO.gamma': '0.9..0.999'}")
        self._objective = objective
        self._period = period
        self._share = share
        self._among = among
        self._keeps = keeps
        self._decision = gap, mutation_rate, perturbs_others
        self._next = period if first is None else first
        self._groups: list[Group] = []
        self._members: dict[str, Member] = {}  # by the policy's name
        self._rows: list[list[Any]] = []  # rows of `members.csv`, for all complete generations
        self._evaluated: dict[str, tuple[float, float]] = {}  # mean return and its variance, by the policy's name
        self._report: Report | None = None  # newest report; `Evaluate` adds to it after this listener

    def start(self, run: Run) -> None:
        policies = run.unroller.members if isinstance(run.unroller, JointUnroller) else ()
        if len(policies) < 2:
            raise UsageError(
                "JointPopulation needs several policies in one run, see Trainer.policies; leave the listener out, or "
                "train separate runs by `alfish population`"
            )
        self._groups = list(self._grouped(run, self._taking_part(policies)))
        for group in self._groups:
            self._check_objective(run, group.policies[0])
            first = first_generation(len(group.policies), self._perturbed, group.seed)
            for policy, drawn in zip(group.policies, first):
                self._begin(run, policy, drawn)

    def after_iteration(self, run: Run, report: Report) -> None:
        self._read_evaluation()
        self._report = report
        if run.clock.finished:
            self._write(run, [row for group in self._groups for row in self._rows_of(group, self._results(group))])
        elif report.clock >= self._next:
            self._next += (report.clock - self._next) // self._period * self._period + self._period
            for group in self._groups:
                self._end_generation(run, group, report.clock)
            self._write(run)

    def state_dict(self) -> dict[str, Any]:
        self._read_evaluation()
        members = {name: [one.generation, one.parent or "", dict(one.bindings)] for name, one in self._members.items()}
        evaluated = {name: list(found) for name, found in self._evaluated.items()}
        return {"next": self._next, "members": members, "rows": [*self._rows], "evaluated": evaluated}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._next, self._rows = state["next"], [list(row) for row in state["rows"]]
        self._evaluated = {name: (mean, variance) for name, (mean, variance) in state["evaluated"].items()}
        self._members = {
            name: Member(generation, -1, parent or None, bindings)
            for name, (generation, parent, bindings) in state["members"].items()
        }

    def _taking_part(self, policies: Sequence[Policy]) -> list[Policy]:
        """Returns the policies of the population."""
        by_name = {policy.name: policy for policy in policies}
        for setting, names in (("among", self._among or ()), ("keeps", [self._keeps] if self._keeps else ())):
            for name in names:
                if name not in by_name:
                    raise UsageError(f"JointPopulation.{setting} names {name}; the policies are {', '.join(by_name)}")
                if not by_name[name].trains:
                    raise UsageError(
                        f"JointPopulation.{setting} names {name}, which does not train; leave the policy out, or bind "
                        f"{name}/PolicySettings.trains = True"
                    )
        return [policy for policy in policies if policy.trains and (self._among is None or policy.name in self._among)]

    def _grouped(self, run: Run, policies: Sequence[Policy]) -> Iterator[Group]:
        """Yields the groups of two or more policies that may replace each other."""
        lineup = run.unroller.lineup  # type: ignore[attr-defined]
        found: dict[tuple[str, ...], list[Policy]] = {}
        for policy in policies:
            found.setdefault(tuple(lineup.agents_of(policy.name)), []).append(policy)
        groups = [each for each in found.values() if len(each) > 1]
        if not groups:
            raise UsageError(
                "JointPopulation needs two policies that train and may play the same agents; give some agents "
                "several policies, as in Trainer.policies = {'p': ('*', 4)}"
            )
        for place, each in enumerate(groups):
            num_replaced = int(self._share * len(each))
            if not num_replaced:
                raise UsageError(
                    f"JointPopulation.share is {self._share:g}, which of {len(each)} policies "
                    f"({', '.join(policy.name for policy in each)}) is less than one; raise the share, or train more "
                    "policies"
                )
            for policy in each[1:]:
                _check_alike(each[0], policy)
            seed = int(np.random.SeedSequence([run.seed, place, _PURPOSE]).generate_state(1)[0])
            yield Group(tuple(each), seed, num_replaced)

    def _check_objective(self, run: Run, policy: Policy) -> None:
        """Raises UsageError if policies have no value with the name `objective`."""
        evaluations = [one.name for one in run.listeners if isinstance(one, Evaluate)][:1]
        entries = [f"/{entry}" for entry in reward_names(policy.group.reward_spec)]
        metrics = [name + entry for name in policy.metrics.windows() for entry in ("", *entries)]
        known = [f"{METRICS}{name}" for name in metrics] + [f"{name}{MEAN_RETURN}" for name in evaluations]
        if self._objective not in known:
            raise UsageError(
                f"JointPopulation.objective is {self._objective!r}, and the policies have {', '.join(known)}; name one "
                "of these values"
            )

    def _begin(self, run: Run, policy: Policy, drawn: Member) -> None:
        """Gives a policy its first values; after a resume, its saved values.

        Args:
          run: run of the policy.
          policy: policy that begins.
          drawn: member with random values, which apply where no value is configured or saved.
        """
        saved = self._members.get(policy.name, drawn)
        bindings: dict[str, str] = {}
        for one in self._perturbed:
            setting = Setting.parse(one.name, policy.name)
            for end in one.items:
                setting.check(number(end))
            text = saved.bindings.get(one.name)
            if saved is drawn or text is None:
                text = self._first(one, setting, policy) or drawn.bindings[one.name]
            bindings[one.name] = text
        self._members[policy.name] = saved._replace(number=drawn.number, bindings=bindings)
        if bindings != policy.bindings:
            run.unroller.rebuild(policy, bindings, policy)  # type: ignore[attr-defined]

    def _first(self, one: Perturbed, setting: Setting, policy: Policy) -> str | None:
        """Returns the first value of a parameter; None if the configuration does not determine it."""
        is_kept = policy.name == self._keeps
        value = setting.configured() if is_kept else setting.bound()
        if value is None and not is_kept:
            return None
        text = repr(value) if type(value) in (int, float) else ""
        if not (text if is_kept else one.has(text)):
            raise UsageError(
                f"{policy.name} begins with {one.name} = {shown(value)}, and JointPopulation.perturb has {one} for it; "
                f"bind {'a number' if is_kept else 'a number within the bounds, or give other bounds'}"
            )
        return text

    def _end_generation(self, run: Run, group: Group, clock: int) -> None:
        """Replaces the worst policies of a group."""
        results = self._results(group)
        self._rows += self._rows_of(group, results)
        for policy in group.policies:
            before = self._members[policy.name]
            self._members[policy.name] = before._replace(generation=before.generation + 1, parent=policy.name)
        num_replaced = min(group.num_replaced, len(results) // 2)
        kept = [number for number, policy in enumerate(group.policies) if policy.name == self._keeps]
        following = next_generation(results, self._perturbed, group.seed, num_replaced, *self._decision, kept)
        by_name = {result.member.name: group.policies[result.member.number] for result in results}
        for result, after in zip(results, following, strict=True):
            assert after.parent is not None
            policy, parent = group.policies[after.number], by_name[after.parent]
            if parent is not policy or after.bindings != result.member.bindings:
                run.unroller.rebuild(policy, after.bindings, parent)  # type: ignore[attr-defined]
                if parent is not policy:
                    self._forget_results(policy)
                settings = ", ".join(f"{name} = {text}" for name, text in after.bindings.items())
                run.log(f"{policy.name} continues from {parent.name} at {clock:,} steps, with {settings}")
            self._members[policy.name] = after._replace(parent=parent.name)

    def _results(self, group: Group) -> list[MemberResult]:
        """Returns the results of all policies that have a result, in the order of the policies."""
        results = []
        for policy in group.policies:
            if self._objective.startswith(METRICS):
                window = policy.metrics.windows().get(self._objective.removeprefix(METRICS))
                found = None if window is None else window.mean_and_variance()
            else:
                found = self._evaluated.get(policy.name)
            if found is not None:
                results.append(MemberResult(self._members[policy.name], *found))
        return results

    def _forget_results(self, policy: Policy) -> None:
        """Removes the results of a policy, so that its next results are those of its new networks."""
        for window in policy.metrics.windows().values():
            window.clear()
        self._evaluated.pop(policy.name, None)

    def _read_evaluation(self) -> None:
        """Reads the returns of the newest report, if there was an evaluation."""
        if self._report is None or self._report.evaluation is None:
            return
        for name, returns in self._report.evaluation.by_objective.items():
            own = np.array(returns)[np.isfinite(returns)]
            if len(own):
                variance = float(own.var(ddof=1)) / len(own) if len(own) > 1 else np.inf
                self._evaluated[name] = float(own.mean()), float(variance)
        self._report = None

    def _rows_of(self, group: Group, results: Sequence[MemberResult]) -> list[list[Any]]:
        return [
            [
                one.generation,
                group.policies[one.number].name,
                one.parent,
                *(one.bindings[each.name] for each in self._perturbed),
                value,
            ]
            for one, value, _ in results
        ]

    def _write(self, run: Run, more: Sequence[Sequence[Any]] = ()) -> None:
        """Writes the rows of all complete generations, and `more`."""
        text = io.StringIO()
        names = [one.name for one in self._perturbed]
        rows = csv.writer(text, lineterminator="\n")
        rows.writerows([["generation", "member", "parent", *names, "value"], *self._rows, *more])
        write_atomically(run.directory.path / CSV, text.getvalue())


def _check_alike(one: Policy, other: Policy) -> None:
    """Raises UsageError if one policy cannot continue with the networks of another."""
    kinds = [type(policy.algorithm).__name__ for policy in (one, other)]
    found = f"{kinds[1]} is not {kinds[0]}" if kinds[0] != kinds[1] else other.difference(one)
    if found:
        raise UsageError(
            f"{other.name} cannot continue from {one.name}: {found}; build both policies with the same algorithm and "
            "networks, or name other policies in JointPopulation.among"
        )
