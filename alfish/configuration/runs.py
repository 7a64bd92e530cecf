"""Trainers for the runs that a configuration describes, and `alfish.train`."""

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import logging

from alfish import replicas
from alfish.configuration import locating, messages, reading
from alfish.configuration.bindings import Reading
from alfish.configuration.directory import is_to_change, make_directory, run_directory
from alfish.configuration.opening import process_preserved
from alfish.configuration.reachability import refuse_unread
from alfish.errors import UsageError
from alfish.parameters import checked, description
from alfish.parameters.description import CONFIG_FILE
from alfish.parameters.kinds import shown
from alfish.runs.stop_signals import exit_status
from alfish.training.policy import Policy
from alfish.training.trainer import Trainer
from alfish.training.untrained import end_of


def configured_trainer(root_dir: str | Path, found: Reading, objects: Mapping[str, Any] | None = None) -> Trainer:
    """Returns the Trainer that gin describes now; it saves that configuration in its run directory.

    Args:
      root_dir: of the run, new or existing.
      found: the configuration as gin has read it.
      objects: values by parameter, for those that the saved text cannot express.

    Raises:
      UsageError: a required parameter is not bound, or nothing reads a bound one.
    """
    text, digest = reading.text(), reading.digest()
    reading.bind(objects or {})
    with messages.complete(found):
        trainer = Trainer(root_dir)
    refuse_unread(found)
    trainer.directory.config = {CONFIG_FILE: text, reading.OPERATIVE_FILE: reading.operative_text()}
    trainer.directory.config_hash = digest
    return trainer


@contextlib.contextmanager
def configured_run(
    root_dir: Path,
    files: Sequence[str],
    bindings: Sequence[str],
    on_config_change: str = "stop",
    *,
    allow_import: Sequence[str] = (),
    objects: Mapping[str, Any] | None = None,
    makes_directory: bool = True,
) -> Iterator[Trainer]:
    """Reads a configuration, and yields the Trainer of a new run, or of the run in `root_dir`.

    Args:
      root_dir: of the run.
      files, bindings: as `reading.read` takes them.
      on_config_change: action if the run in `root_dir` has another configuration: 'stop' raises, 'old' takes the
        configuration of the run, 'new' the one that was read.
      allow_import: modules that the configuration of the run may import beside alfish's own.
      objects: values by parameter, for those that the saved text cannot express.
      makes_directory: False if nothing will be written.

    Raises:
      UsageError: as `reading.read`, `is_to_change` and `configured_trainer`; also in the context, for parts that are
        built when training starts.
    """
    found = reading.read(files, bindings)
    with contextlib.ExitStack() as stack:
        stack.enter_context(replicas.joined())
        is_new = not root_dir.exists() and replicas.size() == 1
        if makes_directory:
            make_directory(root_dir)
        saved = root_dir / CONFIG_FILE
        if saved.is_file() and not is_to_change(saved, on_config_change):
            found = stack.enter_context(reading.saved(saved, allow_import))
        trainer = None
        try:
            trainer = configured_trainer(root_dir, found, objects)
            trainer.directory.accepts_config_change = on_config_change == "new"
            with messages.complete(found):
                yield trainer
        except Exception:  # constructors of the user's parts may raise anything
            if is_new and (trainer is None or trainer.directory.is_whole):  # else another run may have taken its place
                with contextlib.suppress(OSError):  # it is not empty
                    root_dir.rmdir()
            raise


@checked
def train(
    algorithm: str | Callable[..., Any] | None = None,
    environment: Any = None,
    *,
    root_dir: str | Path,
    conf: str | None = None,
    on_config_change: str = "stop",
    **settings: Any,
) -> Policy:
    """Trains a new run, or continues an existing one, and returns the trained policy.

        policy = alfish.train("PPO", "CartPole-v1", num_env_steps=50_000, root_dir="runs/ppo")
        policy = alfish.train(conf="ppo_cartpole", root_dir="runs/ppo", **{"Trainer.seed": 1, "PPO.gamma": 0.98})

    The run directory is the same as that of `alfish train`, so `alfish.load` and the commands open it. The caller's gin
    configuration and random generators are restored.

    Args:
      algorithm: the name of a shipped algorithm, whose base conf is read ("PPO": ppo.gin), or a class or factory as
        for `Trainer.algorithm`.
      environment: as for `make_environment.env_id`: an id of gymnasium, a class, or its name (`my_module:MyEnv`).
      root_dir: of the run; created if needed. An existing run is continued.
      conf: a gin file, or the name of a shipped conf, instead of the name of an algorithm. Beside it `algorithm` may be
        a class of your own, which takes the place of the conf's (`alfish.train(MySAC, conf="sac_pendulum")`).
      on_config_change: action if the run in `root_dir` has another configuration: 'stop' raises; 'old' and 'new'
        continue with the configuration of the run, or with this one.
      **settings: parameters of the Trainer by name (`seed=1`), and of other classes with the name of the class
        (`**{"PPO.gamma": 0.98}`). Values are plain values, classes, functions, `functools.partial` of them, and lists
        and dicts of these. A run with other values, or with classes of the program itself, trains, but only that
        program can train it further or evaluate it; `alfish.load` opens its policy if algorithm, networks and
        transforms are of modules.

    Raises:
      UsageError: a setting does not exist, nothing reads it, its parameter does not take the value, or another thread
        of the program trains or has a run open.
      KeyboardInterrupt, SystemExit: SIGINT, or SIGTERM or SIGUSR1, was received. A checkpoint is saved, and the same
        call continues the run if its budget is not spent.
    """
    if on_config_change not in ("stop", "old", "new"):
        raise UsageError(f"on_config_change is {on_config_change!r}; it must be 'stop', 'old' or 'new'")
    if conf is algorithm is None or (conf is not None and isinstance(algorithm, str)):
        raise UsageError(
            'alfish.train takes an algorithm, as in alfish.train("PPO", "CartPole-v1", ...), or a conf; beside a conf, '
            "the algorithm is a class of your own, not a name"
        )
    if not (environment is None or isinstance(environment, str) or callable(environment)):
        raise UsageError(
            f"alfish.train was given {shown(environment)}; it takes what makes environments: an id, a class, or a "
            "function as lambda: gymnasium.make('CartPole-v1')"
        )
    named: dict[str, Any] = {} if algorithm is None or isinstance(algorithm, str) else {"Trainer.algorithm": algorithm}
    named |= {} if environment is None else {"make_environment.env_id": environment}
    named |= {name if "." in name else f"Trainer.{name}": value for name, value in settings.items()}
    file = conf if conf is not None else algorithm if isinstance(algorithm, str) else None
    files = [] if file is None else [locating.file_of(file)]
    bindings, objects = [], {}
    for name, value in named.items():
        written = description.Writer()
        scope, _, rest = name.rpartition("/")
        selector, _, parameter = rest.rpartition(".")
        written.bind(scope, selector, parameter, value, name)
        bindings.append(written.text().rstrip())
        if not written.is_whole:
            objects[name] = value
        if not written.is_whole or "__main__" in written.modules:
            logging.warning(
                "%s is of this program, so that no other one, and no command, can build it; to evaluate or continue "
                "the run elsewhere, move it into a module",
                name,
            )
    with (
        reading.preserved(),
        process_preserved(),
        configured_run(run_directory(root_dir), files, bindings, on_config_change, objects=objects) as trainer,
    ):
        if trainer.train() is None and trainer.signals.number is None and replicas.rank() == 0:
            print(f"{end_of(trainer)}, or name another root_dir to train anew", file=sys.stderr)
    # Also if the budget was spent when the signal came, because the signal asked the caller's program to end.
    if trainer.signals.number == signal.SIGINT:
        raise KeyboardInterrupt
    if trainer.signals.number is not None:
        raise SystemExit(exit_status(trainer.signals.number))
    return trainer.policy()
