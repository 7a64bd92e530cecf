"""One of several policies: its settings, and the parts of a run that belong to it."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import gin
import numpy as np
import torch

from alfish.algorithms.acting import ModeSwitch
from alfish.algorithms.imitation.external import is_opened_to_act
from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.data import Experience
from alfish.environments.games import Games, Group
from alfish.errors import UsageError
from alfish.learner.batches import Batches, EpochBatches, ReplayBatches
from alfish.learner.learner import Learner
from alfish.metrics import Metrics
from alfish.offline.recorded_spaces import TrainedSpaces
from alfish.parameters import Range, checked, gin_internals
from alfish.parameters.measured import MeasuredSchedule
from alfish.parameters.parts import build
from alfish.parameters.rebinding import rebound
from alfish.policies.lineup import Lineup, family_of
from alfish.policies.networks import after_iteration, make_networks, observe
from alfish.policies.seat import Seat
from alfish.runs.random_state import RandomStream
from alfish.runs.timer import Timer
from alfish.specs import reward_names
from alfish.transforms import Transforms

_PURPOSE = 11  # makes the seeds of streams differ from other seeds of the run


@gin.configurable(module="alfish.policies")
@checked
class PolicySettings:
    """Settings of one of several policies.

    A policy's settings and parts are built in the gin scope of its name: `runner/Learner.learning_rate = 1e-3` applies
    to the policy `runner`, and `Learner.learning_rate` to all policies without a value of their own.

    Args:
      algorithm, transforms, batches, learner: arguments as in `Trainer`; None means the value of `Trainer`.
      trains: whether the policy learns; if not, it only acts. None means that it learns unless it is a snapshot.
      snapshot_of: name of the policy of which this policy is a snapshot. A snapshot only acts, is built in the scope of
        the other policy, and periodically receives the other policy's weights (`Snapshots`). None means that the policy
        is not a snapshot.
      seed: seed of the policy's parameters and random numbers; None means a seed derived from the run's seed and the
        number of the policy.
    """

    def __init__(
        self,
        algorithm: Callable[..., RLAlgorithm] | None = None,
        transforms: Sequence[Callable[..., Any]] | None = None,
        batches: Callable[[], Batches] | None = None,
        learner: Callable[[RLAlgorithm], Learner] | None = None,
        trains: bool | None = None,
        snapshot_of: str | None = None,
        seed: Annotated[int, Range(0, 2**63 - 1)] | None = None,
    ):
        self.algorithm, self.transforms = algorithm, transforms
        self.batches, self.learner = batches, learner
        parts = {"algorithm": algorithm, "transforms": transforms, "batches": batches, "learner": learner}
        given: dict[str, Any] = {**parts, "trains": trains or None}
        unused = next((name for name, value in given.items() if value is not None), None)
        if snapshot_of is not None and unused is not None:
            raise UsageError(
                f"PolicySettings.{unused} is set, but the policy is a snapshot of {snapshot_of!r}, whose parts it has, "
                f"and only acts; leave {unused} out"
            )
        self.trains = snapshot_of is None if trains is None else trains
        self.snapshot_of = snapshot_of
        self.seed = seed


def settings_of(name: str) -> PolicySettings:
    """Returns the settings of a policy; settings of past0 that its scope does not bind come from the scope `past`."""
    with gin.config_scope(name):
        own = build(PolicySettings, PolicySettings, f"{name}/PolicySettings")
    family = family_of(name)
    if family == name or all(scope != family for scope, _ in gin_internals.bindings()):
        return own
    with gin.config_scope(family):
        others = build(PolicySettings, PolicySettings, f"{family}/PolicySettings")
    for key, value in vars(own).items():
        setattr(own, key, _chosen(value, getattr(others, key)))
    own.trains = own.trains and others.trains
    return own


def built_as(name: str) -> tuple[str, PolicySettings]:
    """Returns the gin scope in which a policy's parts are built, and the settings of the parts.

    Raises:
      UsageError: the policy is a snapshot of itself, or of another snapshot.
    """
    source = settings_of(name).snapshot_of
    if source is None:
        return name, settings_of(name)
    settings = settings_of(source)
    if settings.snapshot_of is not None:
        raise UsageError(
            f"{name}/PolicySettings.snapshot_of is {source!r}, which is a snapshot too; name a policy that trains"
        )
    return source, settings


class Member:
    """One of several policies, with its parts of the run.

    Args:
      name: name of the policy.
      number: index of the policy among all policies, from 0.
      lineup: lineup of all policies.
      games: games to play.
      defaults: values of `Trainer` for settings that a policy may override.
      metrics: factories of the policy's metrics.
      seed: seed of the run.
      device: device of the networks.
      progress: progress of the run, shared by all policies, float64 0-d.
      bindings: values, as gin text, of parameters that a population has changed, by name; see `parameters.rebinding`.

    Attributes:
      bindings: the constructor's argument.
      group: group of the policy's agents.
      trains: whether the policy learns.
      is_training: whether the policy learns now; set by `AlternateTraining`. While False, the steps of the policy are
        not counted.
      snapshot_of: name of the policy whose snapshot this policy is; None means that the policy is not a snapshot.
      algorithm, transforms, batches, seat, learner, metrics: parts of the policy.
      modes: switch between acting and training.
      stream: random numbers with which the policy is built, acts and trains. In workers, it acts with random numbers
        derived from the same seed.
      num_steps: number of environment steps of the policy so far.
      num_columns: number of columns of the policy's experience; set by `spread`.
      steps_per_step: expected number of environment steps of the policy when all games of an unroll step once; set by
        `spread`.

    Raises:
      UsageError: parts do not fit one another.
    """

    def __init__(
        self,
        name: str,
        number: int,
        lineup: Lineup,
        games: Games,
        defaults: Mapping[str, Any],
        metrics: Sequence[Callable[[], Any]],
        seed: int,
        device: torch.device,
        progress: torch.Tensor,
        bindings: Mapping[str, str] | None = None,
    ):
        self.name, self.num_steps = name, 0
        self.bindings = dict(bindings or {})
        self._given = number, lineup, games, defaults, metrics, seed, device, progress
        self._repeated: dict[str, Callable[[Member], None]] = {}  # calls to repeat for a rebuilt policy, by name
        self.group: Group = games.groups[lineup.group[name]]
        has_gaps = games.has_gaps or not lineup.is_fixed
        settings = settings_of(name)
        self._scope, parts = built_as(name)
        self.trains = self.is_training = settings.trains
        self.snapshot_of: str | None = self._source(settings.snapshot_of, lineup)
        # A policy that only acts has a learner with default settings, which reads no bindings.
        with rebound(self.bindings, name, complete=not is_opened_to_act()), gin.config_scope(self._scope):
            own = {key: _chosen(getattr(parts, key), default) for key, default in defaults.items()}
            drawn = int(np.random.SeedSequence([seed, number, _PURPOSE]).generate_state(1)[0])
            self.stream = RandomStream(_chosen(settings.seed, drawn), device)
            with self.stream:
                specs = self.group.observation_spec, self.group.action_spec, self.group.reward_spec
                self.algorithm, self.transforms = make_networks(own["algorithm"], own["transforms"], *specs, device)
                for module in self.algorithm.modules():
                    if isinstance(module, RLAlgorithm):
                        module.progress = progress  # set first, because the learner reads it when it is built
                self.batches = self._make_batches(own["batches"] if self.trains else None)
                networks: tuple[RLAlgorithm, Transforms] = self.algorithm, self.transforms
                self.seat = Seat(games, self.group, lineup.columns[name], *networks, self.stream, has_gaps)
                self.learner = build(own["learner"], Learner, f"{name}/Trainer.learner", self.algorithm)
        self.modes = ModeSwitch(self.algorithm, self.learner.frozen.modules)

    def spread(self, scale: float, num_workers: int, num_segments: int) -> None:
        """Sets the number of processes in which the policy acts, and makes its metrics.

        Args:
          scale: ratio of the number of games in each process to the number of games that the policy was built for.
          num_workers: number of processes.
          num_segments: expected number of segments in an unroll of the run, each from one process.
        """
        self._repeated["spread"] = lambda new: new.spread(scale, num_workers, num_segments)
        _, lineup, games, _, metrics, *_ = self._given
        own = round(scale * self.seat.num_envs)
        self.num_columns = own * (num_segments if self.algorithm.on_policy else num_workers)
        self.steps_per_step = scale * num_segments * lineup.share(self.name) / games.turns
        with rebound(self.bindings, self.name, complete=False), gin.config_scope(self._scope), self.stream:
            self.metrics = self._make_metrics(metrics, own * num_workers)

    def plan(self, unroll_length: float, num_unrolls: float) -> None:
        """Prepares the batches for the length of the run; `plan_updates` follows.

        Args:
          unroll_length: number of steps of all games in an unroll.
          num_unrolls: number of unrolls that the budget allows; inf if the budget does not limit it.

        Raises:
          UsageError: the policy trains and has no parameters.
        """
        self._repeated["plan"] = lambda new: new.plan(unroll_length, num_unrolls)
        if not self.trains:  # an unused replay would take memory
            return
        if not any(parameter.requires_grad for parameter in self.algorithm.parameters()):
            raise UsageError(
                f"{type(self.algorithm).__name__} of the policy {self.name} has nothing to train; bind "
                f"{self.name}/PolicySettings.trains = False"
            )
        with rebound(self.bindings, self.name, complete=False), gin.config_scope(self._scope), self.stream:
            if isinstance(self.batches, EpochBatches):
                self.batches.expected_rows = unroll_length * self.steps_per_step if self.seat.has_gaps else None
            self.batches.plan(num_unrolls * unroll_length * self.steps_per_step)
            self.batches.bind(self.algorithm, self.transforms, unroll_length, self.num_columns)
            self.seat.stores_states = self.batches.stores_states

    def plan_updates(self, num_unrolls: float) -> None:
        """Prepares the learner for the expected number of unrolls of the run."""
        self._repeated["plan_updates"] = lambda new: new.plan_updates(num_unrolls)
        if self.trains:
            self.learner.plan(num_unrolls * self.batches.updates_per_iteration, self.batches.rows_per_update)

    def start(self) -> None:
        """Starts the source of batches, which may read recorded data."""
        self._repeated["start"] = Member.start
        self.batches.start(self.seat.environment)

    def time(self, timer: Timer) -> None:
        """Starts to measure the times of the parts of acting."""
        self._repeated["time"] = lambda new: new.time(timer)
        self.seat.time(timer)

    def rebuild(self, bindings: Mapping[str, str]) -> None:
        """Builds the parts again, in their initial states, with new values of some parameters.

        Args:
          bindings: new values as gin text, by parameter; other parameters keep their configured values.
        """
        self._become(self._rebuilt(bindings))

    def continue_from(self, parent: "Member", bindings: Mapping[str, str]) -> None:
        """Continues from the networks of `parent`, which may be this policy, with new values of some parameters.

        The parts are built again, as in a resumed run. Networks, transforms and optimizers get the state of the parent.
        The policy keeps its own rows, metrics, counters, random numbers and reward weights. If building or loading
        raises, nothing has changed.

        Args:
          parent: policy with networks of the same shapes.
          bindings: new values as gin text, by parameter; other parameters keep their configured values.

        Raises:
          UsageError: shapes of tensors differ between the new parts and the parent.
        """
        new = self._rebuilt(bindings)
        if difference := new.difference(parent):
            raise UsageError(
                f"{self.name} cannot take the networks of {parent.name} with another {', '.join(bindings)}: "
                f"{difference}; leave out of JointPopulation.perturb what changes the shape of a network"
            )
        weights = None if new.algorithm.reward_weights is None else new.algorithm.reward_weights.clone()
        new.algorithm.load_state_dict(copy.deepcopy(parent.algorithm.state_dict()))
        if weights is not None:
            assert new.algorithm.reward_weights is not None
            new.algorithm.reward_weights.copy_(weights)
        new.transforms.load_state_dict(copy.deepcopy(parent.transforms.state_dict()))
        own = self.learner.state_dict()
        counts = {name: own[name] for name in ("updates", "num_applied", "means", "fell_back")}
        new.learner.load_state_dict(copy.deepcopy({**parent.learner.state_dict(), **counts}))
        for name, rate in new.learner.learning_rates.items():
            source = parent.learner.learning_rates.get(name)
            if isinstance(rate, MeasuredSchedule) and isinstance(source, MeasuredSchedule):
                rate.value.copy_(source.value)
        new.seat.load_state_dict(copy.deepcopy(self.seat.state_dict()), continues=True)
        new.metrics.load_state_dict(copy.deepcopy(self.metrics.state_dict()))
        new.batches.take_over(self.batches)
        self.learner.close()
        self.batches.close()
        self._become(new)

    def difference(self, other: "Member") -> str:
        """Returns a description of the first tensor that this policy cannot take from `other`; '' if there is none."""
        here, there = _forms(self), _forms(other)
        for name in here | there:
            if here.get(name) != there.get(name):
                forms = there.get(name, "missing"), here.get(name, "missing")
                return f"{name} is {forms[0]} in {other.name} and {forms[1]} in {self.name}"
        return ""

    def _rebuilt(self, bindings: Mapping[str, str]) -> "Member":
        """Returns this policy with new parts."""
        new = Member(self.name, *self._given, bindings)
        new.num_steps, new.is_training = self.num_steps, self.is_training
        new.learner.log, new.learner.before_update = self.learner.log, self.learner.before_update
        for call in self._repeated.values():
            call(new)
        return new

    def _become(self, new: "Member") -> None:
        """Takes the parts of `new`; other objects keep their references to this object."""
        vars(self).update(vars(new))

    def observe(self, experience: Experience, renews_columns: bool) -> None:
        """Calls the transforms' `observe` with the rows of an unroll; for `renews_columns` see `Unroller`."""
        with self.stream:
            observe(self.algorithm, self.transforms, experience, self.seat.has_gaps or renews_columns)

    def after_iteration(self, experience: Experience, observes: bool, renews_columns: bool) -> None:
        """Passes the rows of an unroll to the algorithm, and to the transforms if they observe all unrolls."""
        with self.stream:
            row_0_may_be_new = self.seat.has_gaps or renews_columns
            after_iteration(self.algorithm, self.transforms, experience, observes, row_0_may_be_new)

    def spaces(self) -> TrainedSpaces:
        """Returns the spaces of the policy's agents."""
        return TrainedSpaces(self.group.observation_space, self.group.action_space, self.group.reward_spec)

    def _source(self, name: str | None, lineup: Lineup) -> str | None:
        """Checks and returns the name of the policy of which this policy is a snapshot."""
        if name is not None and lineup.group.get(name) != lineup.group[self.name]:
            others = [one for one in lineup.names if lineup.group[one] == lineup.group[self.name] and one != self.name]
            raise UsageError(
                f"{self.name}/PolicySettings.snapshot_of is {name!r}, which is not a policy with the spaces of "
                f"{self.name}; the other policies with these spaces are {', '.join(others) or 'none'}"
            )
        return name

    def _make_metrics(self, metrics: Sequence[Callable[[], Any]], num_columns: int) -> Metrics:
        """Returns the metrics of the policy's columns in all processes, and tells the seat which data metrics read."""
        names, weights = reward_names(self.group.reward_spec), self.algorithm.reward_weights
        made = Metrics([metric() for metric in metrics], num_columns, objectives=names, reward_weights=weights)
        self.seat.shown = made.reads
        if not made.reads_infos:
            self.seat.ignore_infos()
        return made

    def _make_batches(self, batches: Callable[[], Batches] | None) -> Batches:
        on_policy = self.algorithm.on_policy
        made = build(batches or (EpochBatches if on_policy else ReplayBatches), Batches, f"{self.name}/Trainer.batches")
        if made.on_policy != on_policy:
            kind, fitting = ("on-policy", "EpochBatches") if on_policy else ("off-policy", "ReplayBatches")
            raise UsageError(
                f"{type(self.algorithm).__name__} of the policy {self.name} is {kind}, but its batches are "
                f"{type(made).__name__}; bind {self.name}/PolicySettings.batches = @{fitting}"
            )
        if getattr(made, "has_offline_updates", False):
            raise UsageError(
                f"the policy {self.name} has ReplayBatches.offline_updates, but with several policies all policies act "
                "from the first step on; leave it out"
            )
        if not made.acts:
            raise UsageError(
                f"{type(made).__name__} of the policy {self.name} trains on recorded data and never acts, but with "
                "several policies each policy must act; bind another source of batches"
            )
        return made


def _forms(member: Member) -> dict[str, str]:
    """Returns shape and dtype of each tensor that another policy may take, and the presence of each optimizer."""
    transforms = {f"transforms.{name}": value for name, value in member.transforms.state_dict().items()}
    forms = {
        name: f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
        for name, value in (member.algorithm.state_dict() | transforms).items()
        if isinstance(value, torch.Tensor)
    }
    return forms | {f"the optimizer of {name}": "there" for name in member.learner.state_dict()["optimizers"]}


def _chosen(given: Any, default: Any) -> Any:
    return default if given is None else given
