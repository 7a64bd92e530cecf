"""Trains one configuration with many settings, and compares them.

  alfish sweep --gin_file=ppo_cartpole.gin --root_dir=sweeps/rate --jobs=4 \\
      --search='learning_rate/Linear.start=log(1e-4, 1e-2)' --search='PPO.gamma=grid(0.98, 0.99)' --seeds=3 --trials=20
  alfish sweep --root_dir=sweeps/rate            # continues the sweep as specified
  alfish sweep --root_dir=sweeps/rate --show     # table and picture of the trials so far

--search names a parameter and its values: grid(...), choice(...), uniform(a, b), log(a, b) or int(a, b). If all
parameters have grid(...), each combination is a trial. Otherwise Optuna's TPE proposes the values (pip install
'alfish[sweep]'), or --sampler=random draws them. With --seeds=3, each trial is three runs with the seeds Trainer.seed,
Trainer.seed + 1 and so on, and its value is their mean. The value of a run is the mean return of its last evaluation,
or of its last --last evaluations; --objective=evaluation/env_info/success takes the success rate instead.

Each run is a directory of `alfish train` in --root_dir, and these directories are the only state. Ctrl-C or SIGTERM
ends the runs after they have saved checkpoints. The same command then continues the sweep, even after a kill. A run
that fails is a failed trial; remove its file `failed` to try it again. --prune stops runs whose evaluations are below
the median of the other runs. More --trials extend a finished sweep.

--ray trains the runs on a Ray cluster: the cluster at RAY_ADDRESS, or the cluster that was started on this machine. All
machines must have --root_dir at the same path.

At the end, root_dir has trials.csv, and trials.png with the value against each parameter and the curves of all trials.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from absl import flags

from alfish.bin import show
from alfish.bin.group_flags import define_group, log, train_group
from alfish.configuration.directory import run_directory
from alfish.errors import UsageError

if TYPE_CHECKING:
    from alfish.sweeps.sweep import SweepSpecification

FLAGS = flags.FlagValues()
define_group(FLAGS, "sweep")
flags.DEFINE_multi_string(
    "search", [], "A parameter and its values, such as 'PPO.gamma=grid(0.98, 0.99)'; repeatable.", flag_values=FLAGS
)
flags.DEFINE_enum(
    "sampler",
    None,
    ["grid", "random", "tpe"],
    "Sampler; default: grid if all parameters have grid(...), else tpe.",
    flag_values=FLAGS,
)
flags.DEFINE_integer("sampler_seed", None, "Seed of random and tpe; default: 0.", 0, flag_values=FLAGS)
flags.DEFINE_integer("seeds", None, "Number of runs of each trial; default: 1.", 1, flag_values=FLAGS)
flags.DEFINE_integer(
    "trials", None, "Number of trials; default: 20, or all combinations of a grid.", 1, flag_values=FLAGS
)
flags.DEFINE_boolean("prune", None, "Stop runs that are worse than the median of the others.", flag_values=FLAGS)
flags.DEFINE_boolean(
    "show", False, "Write the table and figure of the sweep so far, without starting runs.", flag_values=FLAGS
)


def main(flag_values: flags.FlagValues) -> int:
    if not flag_values.root_dir:
        raise UsageError("--root_dir is missing: give a directory for the sweep, as in --root_dir=sweeps/rate")
    directory = run_directory(flag_values.root_dir)
    from alfish.sweeps.sweep import Sweep, SweepSpecification

    if flag_values.show:
        _show(directory, SweepSpecification.read(directory))
        return 0
    return train_group(Sweep, SweepSpecification, directory, flag_values, _show)


def _show(directory: Path, specification: "SweepSpecification") -> None:
    """Writes trials.csv and the picture, and prints the table."""
    from alfish.sweeps.sweep import trials_of
    from alfish.sweeps.table import CSV, PICTURE, table, write_csv, write_picture

    trials, parameters = trials_of(directory, specification).read(), specification.parameters
    names = [one.name for one in parameters]
    write_csv(directory, names, trials)
    show(table(names, trials))
    written = [str(directory / CSV)]
    try:
        write_picture(directory, parameters, trials, specification.value_words)
        written.append(str(directory / PICTURE))
    except UsageError as error:  # matplotlib is missing; the table is already written
        log(str(error))
    show(f"written: {' and '.join(written)}")
