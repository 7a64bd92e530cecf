"""Reads data made elsewhere, says what is in them, and writes them as alfish's own data set.

  alfish import --source=minari:mujoco/hopper/expert-v0 --output=data/hopper
  alfish import --source=d4rl:hopper_medium-v2.hdf5 --env_id=Hopper-v5 --output=data/hopper --policy=drop_episode

Sources, as scheme:where, repeatable:

  alfish:DIR      what this command wrote
  minari:NAME     a Minari data set on this machine             pip install 'alfish[minari]'
  d4rl:FILE       D4RL's HDF5                                   pip install 'alfish[hdf5]'
  npz:FILE        named numpy arrays
  sb3:FILE        Stable-Baselines3's save_replay_buffer
  d3rlpy:FILE     d3rlpy's HDF5                                 pip install 'alfish[hdf5]'
  lerobot:DIR     LeRobot's parquet                             pip install 'alfish[arrow]'
  alf:FILE        the replay buffer in a checkpoint of ALF
  run:DIR         what a run of `alfish train` keeps in replay/

The report says what was found: episodes with errors by their ids, what was mended, ranges, returns. Without --output,
nothing is written. OfflineBuffer.sources = ['alfish:DIR'] reads the result; docs/offline.md tells more.
"""

from absl import flags

from alfish.errors import UsageError

FLAGS = flags.FlagValues()
flags.DEFINE_multi_string("source", [], "Where the data are, as scheme:where; repeatable.", flag_values=FLAGS)
flags.DEFINE_string("output", None, "Directory to make; None writes nothing.", flag_values=FLAGS)
flags.DEFINE_string("env_id", None, "Environment that the data must fit, and whose spaces count.", flag_values=FLAGS)
flags.DEFINE_enum(
    "policy",
    "raise",
    ["raise", "drop_episode", "warn"],
    "What to do with episodes that are not right: raise, drop_episode, or warn (use what can be used).",
    flag_values=FLAGS,
)


def main(flag_values: flags.FlagValues) -> int:
    if not flag_values.source:
        raise UsageError("--source is missing: name data to read, as in --source=npz:mine.npz")
    from alfish.offline import DataSetWriter, Reading
    from alfish.offline.spaces import NO_SPACES, spaces_of

    environment = spaces_of(flag_values.env_id) if flag_values.env_id else NO_SPACES
    reading = Reading(flag_values.source, environment, flag_values.policy)
    try:
        if flag_values.output is None:
            for _ in reading:
                pass
        else:
            with DataSetWriter(flag_values.output, reading.spaces) as writer:
                for episode in reading:
                    writer.add(episode)
                about = {"sources": list(flag_values.source), "env_id": flag_values.env_id}
                about["report"] = reading.report.as_dict()
                writer.finish(about)
    finally:
        if reading.report.num_read:
            print(reading.report)
    if flag_values.output is not None:
        print(f"written to {flag_values.output}; read it with OfflineBuffer.sources = ['alfish:{flag_values.output}']")
    return 0
