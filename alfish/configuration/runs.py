"""A run's trainer, for a directory to be trained in, or for one opened again: for evaluation, films, and policies."""

import contextlib
import re
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from alfish.configuration import reading
from alfish.configuration.directory import is_to_change, make_directory
from alfish.errors import RunError, UsageError
from alfish.offline.spaces import spaces_of_checkpoint
from alfish.parameters import checked, description
from alfish.runs import random_state
from alfish.runs.checkpoint import Checkpoints
from alfish.specs import action_spec, observation_spec
from alfish.training.policy import Policy, load_networks, make_networks
from alfish.training.trainer import Trainer, device_named


def configured_trainer(
    root_dir: str | Path, files: Sequence[str], bindings: Sequence[str], objects: Mapping[str, Any] | None = None
) -> Trainer:
    """The trainer that gin describes now, which will save that configuration in its run directory.

    Args:
      root_dir: of the run, new or to be continued.
      files, bindings: what the user named and gin has read; errors say that a parameter was bound there.
      objects: values that take the place of what the saved text says of them, by parameter.

    Raises:
      UsageError: a required parameter is not bound, or nothing reads a bound one.
    """
    text = reading.text()
    reading.bind(objects or {})
    with reading.complete():
        trainer = Trainer(root_dir)
    reading.refuse_unreachable(files, bindings)
    trainer.config = {
        reading.CONFIG_FILE: text,
        reading.OPERATIVE_FILE: reading.operative_text(),
    }
    trainer.config_hash = reading.digest(text)
    return trainer


@contextlib.contextmanager
def open_run(root_dir: str | Path, device: str = "cpu", allow_import: Sequence[str] = ()) -> Iterator[Trainer]:
    """The trainer of a run, built from the configuration saved in it, with nothing loaded and nothing started.

    Within the context gin is configured as the run was; at its end, as it was before, and so are the random generators
    and the number of threads.

    Args:
      root_dir: of the run.
      device: of the trainer.
      allow_import: modules that the configuration may import beside alfish's own, see `configuration.saved`.

    Raises:
      UsageError: there is no run, one that was not built from gin, or one whose configuration imports another module.
    """
    with _configured_as(Path(root_dir), allow_import):
        trainer = _opened_trainer(root_dir, device)
        try:
            yield trainer
        finally:
            trainer.close()


def _opened_trainer(root_dir: str | Path, device: str) -> Trainer:
    """A trainer that is not to train; bound anew, since gin builds bound listeners even where others are passed."""
    parts = "listeners", "extra_listeners", "metrics", "extra_metrics"
    reading.bind({f"alfish.Trainer.{name}": [] for name in parts})
    return Trainer(root_dir, device=device)


@contextlib.contextmanager
def _configured_as(root_dir: Path, allow_import: Sequence[str]) -> Iterator[None]:
    """Within the context gin is configured as a run was; see `open_run`."""
    path = root_dir / reading.CONFIG_FILE
    if not path.is_file() and Checkpoints(root_dir / "checkpoints").steps():
        raise UsageError(
            f"{root_dir} is a run without {reading.CONFIG_FILE}: build its Trainer again in Python, with this "
            "root_dir, and call load_policy"
        )
    if not path.is_file():
        runs = sorted(str(found.parent) for found in root_dir.parent.glob(f"*/{reading.CONFIG_FILE}"))
        hint = f"; there are {', '.join(runs[:3])}" if runs else ""
        raise UsageError(f"{root_dir} is not a run of `alfish train`: it has no {reading.CONFIG_FILE}{hint}")
    with (
        reading.preserved(),
        _generators_preserved(),
        _without_chain(),
        reading.saved(path, allow_import),
    ):
        yield


@contextlib.contextmanager
def _generators_preserved() -> Iterator[None]:
    """Building a trainer seeds everything; that is no business of a program that only wants a policy."""
    num_threads = torch.get_num_threads()
    try:
        with random_state.preserved():
            yield
    finally:
        torch.set_num_threads(num_threads)


@checked
def train(
    algorithm: str | Callable[..., Any] | None = None,
    environment: str | Callable[..., Any] | None = None,
    *,
    root_dir: str | Path,
    conf: str | None = None,
    on_config_change: str = "stop",
    **settings: Any,
) -> Policy:
    """Trains, or continues a run, and returns the trained policy.

        policy = alfish.train("PPO", "CartPole-v1", num_env_steps=50_000, root_dir="runs/ppo")
        policy = alfish.train(conf="ppo_cartpole", root_dir="runs/ppo", **{"Trainer.seed": 1, "PPO.gamma": 0.98})

    The run directory is that of `alfish train`, so that `alfish.load` and the commands open it. gin's configuration and
    the random generators of the caller stay as they are.

    Args:
      algorithm: the name of a shipped one, whose base conf is read ("PPO": ppo.gin), or a class or factory as
        `Trainer.algorithm` takes it.
      environment: as `make_environment.env_id`: gymnasium's id, or a class.
      root_dir: of the run, made if needed; a run that is there is continued.
      conf: a gin file, or the name of a shipped conf; in the place of the name of an algorithm.
      on_config_change: where the run in `root_dir` has another configuration: 'stop' raises, 'old' and 'new' go on.
      **settings: of the Trainer by name (`seed=1`), of others with theirs (`**{"PPO.gamma": 0.98}`). Values are plain,
        classes, functions, `functools.partial` of them, or lists and dicts of these. With others the run trains too,
        but only a Trainer built in Python opens it again.

    Raises:
      UsageError: a setting that does not exist or that nothing reads, or a value that its parameter does not take.
      KeyboardInterrupt, SystemExit: SIGINT or SIGTERM was received; a checkpoint is saved, and the same call
        continues, if the budget is not spent.
    """
    if on_config_change not in ("stop", "old", "new"):
        raise UsageError(f"on_config_change is {on_config_change!r}; it is 'stop', 'old' or 'new'")
    if (conf is None) == (algorithm is None) or (conf is not None and isinstance(algorithm, str)):
        raise UsageError('alfish.train takes an algorithm, as in alfish.train("PPO", "CartPole-v1", ...), or a conf')
    named: dict[str, Any] = {} if algorithm is None or isinstance(algorithm, str) else {"Trainer.algorithm": algorithm}
    named |= {} if environment is None else {"make_environment.env_id": environment}
    named |= {name if "." in name else f"Trainer.{name}": value for name, value in settings.items()}
    file = conf if conf is not None else algorithm if isinstance(algorithm, str) else None
    files = [] if file is None else [_conf_file(file)]
    bindings, objects = [], {}
    for name, value in named.items():
        written = description.Writer()
        scope, _, rest = name.rpartition("/")
        selector, _, parameter = rest.rpartition(".")
        written.bind(scope, selector, parameter, value, name)
        bindings.append(written.text().rstrip())
        if not written.is_whole:
            objects[name] = value
    root_dir = Path(root_dir)
    with reading.preserved(), _generators_preserved(), _without_chain():
        reading.read(files, bindings)
        make_directory(root_dir)
        saved = root_dir / reading.CONFIG_FILE
        with contextlib.ExitStack() as stack:
            if saved.is_file() and not is_to_change(saved, on_config_change):
                stack.enter_context(reading.saved(saved))
            trainer = configured_trainer(root_dir, files, bindings, objects)
            trainer.accepts_config_change = on_config_change == "new"
            with reading.complete():
                trainer.train()
    # Also where the budget was spent when the signal came: it asked the caller's program to end.
    if trainer.signals.number == signal.SIGINT:
        raise KeyboardInterrupt
    if trainer.signals.number is not None:
        raise SystemExit(128 + trainer.signals.number)
    return trainer.policy()


def _conf_file(name: str) -> str:
    """The gin file of a name: a path, a shipped conf with or without its ending, or an algorithm as papers write it."""
    shipped = {path.stem.replace("_", ""): path.name for path in reading.confs_directory().glob("*.gin")}
    plain = re.sub(r"[^a-z0-9]", "", name.lower())
    return name if name.endswith(".gin") else shipped.get(plain, f"{name}.gin")


@contextlib.contextmanager
def _without_chain() -> Iterator[None]:
    """Takes from a message what gin appends to it: the chain of constructors."""
    try:
        yield
    except (UsageError, RunError) as error:
        sentence, _, chain = str(error).partition("\n  In call to configurable")
        if not chain:
            raise
        raise (UsageError if isinstance(error, UsageError) else RunError)(sentence) from error


@checked
def load(
    root_dir: str | Path, checkpoint: str | int = "latest", device: str = "cpu", allow_import: Sequence[str] = ()
) -> Policy:
    """The trained policy of a run.

        policy = alfish.load("runs/ppo")
        action = policy.act(observation)

    No environment is built: networks and transforms are built for the spaces that the checkpoint has. Only for
    checkpoints of older versions, which have none, the environment is built to see its spaces.

    Args:
      root_dir: of `alfish train`.
      checkpoint: 'latest', 'best' or environment steps.
      device: where it acts.
      allow_import: modules that the run's configuration may import, as `["my_lab"]`, beside alfish's own and those
        that this process has imported already.

    Raises:
      UsageError: there is no such run or checkpoint, or the configuration imports another module.
    """
    root_dir = Path(root_dir)
    with _configured_as(root_dir, allow_import):
        checkpoints = Checkpoints(root_dir / "checkpoints")
        steps, state = checkpoints.load(checkpoint, spaces_of_checkpoint)
        spaces = spaces_of_checkpoint(state)
        if spaces is None:
            with contextlib.closing(_opened_trainer(root_dir, device)) as trainer:
                trainer.load_policy(checkpoint)
                return trainer.policy()
        factories = {"transforms": (), **reading.bound("alfish.Trainer", "algorithm", "transforms")}
        if "algorithm" not in factories:
            raise UsageError(f"{root_dir / reading.CONFIG_FILE} does not bind Trainer.algorithm")
        specs = observation_spec(spaces.observation), action_spec(spaces.action), spaces.reward
        networks = make_networks(factories["algorithm"], factories["transforms"], *specs, device_named(device))
        policy = Policy(*networks, spaces.observation, spaces.action)

        def fill(state: dict[str, Any]) -> None:
            load_networks(*networks, state, root_dir)
            policy.env_steps = int(state["counters"]["env_steps"])

        checkpoints.load(steps, fill)  # again, because an error in what was built between is not one of the file
        return policy
