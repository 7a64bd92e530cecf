"""Builds the parts of a run from the arguments of the trainer, and checks that they fit together."""

import contextlib
import copy
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch

from alfish.algorithms.acting import ModeSwitch
from alfish.algorithms.imitation.external import External, is_opened_to_act
from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.compiler import kernels
from alfish.data import Experience
from alfish.environments import Environment, make_environment
from alfish.environments.games import Games
from alfish.errors import UsageError
from alfish.errors.user_code import refuse_default_dtype
from alfish.learner.batches import Batches, EpochBatches, ReplayBatches
from alfish.learner.learner import Learner
from alfish.metrics import DEFAULT_METRICS, Metric, Metrics
from alfish.offline.recorded_spaces import TrainedSpaces
from alfish.parameters import exclusive
from alfish.parameters.kinds import device_named
from alfish.parameters.parts import build, parameter_names
from alfish.policies.composites import (
    GamesByPolicy,
    JointBatches,
    JointLearner,
    JointMetrics,
    JointModes,
    JointTransforms,
    Policies,
)
from alfish.policies.game_unroller import GameUnroller
from alfish.policies.joint_unroller import JointUnroller
from alfish.policies.lineup import Lineup, PolicyPatterns, patterns_of
from alfish.policies.member import Member
from alfish.policies.networks import after_iteration, make_networks, observe
from alfish.policies.worker_policies import SeveralPolicies
from alfish.processes import replicas
from alfish.runs import random_state
from alfish.runs.process_settings import flush_subnormals, keep_freed_memory
from alfish.specs import reward_names
from alfish.training.borrowing_evaluator import BorrowingEvaluator
from alfish.training.clock import Budget, Calibration
from alfish.training.evaluator import Evaluator, make_evaluator
from alfish.training.game_evaluator import GameEvaluator
from alfish.training.initial_parts import InitialParts
from alfish.transforms import Transforms
from alfish.unrollers import AsyncUnroller, SyncUnroller, Unroller

# Maximum number of threads; torch ends a process that requests very many threads.
MAX_THREADS = 1024
# Seconds of a budget above which compilation saves time.
LONG_RUN_SECONDS = 300


class RunSettings(NamedTuple):
    """Arguments of a `Trainer` from which the parts of a run are built, with the budget and the device of the run."""

    budget: Budget
    device: torch.device
    algorithm: Callable[..., RLAlgorithm]
    transforms: Sequence[Callable[..., Any]]
    calibration: float | None
    batches: Callable[[], Batches] | None
    unroller: Callable[..., Unroller]
    learner: Callable[[RLAlgorithm], Learner]
    metrics: Sequence[Metric] | None
    extra_metrics: Sequence[Metric]
    unroll_length: float
    initial_parts: Mapping[str, str] | None


class Parts(NamedTuple):
    """Parts of a run."""

    environment: Environment
    algorithm: RLAlgorithm
    transforms: Transforms
    batches: Batches
    unroller: Unroller
    learner: Learner
    metrics: Metrics
    initial_parts: InitialParts
    calibration: Calibration

    @property
    def observes(self) -> bool:
        """True if the algorithm or a transform reads the rows of an iteration."""
        return self.algorithm.overrides("after_iteration") or bool(self.transforms)

    def observe(self, experience: Experience) -> None:
        """Calls the transforms' `observe` with the rows of an unroll."""
        observe(self.algorithm, self.transforms, experience, self._row_0_may_be_new)

    def after_iteration(self, experience: Experience) -> None:
        """Passes the rows of an unroll to the algorithm, and to transforms that observe all unrolls."""
        observes = not self.calibration.is_set
        after_iteration(self.algorithm, self.transforms, experience, observes, self._row_0_may_be_new)

    @property
    def _row_0_may_be_new(self) -> bool:
        return self.environment.has_gaps or self.unroller.renews_columns

    def modes(self) -> Any:
        """Returns the switch between acting and training, see `ModeSwitch`."""
        return ModeSwitch(self.algorithm, self.learner.frozen.modules)

    def settings(self) -> dict[str, Any]:
        """Returns settings that changed during the run, for a checkpoint; {} if none changed."""
        return {}

    def rebuild(self, state: Mapping[str, Any]) -> None:
        """Builds parts again with the `settings` in a saved state, before the state is loaded."""

    def players(self) -> str:
        """Returns a description of the acting algorithms for the log."""
        return type(self.algorithm).__name__

    def networks(self) -> dict[str, Any]:
        """Returns algorithm, transforms, observation and action spaces by policy; a single policy is called ''."""
        spaces = self.environment.observation_space, self.environment.action_space
        return {"": (self.algorithm, self.transforms, *spaces)}

    def spaces(self) -> dict[str, Any]:
        """Returns the spaces of the environment as checkpoints store them."""
        spaces = self.environment.observation_space, self.environment.action_space, self.environment.reward_spec
        return TrainedSpaces(*spaces).to_json()

    def check_equal(self) -> None:
        """Checks that networks and transforms have equal tensors in all learners.

        Raises:
          RunError: a tensor is not equal in all learners; the message names the first such tensor.
        """
        if replicas.is_joined():
            modules = {"": self.algorithm, "transforms.": self.transforms}
            states = ((head + name, leaf) for head, each in modules.items() for name, leaf in each.state_dict().items())
            replicas.check_equal({name: leaf for name, leaf in states if isinstance(leaf, torch.Tensor)})


class Environments:
    """Builds the environments of a run.

    Args:
      make: factory of environments, called with the keywords `seed`, `num_envs`, `evaluation`, `render_mode`; or an
        environment's id or name.
      make_for_evaluation: the same for evaluation, with the same spaces; None means `make`.
      seed: seed of the run.
      device: device of the algorithm, passed to factories with an argument `device`.
      max_evaluation_length: number of actions after which an episode of an evaluation is truncated.
      evaluation_infos: globs of the numbers that evaluations read from the infos at the ends of episodes.
    """

    def __init__(
        self,
        make: str | Callable[..., Environment],
        make_for_evaluation: str | Callable[..., Environment] | None,
        seed: int,
        device: torch.device,
        max_evaluation_length: int,
        evaluation_infos: Sequence[str],
    ):
        self.make, self.seed, self.max_evaluation_length = _factory(make), seed, max_evaluation_length
        if isinstance(evaluation_infos, str):
            given = repr(evaluation_infos)
            raise UsageError(f"Trainer.evaluation_infos is the string {given}; write a list of globs, as in [{given}]")
        self._evaluation_infos = evaluation_infos
        self._device = str(device)
        self._make_for_evaluation = None if make_for_evaluation is None else _factory(make_for_evaluation)
        self._made: Environment | None = None  # newest training environment

    @random_state.apart()
    def new(self) -> Environment:
        """Returns the training environments; only one, for its spaces, if the run was opened only to act."""
        return self._make(num_envs=1) if is_opened_to_act() else self._make()

    def _make(self, **arguments: int) -> Environment:
        arguments["seed"] = replicas.seed_of(self.seed)
        refuse_default_dtype("the program")
        kinds = Environment, Games
        self._made = build(self.make, kinds, "Trainer.environment", **arguments, **self._of_run(self.make))
        refuse_default_dtype(f"the constructor of {self._made.name}")
        return self._made

    def _of_run(self, factory: Callable[..., Environment]) -> dict[str, str]:
        return {"device": self._device} if "device" in parameter_names(factory) else {}

    @contextlib.contextmanager
    def closed_on_error(self) -> Iterator[None]:
        """Closes the training environment if the context raises."""
        try:
            yield
        except BaseException:
            if self._made is not None:
                self._made.close()
            raise

    @random_state.apart()
    def part_of(self, environment: Environment) -> Environment:
        """Returns this learner's part of the environments, and closes `environment`, which contains all of them.

        Raises:
          UsageError: the number of environments is not divisible by the number of learners, or the factory makes a
            different number than requested.
        """
        if replicas.size() == 1:
            return environment
        num_envs = replicas.fraction(environment.num_envs, "the number of environments (make_environment.num_envs)")
        environment.close()
        part = self._make(num_envs=num_envs)
        if part.num_envs != num_envs:
            raise UsageError(
                f"Trainer.environment made {part.num_envs} environments, but each of {replicas.size()} learners asked "
                f"for {num_envs}; the factory must take the keyword num_envs"
            )
        return part

    @random_state.preserved()
    def evaluator(
        self, parts: Parts, num_episodes: int, num_envs: int, max_length: int | None, **environment_arguments: Any
    ) -> Evaluator:
        """Returns an evaluator; see `Trainer.evaluator`.

        Raises:
          UsageError: the spaces of the environments for evaluation differ from those of the training environments,
            except for missing leaves of the observation.
        """
        evaluator = self._new_evaluator(parts, num_episodes, num_envs, max_length, **environment_arguments)
        evaluator.infos = self._evaluation_infos
        return evaluator

    def _new_evaluator(
        self,
        parts: Parts,
        num_episodes: int,
        num_envs: int,
        max_length: int | None,
        environment: str | Callable[..., Environment] | None = None,
        **environment_arguments: Any,
    ) -> Evaluator:
        own = self._make_for_evaluation if environment is None else _factory(environment)
        factory = own or self.make
        limit = self.max_evaluation_length if max_length is None else max_length
        if isinstance(parts, JointParts):
            return self._game_evaluator(parts, factory, min(num_envs, num_episodes), limit, **environment_arguments)
        name, networks = parts.environment.name, (parts.algorithm, parts.transforms)
        if "lineup" in environment_arguments:
            raise UsageError(f"a lineup is for games, but {name} is not a game; leave the lineup out")
        if parts.environment.only_one and own is None:
            if "render_mode" in environment_arguments:
                raise UsageError(
                    f"a film needs an environment of its own, but a process can hold only one {name}; leave the film "
                    "out (Evaluate.video_period = 0)"
                )
            if not isinstance(parts.unroller, SyncUnroller):
                raise UsageError(
                    "an evaluation during training borrows the environment of the training process, because a process "
                    f"can hold only one {name}; bind Trainer.unroller = @SyncUnroller, or leave Evaluate out"
                )
            return BorrowingEvaluator(parts.unroller, parts.environment, *networks, limit)
        arguments = {**self._of_run(factory), **environment_arguments}
        return make_evaluator(factory, *networks, num_episodes, num_envs, limit, **arguments)

    def _game_evaluator(
        self,
        parts: "JointParts",
        factory: Callable[..., Any],
        num_games: int,
        limit: int,
        lineup: Mapping[str, str] | None = None,
        **arguments: Any,
    ) -> Any:
        """Returns an evaluator of several policies; `lineup` is `opponents` of `GameEvaluator`."""
        name = "the factory of the games for evaluation"
        games = build(factory, Games, name, num_envs=num_games, evaluation=True, **arguments)
        unroller = parts.unroller
        assert isinstance(unroller, JointUnroller)
        try:
            return GameEvaluator(games, parts.members, unroller.lineup, lineup, limit)
        except UsageError:
            games.close()
            raise


class JointParts(Parts):
    """Parts of a run of several policies. Each part combines the parts of all policies."""

    @property
    def members(self) -> Sequence[Member]:
        """Policies of the run."""
        return self.unroller.members  # type: ignore[attr-defined]

    @property
    def trained(self) -> list[Member]:
        """Policies that train."""
        return [member for member in self.members if member.trains]

    @property
    def observes(self) -> bool:
        return any(one.algorithm.overrides("after_iteration") or bool(one.transforms) for one in self.trained)

    def observe(self, experience: Any) -> None:
        for member in self.trained:
            member.observe(experience[member.name], self.unroller.renews_columns)

    def after_iteration(self, experience: Any) -> None:
        settings = not self.calibration.is_set, self.unroller.renews_columns
        for member in [one for one in self.trained if one.is_training]:
            member.after_iteration(experience[member.name], *settings)

    def modes(self) -> Any:
        return JointModes(self.members)

    def settings(self) -> dict[str, Any]:
        found = {member.name: member.bindings for member in self.members if member.bindings}
        return {"settings": found} if found else {}

    def rebuild(self, state: Mapping[str, Any]) -> None:
        for member in self.members:
            bindings = state.get("settings", {}).get(member.name, {})
            if bindings != member.bindings:
                self.unroller.rebuild(member, bindings)  # type: ignore[attr-defined]

    def players(self) -> str:
        lineup = self.unroller.lineup  # type: ignore[attr-defined]
        found = [
            f"{one.name} ({type(one.algorithm).__name__}{'' if one.trains else ', does not train'}) as "
            f"{', '.join(lineup.agents_of(one.name))}"
            for one in self.members
            if one.snapshot_of is None
        ]
        found += [f"{one.name} (snapshot of {one.snapshot_of})" for one in self.members if one.snapshot_of is not None]
        return "; ".join(found)

    def networks(self) -> dict[str, Any]:
        return {
            one.name: (one.algorithm, one.transforms, one.group.observation_space, one.group.action_space)
            for one in self.members
        }

    def spaces(self) -> dict[str, Any]:
        return {"policies": {member.name: member.spaces().to_json() for member in self.members}}


def make_parts(environments: Environments, policies: PolicyPatterns | None, settings: RunSettings) -> Parts:
    """Builds the parts of a run with one policy, or with several in games; closes the environments after an error.

    Args:
      environments: environments of the run.
      policies: patterns of the agents of each policy, see `policies.lineup.patterns_of`.
      settings: other arguments of the trainer.
    """
    with environments.closed_on_error():
        random_state.seed_all(environments.seed)
        environment = environments.new()
        if isinstance(environment, Games):
            return _make_joint_parts(environments, environment, policies, settings)
        if policies is not None:
            raise UsageError(
                f"Trainer.policies is set, but Trainer.environment makes {environment.name}, which has no named "
                "agents; bind Trainer.environment = @make_games, or leave Trainer.policies out"
            )
        return _make_parts(environments, environment, settings)


def _make_parts(environments: Environments, environment: Environment, settings: RunSettings) -> Parts:
    """Builds the parts of a run in an environment.

    Raises:
      UsageError: a factory makes an object of the wrong type, or parts do not fit one another.
    """
    specs = environment.observation_spec, environment.action_spec, environment.reward_spec
    networks = make_networks(settings.algorithm, settings.transforms, *specs, settings.device)
    source = _make_batches(settings.batches, networks[0])
    collector = build(settings.unroller, Unroller, "Trainer.unroller", environment, *networks)
    if not collector.drains and replicas.size() > 1:  # with workers, the worker processes are divided instead
        environment = environments.part_of(environment)
        collector = build(settings.unroller, Unroller, "Trainer.unroller", environment, *networks)
    if not source.acts:
        _check_offline(source, collector, settings.budget)
    collector.bind(environments.make, settings.unroll_length, replicas.seed_of(environments.seed))
    if not collector.unroll_length:
        raise UsageError("Trainer.unroll_length is 0, which only AsyncUnroller supports; it must be positive")
    num_env_steps = _planned_env_steps(settings.budget, collector)
    trains = not is_opened_to_act()  # a run that only acts needs no replay, which would take memory
    if trains:
        source.plan(num_env_steps)
        source.bind(*networks, collector.unroll_length, collector.num_columns)
        collector.stores_states = source.stores_states
    trained = build(settings.learner, Learner, "Trainer.learner", networks[0])
    metrics = [metric() for metric in DEFAULT_METRICS] if settings.metrics is None else settings.metrics
    names = reward_names(environment.reward_spec)
    weights = networks[0].reward_weights
    measured = Metrics(
        [*metrics, *settings.extra_metrics], collector.num_envs, objectives=names, reward_weights=weights
    )
    collector.shown = measured.reads
    collector.metrics = None if measured.episode_sums() is None else measured
    if networks[1].encoders and "observation" in measured.reads:
        raise UsageError(
            f"a metric reads observations, but {type(networks[1].encoders[0]).__name__} replaces them with features "
            "when rows arrive; leave out the metric or the encoder"
        )
    if not measured.reads_infos:
        collector.ignore_infos()
    iterations = _iterations(settings.budget, collector, source.updates_per_iteration) if trains else math.inf
    if settings.budget.name == "num_updates" and source.acts:
        num_env_steps = iterations * _rows_per_iteration(collector)  # for the calibration only
    if trains:
        trained.plan(iterations * source.updates_per_iteration, source.rows_per_update)
    if replicas.rank():  # parameters are equal in all learners, but later random draws must differ between learners
        random_state.seed_all(replicas.seed_of(environments.seed))
    loaded = InitialParts(settings.initial_parts or {}, *networks)
    calibrated = _calibration(settings, networks[1], loaded, num_env_steps)
    return Parts(environment, *networks, source, collector, trained, measured, loaded, calibrated)


def _make_joint_parts(
    environments: Environments, games: Games, policies: PolicyPatterns | None, settings: RunSettings
) -> JointParts:
    """Builds the parts of a run of several policies.

    Raises:
      UsageError: parts do not fit one another, or a setting does not suit several policies.
    """
    if replicas.size() > 1:
        raise UsageError("several policies train in one process; start the run without torchrun")
    defaults = {
        "algorithm": settings.algorithm,
        "transforms": settings.transforms,
        "batches": settings.batches,
        "learner": settings.learner,
    }
    progress = torch.zeros((), dtype=torch.float64, device=settings.device)
    lineup = build(Lineup, Lineup, "Lineup", patterns_of(policies, games), games, environments.seed)
    # Each policy has its own copies of the metrics, which read only the columns that the policy plays.
    given = [*(settings.metrics or ()), *settings.extra_metrics]
    metrics: list[Callable[[], Any]] = [*DEFAULT_METRICS] if settings.metrics is None else []
    metrics += [functools.partial(copy.deepcopy, metric) for metric in given]
    members = [
        Member(name, number, lineup, games, defaults, metrics, environments.seed, settings.device, progress)
        for number, name in enumerate(lineup.names)
    ]
    if not any(member.trains for member in members):
        raise UsageError("no policy trains; leave out PolicySettings.trains for at least one policy")
    environment = GamesByPolicy(games, {member.name: member.group for member in members})
    networks = Policies(members, progress), JointTransforms(members)
    acting = _make_collector(settings.unroller, environment, networks, lineup, members)
    collector = JointUnroller(environment, *networks, lineup, members, acting)
    collector.bind(environments.make, settings.unroll_length, environments.seed)
    num_env_steps = _planned_env_steps(settings.budget, collector)
    num_unrolls = math.inf if settings.budget.name == "num_updates" else _iterations(settings.budget, collector, 1.0)
    if not is_opened_to_act():
        for member in members:
            member.plan(collector.unroll_length, num_unrolls)
        if settings.budget.name == "num_updates":
            updates = sum(member.batches.updates_per_iteration for member in members if member.trains)
            num_unrolls = _iterations(settings.budget, collector, updates)
            num_env_steps = num_unrolls * _rows_per_iteration(collector)  # for the calibration only
        for member in members:
            member.plan_updates(num_unrolls)
    loaded = InitialParts(settings.initial_parts or {}, *networks)  # type: ignore[arg-type]
    sources = JointBatches(members), collector, JointLearner(members), JointMetrics(members)
    observing = _calibration(settings, networks[1], loaded, num_env_steps)
    parts: Any = environment, *networks, *sources, loaded, observing
    return JointParts(*parts)


def _calibration(
    settings: RunSettings, transforms: Transforms | JointTransforms, loaded: InitialParts, num_env_steps: float
) -> Calibration:
    if settings.calibration is not None:
        loaded.keep_statistics()
    return Calibration(settings.calibration if transforms.keep_statistics else None, num_env_steps)


def _make_collector(
    unroller: Callable[..., Unroller],
    environment: GamesByPolicy,
    networks: tuple[Policies, JointTransforms],
    lineup: Lineup,
    members: Sequence[Member],
) -> GameUnroller | AsyncUnroller:
    """Returns the unroller of several policies: in this process, or an `AsyncUnroller` with workers."""
    if unroller is SyncUnroller:
        return GameUnroller(environment, *networks, lineup, members)
    made: Any = build(unroller, Unroller, "Trainer.unroller", environment, *networks)
    if not isinstance(made, AsyncUnroller):
        raise UsageError(
            f"Trainer.unroller makes {type(made).__name__}; with several policies bind Trainer.unroller = "
            "@AsyncUnroller, or leave it out"
        )
    made.act_with(SeveralPolicies(lineup, members, environment.num_envs))
    return made


def start_external(parts: Parts) -> None:
    """Starts the `External` parts of algorithms; raises as `External.start` does."""
    for algorithm, transforms, observed, acted in parts.networks().values():
        reward_spec = None if transforms.changes_rewards else transforms.raw_reward_spec
        for part in algorithm.modules():
            if isinstance(part, External):
                part.start(observed, acted)
                part.check_rewards(reward_spec, "Trainer.transforms")


def use_device(name: str, num_threads: int | Literal["auto"]) -> torch.device:
    """Sets how this process frees memory, treats subnormal numbers and uses threads; returns the device called `name`.

    Raises:
      UsageError: the device does not exist, or another thread trains.
    """
    exclusive.check()
    keep_freed_memory()
    flush_subnormals()
    kernels.set_num_threads(num_threads)
    device = device_named(name)
    if device.type != "cuda" or not replicas.is_joined():
        return device
    own, num_gpus = replicas.local_rank(), torch.cuda.device_count()
    if device.index is not None or own >= num_gpus:
        raise UsageError(
            f"Trainer.device is {name!r}; each learner on a machine uses a separate GPU, and this machine has "
            f"{num_gpus}: give torchrun at most that many --nproc-per-node, and set the device to 'cuda' or 'cpu'"
        )
    torch.cuda.set_device(own)
    return torch.device("cuda", own)


def _make_batches(batches: Callable[[], Batches] | None, algorithm: RLAlgorithm) -> Batches:
    name, on_policy = type(algorithm).__name__, algorithm.on_policy
    if batches is None:
        batches = EpochBatches if on_policy else ReplayBatches
    made = build(batches, Batches, "Trainer.batches")
    if made.on_policy != on_policy:
        kind, fitting = ("on-policy", "EpochBatches") if on_policy else ("off-policy", "ReplayBatches")
        raise UsageError(
            f"{name} is {kind}, but Trainer.batches is {type(made).__name__}; bind Trainer.batches = @{fitting}"
        )
    return made


def _factory(environment: str | Callable[..., Environment]) -> Callable[..., Environment]:
    return functools.partial(make_environment, environment) if isinstance(environment, str) else environment


def _check_offline(batches: Batches, unroller: Unroller, budget: Budget) -> None:
    name = type(batches).__name__
    if budget.name == "num_env_steps":
        raise UsageError(
            f"Trainer.num_env_steps is a budget of environment steps, but {name} takes no environment steps; bind "
            "Trainer.num_env_steps = None, and Trainer.num_updates instead"
        )
    if not isinstance(unroller, SyncUnroller):
        raise UsageError(f"Trainer.unroller has nothing to collect, since {name} never acts; leave the unroller out")


def _planned_env_steps(budget: Budget, unroller: Unroller) -> float:
    """Returns the number of environment steps that a budget allows; inf for a budget in updates or seconds."""
    if budget.name == "num_env_steps":
        return budget.size
    if budget.name == "num_iterations":
        return budget.size * _rows_per_iteration(unroller)
    return math.inf


def _rows_per_iteration(unroller: Unroller) -> float:
    """Returns the number of rows that an iteration of all learners collects."""
    return unroller.unroll_length * unroller.num_columns * replicas.size()


def _iterations(budget: Budget, unroller: Unroller, updates_per_iteration: float) -> float:
    """Returns the expected number of iterations; for a budget in seconds, inf if the run is long, else 0."""
    if budget.name == "num_env_steps":
        return budget.size / _rows_per_iteration(unroller)
    if budget.name == "num_updates":
        return budget.size / updates_per_iteration
    if budget.name == "wall_seconds":
        return math.inf if budget.size >= LONG_RUN_SECONDS else 0.0
    return budget.size
