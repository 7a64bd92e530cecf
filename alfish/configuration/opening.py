"""Opens a run from its saved configuration: as a Trainer for evaluation and films, or as a policy."""

import contextlib
import difflib
import inspect
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gin

from alfish.algorithms.imitation.external import opened_to_act
from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.compiler import kernels
from alfish.configuration import reading
from alfish.configuration.bindings import Reading
from alfish.configuration.directory import run_directory
from alfish.configuration.reachability import refuse_unread
from alfish.configuration.sentences import complete
from alfish.errors import UsageError
from alfish.errors.user_code import brief
from alfish.learner.learner import Learner
from alfish.offline.recorded_spaces import TrainedSpaces, spaces_by_policy
from alfish.parameters import NonNegativeInt, PositiveInt, checked
from alfish.parameters.description import CONFIG_FILE, as_bindings
from alfish.parameters.kinds import device_named
from alfish.parameters.rebinding import rebound
from alfish.policies.member import built_as
from alfish.policies.networks import chosen_policy, load_networks, make_networks, state_of_policy
from alfish.runs import process_settings, random_state
from alfish.runs.checkpoints import Checkpoints, checkpoints_of
from alfish.runs.packed.fetching import as_directory
from alfish.specs import action_spec, observation_spec
from alfish.training.evaluations.evaluation import Evaluation
from alfish.training.policy import Policy
from alfish.training.trainer import Trainer
from alfish.transforms import Transforms


@contextlib.contextmanager
def open_run(
    root_dir: str | Path,
    device: str = "cpu",
    allow_import: Sequence[str] = (),
    bindings: Sequence[str] = (),
    objects: Mapping[str, Any] | None = None,
) -> Iterator[Trainer]:
    """Yields the Trainer of a run, built from the saved configuration; no checkpoint is loaded.

    Within the context, gin has the configuration of the run. On exit, gin's configuration, the random generators and
    the number of threads are restored.

    Args:
      root_dir: directory of the run, or a packed run; see `packed.fetching.as_directory`.
      device: device of the trainer.
      allow_import: modules that the configuration may import in addition to alfish's modules, see `reading.saved`.
      bindings: gin bindings that replace bindings of the run, such as `make_environment.env_kwargs = {'g': 5.0}`.
      objects: values that replace bindings and that a text cannot express, by name of the parameter.

    Raises:
      UsageError: the directory has no run, the run was not built from gin, the configuration imports a module that
        is not allowed, or nothing reads a given binding.
    """
    with (
        as_directory(root_dir) as directory,
        _configured_as(run_directory(directory), allow_import, ["parts"], bindings=bindings) as found,
    ):
        reading.bind(objects or {})
        trainer = _opened_trainer(directory, device)
        try:
            refuse_unread(found)
            yield trainer
        finally:
            trainer.close()


def _opened_trainer(root_dir: Path, device: str) -> Trainer:
    """Returns a Trainer that only acts: it has no listeners and metrics, and its learner has no settings of the run."""
    parts = "listeners", "extra_listeners", "metrics", "extra_metrics"
    reading.bind({f"alfish.Trainer.{name}": [] for name in parts})
    return Trainer(root_dir, device=device, learner=_without_settings)


def _without_settings(algorithm: RLAlgorithm) -> Learner:
    """Returns a learner with default settings; those of the run may be objects of the program that trained."""
    defaults = inspect.signature(Learner.__init__).parameters.values()
    return Learner(algorithm, **{one.name: one.default for one in defaults if one.kind is one.KEYWORD_ONLY})


@contextlib.contextmanager
def _configured_as(
    root_dir: Path,
    allow_import: Sequence[str],
    may_lack: Collection[reading.Lacking],
    brief: bool = False,
    bindings: Sequence[str] = (),
) -> Iterator[Reading]:
    """Reads the configuration of a run within the context; see `open_run`, `reading.saved` and `exclusive.held`."""
    path = root_dir / CONFIG_FILE
    is_there = os.path.lexists(path)  # if it is not a file, reading it raises a clear error
    if not is_there and Checkpoints(root_dir / "checkpoints").steps():
        raise UsageError(
            f"{root_dir} is a run without {CONFIG_FILE}: construct its Trainer in Python with this root_dir, and call "
            "load_policy"
        )
    if not is_there:
        runs = [
            str(found.parent)
            for directory in (root_dir, root_dir.parent)
            for found in sorted(directory.glob(f"*/{CONFIG_FILE}"))
        ]
        near = difflib.get_close_matches(str(root_dir), runs, 3, 0.0)
        hint = f"; runs nearby: {', '.join(near)}" if near else ""
        raise UsageError(f"{root_dir} is not a run of `alfish train`: it has no {CONFIG_FILE}{hint}")
    with (
        reading.preserved(brief),
        process_preserved(),
        opened_to_act(),
        reading.saved(path, allow_import, may_lack, bindings) as found,
        complete(found),
    ):
        yield found


@contextlib.contextmanager
def process_preserved() -> Iterator[None]:
    """Restores, on exit, the settings that a Trainer changes: random generators, threads, subnormal numbers."""
    num_threads = kernels.num_threads()
    try:
        with random_state.preserved(), process_settings.subnormals_preserved():
            yield
    finally:
        kernels.set_num_threads(num_threads)


@brief
@checked
def load(
    root_dir: str | Path,
    checkpoint: str | int = "latest",
    device: str = "cpu",
    allow_import: Sequence[str] = (),
    policy: str | None = None,
) -> Policy:
    """Returns the trained policy of a run.

        policy = alfish.load("runs/ppo")
        action = policy.act(observation)

    Networks and transforms are built for the spaces in the checkpoint. An environment is built only for checkpoints of
    older versions, which do not contain spaces. Parts for training only, such as environments, rewards, metrics and
    listeners, may be missing, or belong to modules that are not allowed.

    Args:
      root_dir: directory of a run of `alfish train`, or a packed run: 'run.zip' from `alfish pack`, or 'hf:org/name' on
        the Hugging Face hub (extra 'hub').
      checkpoint: name of the checkpoint: 'latest', 'best', or its number of environment steps (or updates).
      device: device of the policy.
      allow_import: modules that the run's configuration may import, such as `["my_lab"]`, in addition to alfish's
        modules and modules that this process has already imported.
      policy: name of the policy, in a run with several policies; None means the only policy.

    Raises:
      UsageError: the run, the checkpoint or the policy does not exist, the policy has a part from a module that is not
        allowed, or another thread trains.
    """
    may_lack: list[reading.Lacking] = ["parts", "imports"]  # a policy may work without these definitions
    with (
        as_directory(root_dir) as directory,
        _configured_as(run_directory(directory), allow_import, may_lack, brief=True),
    ):
        checkpoints = checkpoints_of(directory)
        steps, state = checkpoints.load(checkpoint, spaces_by_policy)
        spaces = spaces_by_policy(state)
        name = chosen_policy(list(spaces), policy, directory)
        if (own := spaces[name]) is None:
            with contextlib.closing(_opened_trainer(directory, device)) as trainer:
                trainer.load_policy(checkpoint)
                return trainer.policy()
        with rebound(state.get("settings", {}).get(name, {}), name, complete=False):
            networks = _networks(name, own, directory, device)
        found = Policy(*networks, own.observation, own.action)

        def fill(state: dict[str, Any]) -> None:
            load_networks(*networks, state_of_policy(state, name), root_dir)
            found.env_steps = int(state["counters"]["env_steps"])

        checkpoints.load(steps, fill)  # a separate load, so that errors of building parts are not blamed on the file
        return found


@brief
@checked
def evaluate(
    root_dir: str | Path,
    num_episodes: PositiveInt = 20,
    checkpoint: str | int = "latest",
    seed: NonNegativeInt = 0,
    sample: bool = False,
    num_envs: PositiveInt = 8,
    max_length: PositiveInt | None = None,
    lineup: Mapping[str, str] | None = None,
    device: str = "cpu",
    allow_import: Sequence[str] = (),
    environment: Any = None,
    **settings: Any,
) -> Evaluation:
    """Returns the result of whole episodes with the policy of a run, as `alfish evaluate` does.

        alfish.evaluate("runs/ppo", num_episodes=100).mean
        alfish.evaluate("runs/sac", **{"make_environment.env_kwargs": {"g": 5.0}}).mean  # another gravity

    Args:
      root_dir, checkpoint, device, allow_import: run, checkpoint and device, see `load`.
      num_episodes: number of episodes.
      seed: seed of episode 0; episode k starts from `reset(seed=seed + k)`.
      sample: whether to sample actions as in training, instead of taking the mode.
      num_envs: number of environments at a time, which does not change the result.
      max_length: number of actions after which an episode is truncated; None means the run's `max_evaluation_length`.
      lineup: names of policies by patterns of agents in games, such as `{"agent_*": "random"}`; None means the run's
        lineup.
      environment: environment in place of that of the run, as for `alfish.train`; without the run's `env_kwargs`.
      **settings: settings in place of those of the run, by class and name, as for `alfish.train`.

    Raises:
      UsageError: the run or the checkpoint does not exist, a part of the run cannot be built, or a setting does not
        exist, is not read, or has a value that does not fit.
      RunError: a return is not finite.
    """
    options = {} if lineup is None else {"lineup": dict(lineup)}
    if unknown := [name for name in settings if "." not in name]:
        known = ", ".join([*inspect.signature(evaluate).parameters][1:-1])
        raise UsageError(
            f"alfish.evaluate has no argument {unknown[0]}; it has {known}, and settings of the run are given by class "
            "and name (**{'PPO.gamma': 0.9})"
        )
    if environment is not None:  # the arguments of the run's environment are not those of another one
        settings = {"make_environment.env_kwargs": None, **settings, "make_environment.env_id": environment}
    bindings, objects, _ = as_bindings(settings)
    with open_run(root_dir, device, allow_import, bindings, objects) as trainer:
        env_steps = trainer.load_policy(checkpoint)
        with contextlib.closing(trainer.evaluator(num_episodes, num_envs, max_length, **options)) as evaluator:
            return evaluator.evaluate(num_episodes, seed, sample, env_steps)


def _networks(name: str, spaces: TrainedSpaces, directory: Path, device: str) -> tuple[RLAlgorithm, Transforms]:
    """Builds the networks of a policy from the configuration; `name` is '' in a run with one policy."""
    factories = {"transforms": (), **reading.bound("alfish.Trainer", "algorithm", "transforms")}
    specs = observation_spec(spaces.observation), action_spec(spaces.action), spaces.reward
    scope, settings = built_as(name) if name else (None, None)
    with gin.config_scope(scope):
        for key in ("algorithm", "transforms"):
            given = settings and getattr(settings, key)
            if given is not None:
                factories[key] = given
        if "algorithm" not in factories:
            raise UsageError(f"{directory / CONFIG_FILE} does not bind Trainer.algorithm")
        return make_networks(factories["algorithm"], factories["transforms"], *specs, device_named(device))
