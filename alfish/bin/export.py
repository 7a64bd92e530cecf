"""Writes the replay buffer of a run as a data set: all experience that it still contains.

  alfish export --root_dir=runs/sac --output=data/replay
  alfish export --root_dir=runs/sac --output=minari:pendulum/replay-v0

A Minari data set needs the extra 'minari': pip install 'alfish[minari]'.

The run must have an off-policy algorithm and ReplayBatches.save = True, the default. The stored rows become episodes in
the environment's own units. The oldest episode of each environment may lack its beginning; an unfinished newest episode
is truncated. The data set stores its origin, as with `alfish record`. An existing output is refused before any work
starts.
"""

from absl import flags

from alfish.bin import shared_flags
from alfish.bin.record import as_json, check_arguments, origin, written

FLAGS = flags.FlagValues()
flags.DEFINE_string("root_dir", None, "Directory of the run.", flag_values=FLAGS)
flags.DEFINE_string("output", None, "Directory to create, or minari:namespace/name-v0.", flag_values=FLAGS)
flags.DEFINE_multi_string("allow_import", [], shared_flags.ALLOW_IMPORT, flag_values=FLAGS)


def main(flag_values: flags.FlagValues) -> int:
    root_dir, output = flag_values.root_dir, flag_values.output
    check_arguments(root_dir, output)
    from alfish.configuration.opening import open_run
    from alfish.offline import SourceReading, Spaces, open_writer
    from alfish.offline.outputs import rebuildable

    with open_run(root_dir, allow_import=flag_values.allow_import) as trainer:
        spaces = Spaces(trainer.environment.observation_space, trainer.environment.action_space)
        env_spec = rebuildable(trainer.environment.env_spec)
        reading = SourceReading([f"run:{root_dir}"], spaces)
        about = origin(trainer, "latest")
    with open_writer(output, spaces, env_spec) as writer:
        for episode in reading:
            writer.add(episode)
        writer.finish(about | {"env_spec": as_json(env_spec), "report": reading.report.as_dict()})
    print(reading.report)
    print(written(output))
    return 0
