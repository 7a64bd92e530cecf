"""Trains a population: repeatedly replaces the worst members with copies of the best, and changes their settings.

  alfish population --gin_file=ppo_pendulum.gin --root_dir=pbt/pendulum --jobs=4 --members=8 --generations=10 \\
      --perturb='Learner.learning_rate=1e-5..1e-2' --gin_param=Evaluate.period=20000 --steps=20000
  alfish population --root_dir=pbt/pendulum      # continues the population as specified
  alfish play --root_dir=pbt/pendulum/best       # the best member of the newest generation

--perturb names a parameter and its bounds. Members begin with random values between the bounds, drawn log-uniformly.
After each generation of --steps clock steps, the value of a member is the mean return of its last evaluation, or of its
last --last evaluations; --objective=evaluation/env_info/success takes the success rate instead. The worst quarter
(--share) continues from checkpoints of the best quarter, with each perturbed value multiplied by 0.8 or 1.25. With
--gap=2, only a member whose value is worse by 2 standard errors is replaced. --share=0 replaces no member.

A member in a generation is a run directory of `alfish train`, such as g003/m2, with its parent and its settings in
member.json. Such a directory is never overwritten, so no progress is lost, and these directories are the only state.
Ctrl-C or SIGTERM ends the runs after they have saved checkpoints; after SIGUSR1 the exit status is 75. The same command
then continues the population, even after a kill. The configuration describes one run, whose budget and schedules span
all generations. More --generations of the same --steps extend a population, as far as Trainer.num_env_steps allows. A
member that fails is replaced; with --share=0 it is not.

members.csv has the parent, the settings and the value of each member.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from absl import flags

from alfish.bin.group_flags import define_group, log, train_group
from alfish.configuration.directory import run_directory
from alfish.errors import UsageError

if TYPE_CHECKING:
    from alfish.sweeps.population import PopulationSpecification

FLAGS = flags.FlagValues()
define_group(FLAGS, "population")
flags.DEFINE_multi_string(
    "perturb",
    [],
    "A parameter and its bounds, such as 'Learner.learning_rate=1e-5..1e-2'; repeatable.",
    flag_values=FLAGS,
)
flags.DEFINE_integer("members", None, "Number of members; default: 8.", 1, flag_values=FLAGS)
flags.DEFINE_integer("generations", None, "Number of generations; default: 10.", 1, flag_values=FLAGS)
flags.DEFINE_integer(
    "steps", None, "Clock steps of a generation; default: num_env_steps / generations.", 1, flag_values=FLAGS
)
flags.DEFINE_float(
    "share",
    None,
    "Fraction of members that are replaced after each generation; default: 0.25.",
    0,
    0.5,
    flag_values=FLAGS,
)
flags.DEFINE_float(
    "gap",
    None,
    "Number of standard errors by which a member must be worse to be replaced; default: 0.",
    0,
    flag_values=FLAGS,
)


def main(flag_values: flags.FlagValues) -> int:
    if not flag_values.root_dir:
        raise UsageError("--root_dir is missing: give a directory for the population, as in --root_dir=pbt/ppo")
    from alfish.sweeps.population import Population, PopulationSpecification

    return train_group(Population, PopulationSpecification, run_directory(flag_values.root_dir), flag_values, _report)


def _report(directory: Path, specification: "PopulationSpecification") -> None:
    """Prints the names of the written files."""
    from alfish.sweeps.population import BEST, CSV

    log(f"written: {directory / CSV}; {directory / BEST} is the best member of the last generation")
