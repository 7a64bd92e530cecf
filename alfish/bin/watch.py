"""Evaluates the checkpoints of a run while another process trains it.

  alfish watch --root_dir=runs/ppo
  alfish watch --root_dir=runs/ppo --all --idle_seconds=0
  alfish watch --root_dir=runs/ppo --num_episodes=100 --name=hundred --video

The command needs only the run's directory, so it may run on another machine with access to it. Each new
complete checkpoint is evaluated once, on the episodes of the run's Evaluate, or on the episodes that --num_episodes and
--seed select. Checkpoints that training has already evaluated on the same episodes are skipped. Results are written
like those of training: to eval/NAME-STEPS.csv, and to TensorBoard under the same names (tensorboard/watch). `alfish
plot`, `compare` and `report` include them.

The command begins with the newest checkpoint, or, with --all, with the oldest checkpoint that is kept. It ends when the
run is finished, or after --idle_seconds without a new checkpoint. If it is killed, run the same command again; it
continues.
"""

import contextlib

from absl import flags

from alfish.bin import shared_flags

FLAGS = flags.FlagValues()
flags.DEFINE_string("root_dir", None, "Directory of the run.", flag_values=FLAGS)
_WORDS = "Number of episodes of an evaluation; default: Evaluate.num_episodes of the run."
flags.DEFINE_integer("num_episodes", None, _WORDS, 1, flag_values=FLAGS)
_WORDS = "Seed of episode 0; default: Evaluate.seed of the run."
flags.DEFINE_integer("seed", None, _WORDS, 0, shared_flags.LARGEST_SEED, flag_values=FLAGS)
_WORDS = (
    "Name of the evaluation; the names of its files and scalars begin with it. Default: Evaluate.name of the run. In "
    "games, Evaluate.lineup of the run names the policies of agents."
)
flags.DEFINE_string("name", None, _WORDS, flag_values=FLAGS)
flags.DEFINE_boolean("all", False, "Evaluate the older checkpoints that are kept, too.", flag_values=FLAGS)
_WORDS = (
    "Seconds without a new checkpoint after which the command ends; 0 evaluates the existing checkpoints only; "
    "default: no limit."
)
flags.DEFINE_float("idle_seconds", None, _WORDS, 0, flag_values=FLAGS)
flags.DEFINE_integer("num_envs", 8, shared_flags.NUM_ENVS, 1, flag_values=FLAGS)
flags.DEFINE_integer("max_length", None, shared_flags.MAX_LENGTH, 1, flag_values=FLAGS)
flags.DEFINE_string("device", "cpu", "cpu, cuda or cuda:N.", flag_values=FLAGS)
flags.DEFINE_multi_string("allow_import", [], shared_flags.ALLOW_IMPORT, flag_values=FLAGS)
shared_flags.define_films(FLAGS)


def main(flag_values: flags.FlagValues) -> int:
    from alfish.configuration import reading
    from alfish.configuration.opening import open_run
    from alfish.training.evaluations.watch import Watch

    shared_flags.check_root_dir(flag_values.root_dir)
    shared_flags.check_writable_run(flag_values.root_dir, "alfish watch")
    with open_run(flag_values.root_dir, flag_values.device, flag_values.allow_import) as trainer:
        own = reading.bound("Evaluate", "name", "lineup", "environment")
        episodes = {"num_episodes": 20, "seed": 0, **reading.bound("Evaluate", "num_episodes", "seed")}
        given = {name: flag_values[name].value for name in episodes if flag_values[name].value is not None}
        episodes |= given
        watch = Watch(
            trainer,
            flag_values.name or own.get("name", "evaluation"),
            options={name: value for name, value in own.items() if name != "name" and value is not None},
            num_envs=flag_values.num_envs,
            max_length=flag_values.max_length,
            num_filmed=shared_flags.num_filmed(flag_values, episodes["num_episodes"]),
            captions=flag_values.captions,
            **episodes,
        )
        with contextlib.closing(watch):
            idle_seconds = float("inf") if flag_values.idle_seconds is None else flag_values.idle_seconds
            watch.run(flag_values.all, idle_seconds)
        print(watch.words())
    return 0
