"""Reads data in another format, prints a report, and writes a data set of alfish.

  alfish import --source=minari:mujoco/hopper/expert-v0 --output=data/hopper
  alfish import --source=d4rl:hopper_medium-v2.hdf5 --env_id=Hopper-v5 --output=data/hopper --policy=drop_episode

Sources, as scheme:place, repeatable:

  alfish:DIR      a data set that this command wrote
  minari:NAME     a Minari data set on this machine             pip install 'alfish[minari]'
  d4rl:FILE       D4RL's HDF5                                   pip install 'alfish[hdf5]'
  npz:FILE        named numpy arrays
  sb3:FILE        Stable-Baselines3's save_replay_buffer
  d3rlpy:FILE     d3rlpy's HDF5                                 pip install 'alfish[hdf5]'
  lerobot:DIR     LeRobot's parquet                             pip install 'alfish[arrow]'
  ogbench:FILE    OGBench's .npz, as it was downloaded
  alf:FILE        the replay buffer in a checkpoint of ALF
  run:DIR         the replay buffer of a run of `alfish train`

If a format does not record whether an episode terminated or timed out, specify it: --source='sb3:FILE?dones=terminated'
or dones=truncated; the same holds for lerobot:.

The report has the ids of faulty episodes, and corrections, ranges and returns. Nothing is written without --output.
OfflineBuffer.sources = ['alfish:DIR'] reads the written data set; docs/offline.md explains more.
"""

import re

from absl import flags

from alfish.bin import shared_flags
from alfish.errors import UsageError

FLAGS = flags.FlagValues()
flags.DEFINE_multi_string("source", [], "Location of the data, as scheme:path; repeatable.", flag_values=FLAGS)
flags.DEFINE_string("output", None, "Directory to create; without it nothing is written.", flag_values=FLAGS)
flags.DEFINE_string("env_id", None, "Environment whose spaces the data must match.", flag_values=FLAGS)
shared_flags.define_env_kwargs(FLAGS)
flags.DEFINE_enum(
    "policy",
    "raise",
    ["raise", "drop_episode", "warn"],
    "How to treat episodes with errors: raise, drop_episode, or warn (use the valid part).",
    flag_values=FLAGS,
)


def main(flag_values: flags.FlagValues) -> int:
    if not flag_values.source:
        raise UsageError("--source is missing: give the data to read, as in --source=npz:mine.npz")
    if re.match(r"\w\w+:", flag_values.output or ""):
        raise UsageError(f"--output={flag_values.output} begins with a scheme; give only the path of a directory")
    from alfish.offline import DataSetWriter, SourceReading
    from alfish.offline.recorded_spaces import NO_SPACES, spaces_of

    env_kwargs = shared_flags.env_kwargs(flag_values)
    if env_kwargs and not flag_values.env_id:
        raise UsageError("--env_kwargs needs --env_id, the environment that takes the arguments")
    environment, reward = spaces_of(flag_values.env_id, env_kwargs) if flag_values.env_id else (NO_SPACES, None)
    reading = SourceReading(flag_values.source, environment, reward, flag_values.policy)
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
        if reading.spaces == NO_SPACES:
            print(
                "the data declare no spaces; training uses the spaces of its environment, and --env_id checks the data "
                "against an environment now"
            )
        print(f"written to {flag_values.output}; read it with OfflineBuffer.sources = ['alfish:{flag_values.output}']")
    return 0
