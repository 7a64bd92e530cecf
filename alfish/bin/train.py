"""Trains the run that a gin file describes.

  alfish train --gin_file=ppo_cartpole.gin --root_dir=runs/ppo
  alfish train --gin_file=ppo_cartpole.gin --root_dir=runs/seed1 --gin_param='Trainer.seed=1'

A gin file is looked up in the working directory, then among the shipped confs (`alfish confs` lists them). The same
command continues an existing run from its newest checkpoint. A larger budget extends a finished run. Ctrl-C, SIGTERM or
SIGUSR1 saves a checkpoint and stops the run, even while it waits for an environment. A second Ctrl-C stops it at once.
After SIGUSR1 the exit status is 75, which asks a job scheduler to start the job again.

--profile reports where the time went, and which settings would save time. A small budget is enough for this
(--gin_param=Trainer.num_env_steps=20000). --throughput_limits measures upper limits of the collection speed.

The run directory contains checkpoints/, tensorboard/, metrics.csv, eval/ (every evaluation episode), config.gin,
operative_config.gin (with every default), provenance.json, log.txt and run_id. A finished run also has the file `done`,
with the reason: the budget is spent, or a listener stopped the run (StopAt, StopWithoutProgress). To continue a run
that a listener stopped, remove `done`. Checkpoints of another run or configuration are refused.
"""

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from absl import flags

from alfish.bin import shared_flags
from alfish.configuration.directory import run_directory
from alfish.errors import RunError, UsageError
from alfish.parameters.description import CONFIG_FILE
from alfish.processes import replicas
from alfish.runs import trust
from alfish.runs.files import DiskError
from alfish.runs.stop_signals import exit_status

if TYPE_CHECKING:
    from alfish.training.trainer import Trainer

HAS_LEARNERS = True  # torchrun may start several processes of this command for one run
FLAGS = flags.FlagValues()
flags.DEFINE_multi_string("gin_file", [], "Gin file; repeatable, later files override earlier ones.", flag_values=FLAGS)
flags.DEFINE_multi_string(
    "gin_param", [], "One binding, such as 'PPO.gamma=0.98'; repeatable, overrides files.", flag_values=FLAGS
)
flags.DEFINE_string("root_dir", None, "Directory of the run; created if needed.", flag_values=FLAGS)
flags.DEFINE_string("device", None, "auto, cpu, cuda or cuda:N; overrides Trainer.device.", flag_values=FLAGS)
flags.DEFINE_boolean(
    "profile",
    False,
    "At the end, print a report of the time spent, and write trace.json for Perfetto.",
    flag_values=FLAGS,
)
flags.DEFINE_boolean(
    "throughput_limits",
    False,
    "Do not train; measure for some seconds the speed of environments alone, and of data collection without training.",
    flag_values=FLAGS,
)
flags.DEFINE_enum(
    "on_config_change",
    "stop",
    ["stop", "old", "new"],
    "What to do if the run in root_dir has another configuration: stop and show the difference, continue with the old "
    "configuration, or continue with the new one.",
    flag_values=FLAGS,
)
flags.DEFINE_multi_string("allow_import", [], shared_flags.ALLOW_IMPORT, flag_values=FLAGS)


def main(flag_values: flags.FlagValues) -> int:
    if not flag_values.root_dir:
        raise UsageError("--root_dir is missing: give a directory for the run, as in --root_dir=runs/ppo")
    shared_flags.check_writable_run(flag_values.root_dir, "alfish train")
    root_dir = run_directory(flag_values.root_dir)
    files = flag_values.gin_file or [str(root_dir / CONFIG_FILE)]
    if not Path(files[0]).is_file() and not flag_values.gin_file:
        raise UsageError("--gin_file is missing: `alfish confs` lists what can be trained")
    bindings = list(flag_values.gin_param)
    if flag_values.device:
        bindings.append(f"Trainer.device = '{flag_values.device}'")
    from alfish.configuration.runs import configured_run  # imported here, because --help must not wait for torch

    with contextlib.ExitStack() as stack:
        if not flag_values.gin_file:  # a gin file that the user names is trusted
            stack.enter_context(trust.restricted(Path(files[0]), flag_values.allow_import))
        trainer = stack.enter_context(
            configured_run(
                root_dir,
                files,
                bindings,
                flag_values.on_config_change,
                allow_import=flag_values.allow_import,
                makes_directory=not flag_values.throughput_limits,
            )
        )
        if flag_values.throughput_limits:
            if replicas.size() > 1:
                raise UsageError("--throughput_limits measures a single learner; start it without torchrun")
            from alfish.training.profiler import throughput_limits

            print(throughput_limits(trainer))
            return 0
        if flag_values.profile and replicas.rank() == 0:
            from alfish.training.profiler import Profile

            trainer.listeners.append(Profile())
        return _train(trainer)


def _beginning(trainer: "Trainer") -> str:
    """Returns where the same command would begin."""
    newest = trainer.directory.checkpoints.steps()[-1:]
    return f"continues from the checkpoint at {newest[0]:,} steps" if newest else "begins again"


def _train(trainer: "Trainer") -> int:
    """Trains, and returns the exit status of the command."""
    try:
        report = trainer.train()
    except DiskError as error:
        again = f"run the same command again: it {_beginning(trainer)}"
        raise RunError(f"{error}; once the directory is writable, {again}") from error
    except KeyboardInterrupt:  # the second one, because the trainer waits after the first
        trainer.log(f"SIGINT twice: stopped at once; the same command {_beginning(trainer)}")
        return 130
    if trainer.interrupted_by is not None:
        trainer.log(
            f"{trainer.signals.name}: stopped at {trainer.clock.value:,} steps; run the same command again to continue"
        )
        return exit_status(trainer.interrupted_by)
    clock = trainer.clock
    out_of_time = clock.finished and clock.progress < 1 and clock.stop_reason is None
    if (report is None or out_of_time) and replicas.rank() == 0:
        from alfish.training import untrained

        print(untrained.end_of(trainer), file=sys.stderr)
    return 0
