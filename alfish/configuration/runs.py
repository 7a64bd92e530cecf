"""Builds Trainers from parsed configurations; also contains `alfish.train`."""

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import logging

from alfish.configuration import locating, moved_settings, reading, sentences
from alfish.configuration.bindings import Reading
from alfish.configuration.directory import is_to_change, make_directory, run_directory
from alfish.configuration.opening import process_preserved
from alfish.configuration.reachability import refuse_unread
from alfish.environments import make_environment
from alfish.environments.games import make_games
from alfish.errors import UsageError
from alfish.errors.user_code import brief
from alfish.parameters import checked, description, differences
from alfish.parameters.description import CONFIG_FILE
from alfish.parameters.kinds import shown
from alfish.policies.networks import chosen_policy
from alfish.processes import replicas
from alfish.runs.stop_signals import exit_status
from alfish.training.policy import Policy
from alfish.training.trainer import Trainer
from alfish.training.untrained import end_of


def configured_trainer(root_dir: str | Path, found: Reading, objects: Mapping[str, Any] | None = None) -> Trainer:
    """Returns a Trainer built from gin's current configuration; the configuration is saved in the run's directory.

    Args:
      root_dir: directory of the run, new or existing.
      found: configuration that was read.
      objects: values that the saved text cannot express, by name of the parameter.

    Raises:
      UsageError: a required parameter is not bound, or nothing reads a bound parameter.
    """
    text, digest = reading.text(), reading.digest()
    reading.bind(objects or {})
    with sentences.complete(found):
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
    """Reads a configuration, and yields the Trainer of a new run or of the existing run in `root_dir`.

    Args:
      root_dir: directory of the run.
      files, bindings: gin files and bindings, see `reading.read`.
      on_config_change: action if the run in `root_dir` has a different configuration: 'stop' raises, 'old' uses the
        run's configuration, and 'new' uses the configuration that was read.
      allow_import: modules that the run's configuration may import in addition to alfish's modules.
      objects: values that the saved text cannot express, by name of the parameter.
      makes_directory: whether to create the run's directory; False if nothing will be written.

    Raises:
      UsageError: as for `reading.read`, `is_to_change` and `configured_trainer`; also raised within the context, by
        parts that are built when training starts.
    """
    found = reading.read(files, bindings)
    with contextlib.ExitStack() as stack:
        stack.enter_context(replicas.joined())
        is_new = not root_dir.exists() and replicas.size() == 1
        if makes_directory:
            make_directory(root_dir)
        saved = root_dir / CONFIG_FILE
        before = locating.text_of(saved) if saved.is_file() else ""
        renews = moved_settings.has_moved(before) or differences.without_empty_scopes(before) != before
        if saved.is_file() and not is_to_change(saved, on_config_change):
            found = stack.enter_context(reading.saved(saved, allow_import))
        trainer = None
        try:
            trainer = configured_trainer(root_dir, found, objects)
            # If an older version wrote the text otherwise, checkpoints have the hash of that text, which is accepted.
            trainer.directory.accepts_config_change = on_config_change == "new" or renews
            with sentences.complete(found):
                yield trainer
        except Exception:  # constructors of the user's parts may raise any exception
            if is_new and (trainer is None or trainer.directory.is_whole):  # no other run has replaced the directory
                with contextlib.suppress(OSError):  # rmdir raises if the directory is not empty
                    root_dir.rmdir()
            raise


@brief
@checked
def train(
    algorithm: str | Callable[..., Any] | None = None,
    environment: Any = None,
    *,
    root_dir: str | Path,
    conf: str | Path | None = None,
    on_config_change: str = "stop",
    policy: str | None = None,
    **settings: Any,
) -> Policy:
    """Trains a new run, or continues an existing one, and returns the trained policy.

        policy = alfish.train("PPO", "CartPole-v1", num_env_steps=50_000, root_dir="runs/ppo")
        policy = alfish.train(conf="ppo_cartpole", root_dir="runs/ppo", **{"Trainer.seed": 1, "PPO.gamma": 0.98})

    The run's directory has the same form as with `alfish train`, so `alfish.load` and the commands can open it. The
    caller's gin configuration and random generators are restored.

    Args:
      algorithm: name of a shipped algorithm, or a class or factory as for `Trainer.algorithm`. A name selects the base
        conf of the algorithm (ppo.gin for "PPO").
      environment: gymnasium id, class or function that makes an environment, or name of a class (`my_module:MyEnv`), as
        for `make_environment.env_id`; or a `functools.partial` of `make_environment` or `make_games`, as for
        `Trainer.environment`.
      root_dir: directory of the run, created if needed. An existing run is continued.
      conf: gin file or name of a shipped conf, instead of the name of an algorithm. If `algorithm` is also given, it
        must be your own class; it replaces the conf's algorithm (`alfish.train(MySAC, conf="sac_pendulum")`).
      on_config_change: action if the run in `root_dir` has a different configuration: 'stop' raises, 'old' continues
        with the run's configuration, and 'new' continues with this configuration.
      policy: name of the policy to return, in a run with several policies; None means the only policy.
      **settings: parameters of the Trainer by name (`seed=1`), and of other classes by class and name
        (`**{"PPO.gamma": 0.98}`). A setting is a plain value, a class, a function, a `functools.partial` of a class or
        function, an object of a shipped class such as `Linear(3e-4, 0.0)`, or a list or dict of these. Other objects
        and classes of the main program are also accepted; the run uses these objects themselves, but then only the same
        program can continue it. `alfish.load` still opens the policy if the algorithm, networks and transforms are
        defined in modules, and `evaluate` does if it is given the environment.

    Raises:
      UsageError: a setting does not exist, is not read, or has a value that does not fit; there are several policies,
        and `policy` names none of them; or another thread of the program trains or has a run open.
      KeyboardInterrupt, SystemExit: SIGINT (KeyboardInterrupt), SIGTERM or SIGUSR1 (SystemExit) was received. A
        checkpoint is saved; the same call continues the run if its budget is not spent.
    """
    if on_config_change not in ("stop", "old", "new"):
        raise UsageError(f"on_config_change is {on_config_change!r}; it must be 'stop', 'old' or 'new'")
    if conf is algorithm is None or (conf is not None and isinstance(algorithm, str)):
        raise UsageError(
            'alfish.train takes an algorithm, as in alfish.train("PPO", "CartPole-v1", ...), or a conf; together with '
            "a conf, the algorithm must be your own class, not a name"
        )
    if not (environment is None or isinstance(environment, str) or callable(environment)):
        raise UsageError(
            f"the environment of alfish.train is {shown(environment)}; it must be an id, a class, or a function such "
            "as lambda: gymnasium.make('CartPole-v1')"
        )
    named: dict[str, Any] = {} if algorithm is None or isinstance(algorithm, str) else {"Trainer.algorithm": algorithm}
    if environment is not None:
        makes_all = getattr(environment, "func", environment) in (make_environment, make_games)
        named["Trainer.environment" if makes_all else "make_environment.env_id"] = environment
    if twice := [name for name in settings if f"Trainer.{name}" in settings]:
        raise UsageError(f"alfish.train was given both {twice[0]} and Trainer.{twice[0]}; give one of them")
    named |= {name if "." in name else f"Trainer.{name}": value for name, value in settings.items()}
    file = str(conf) if conf is not None else algorithm if isinstance(algorithm, str) else None
    files = [] if file is None else [locating.file_of(file)]
    bindings, objects, own = description.as_bindings(named)
    for name in own:
        logging.warning(
            "%s is an object, or is defined in the main program, so no other program and no command can build it; "
            "to continue the run elsewhere, give a class or function of a module",
            name,
        )
    with (
        reading.preserved(),
        process_preserved(),
        configured_run(run_directory(root_dir), files, bindings, on_config_change, objects=objects) as trainer,
    ):
        chosen_policy(list(trainer.by_policy()), policy, trainer.directory.path)  # raises before anything is trained
        if trainer.train() is None and trainer.signals.number is None and replicas.rank() == 0:
            print(f"{end_of(trainer)}, or choose another root_dir to train from the beginning", file=sys.stderr)
    # Raised even if the budget is already spent, because the signal asks the caller's program to end.
    if trainer.signals.number == signal.SIGINT:
        raise KeyboardInterrupt
    if trainer.signals.number is not None:
        raise SystemExit(exit_status(trainer.signals.number))
    return trainer.policy(policy)
