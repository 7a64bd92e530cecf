"""Trains what a gin file describes.

  alfish train --gin_file=ppo_cartpole.gin --root_dir=runs/ppo
  alfish train --gin_file=ppo_cartpole.gin --root_dir=runs/seed1 --gin_param='Trainer.seed=1'

A gin file is looked for where you stand, then among the shipped confs (`alfish confs` lists them). The same command on
an existing run continues it from its newest checkpoint; a larger budget extends a finished one. Ctrl-C or SIGTERM saves
a checkpoint and stops, also while it waits for an environment; a second Ctrl-C stops at once.

--profile shows where the time goes and what to change; with a small budget (--gin_param=Trainer.num_env_steps=20000) it
is done soon. --throughput_limits measures how fast collecting could be at best.

The run directory holds checkpoints/, tensorboard/, metrics.csv, eval/ (every evaluation episode), config.gin,
operative_config.gin (with every default), provenance.json, log.txt, run_id, and `done` once the run is finished: its
budget is spent, or a listener stopped it (StopAt, StopWithoutProgress), and then `done` has the reason. A run that was
stopped is not continued until `done` is removed. A checkpoint of another run or configuration is not continued from.
"""

import contextlib
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from absl import flags

from alfish.bin import help_texts
from alfish.configuration.directory import run_directory
from alfish.errors import RunError, UsageError
from alfish.parameters import imports
from alfish.parameters.description import CONFIG_FILE
from alfish.runs.files import DiskError

if TYPE_CHECKING:
    from alfish.training.trainer import Trainer

FLAGS = flags.FlagValues()
flags.DEFINE_multi_string("gin_file", [], "Gin file; repeat it to add others, later ones win.", flag_values=FLAGS)
flags.DEFINE_multi_string(
    "gin_param", [], "One binding, as 'PPO.gamma=0.98'; repeatable, wins over files.", flag_values=FLAGS
)
flags.DEFINE_string("root_dir", None, "Directory of the run; made if needed.", flag_values=FLAGS)
flags.DEFINE_string("device", None, "auto, cpu, cuda or cuda:N; wins over Trainer.device.", flag_values=FLAGS)
flags.DEFINE_boolean(
    "profile", False, "Print at the end where the time went, and write trace.json for Perfetto.", flag_values=FLAGS
)
flags.DEFINE_boolean(
    "throughput_limits",
    False,
    "Train nothing: measure for some seconds how fast the environments alone are, and collecting without training.",
    flag_values=FLAGS,
)
flags.DEFINE_enum(
    "on_config_change",
    "stop",
    ["stop", "old", "new"],
    "What to do where the run in root_dir has another configuration: stop and show the difference, go on with the old "
    "one, or go on with the new one.",
    flag_values=FLAGS,
)
flags.DEFINE_multi_string("allow_import", [], help_texts.ALLOW_IMPORT, flag_values=FLAGS)


def main(flag_values: flags.FlagValues) -> int:
    if not flag_values.root_dir:
        raise UsageError("--root_dir is missing: name a directory for the run, as in --root_dir=runs/ppo")
    root_dir = run_directory(flag_values.root_dir)
    files = flag_values.gin_file or [str(root_dir / CONFIG_FILE)]
    if not Path(files[0]).is_file() and not flag_values.gin_file:
        raise UsageError("--gin_file is missing: `alfish confs` lists what can be trained")
    bindings = list(flag_values.gin_param)
    if flag_values.device:
        bindings.append(f"Trainer.device = '{flag_values.device}'")
    from alfish.configuration.runs import configured_run  # not at the top: --help should not wait for torch

    with contextlib.ExitStack() as stack:
        if not flag_values.gin_file:  # else the user names what is trusted
            stack.enter_context(imports.restricted(flag_values.allow_import))
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
            from alfish.training.profiler import throughput_limits

            print(throughput_limits(trainer))
            return 0
        if flag_values.profile:
            from alfish.training.profiler import Profile

            trainer.listeners.append(Profile())
        return _train(trainer)


def _train(trainer: "Trainer") -> int:
    """Trains, and returns the exit status."""
    try:
        report = trainer.train()
    except DiskError as error:
        newest = trainer.checkpoints.steps()[-1:]
        at = f"continues from the checkpoint at {newest[0]:,} steps" if newest else "begins again"
        raise RunError(f"{error}; once it can be written to, the same command {at}") from error
    if trainer.interrupted_by is not None:
        name = signal.Signals(trainer.interrupted_by).name
        trainer.log(f"{name}: stopped at {trainer.steps:,} steps; the same command continues")
        return 128 + trainer.interrupted_by
    if report is None:
        print(f"{trainer.root_dir} is done: {_end_of(trainer)}", file=sys.stderr)
    return 0


def _end_of(trainer: "Trainer") -> str:
    """Why a run is finished, and what to do to go on."""
    if trainer.stopped is not None:
        return f"{trainer.stopped}; remove {trainer.root_dir / 'done'} to go on"
    name, budget = trainer.budget
    if trainer.progress < 1:
        return f"Trainer.wall_seconds is spent before Trainer.{name} = {budget:,}; raise it to go on"
    return f"Trainer.{name} = {budget:,} is spent; raise it to go on"
