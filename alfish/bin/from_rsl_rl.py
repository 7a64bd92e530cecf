"""Converts a runner configuration of rsl_rl to a gin file, setting by setting.

  alfish from-rsl-rl Isaac-Velocity-Flat-G1-v0 > g1.gin
  alfish from-rsl-rl agent.yaml --task=Isaac-Velocity-Flat-G1-v0 > g1.gin
  alfish from-rsl-rl agent.yaml --environment=Mjlab --task=Mjlab-Velocity-Flat-Unitree-G1 > g1.gin
  alfish from-rsl-rl runner.json --environment=RslRl --num_envs=1024 > robot.gin
  alfish train --gin_file=g1.gin --root_dir=runs/g1

If the argument is the name of a task, the command reads the task's configuration from Isaac Lab or mjlab, which must be
installed. Both libraries write agent.yaml to logs/rsl_rl/EXPERIMENT/RUN/params; reading yaml requires
`pip install pyyaml`. Fields without a counterpart in alfish are listed at the end, each in a comment with the reason.
"""

from absl import flags

from alfish.bin import show
from alfish.errors import UsageError

FLAGS = flags.FlagValues()
TAKES_WORDS = True
flags.DEFINE_string("task", None, "Name of the task in the simulator.", flag_values=FLAGS)
flags.DEFINE_integer("num_envs", 4096, "Number of environments, which the task sets in rsl_rl.", 1, flag_values=FLAGS)
flags.DEFINE_enum(
    "environment", "IsaacLab", ["IsaacLab", "Mjlab", "RslRl"], "Adapter of the simulator.", flag_values=FLAGS
)


def main(flag_values: flags.FlagValues, *words: str) -> int:
    from alfish.simulators import recipe

    if len(words) != 1:
        raise UsageError("takes one file, such as logs/rsl_rl/g1/RUN/params/agent.yaml, or one name of a task")
    is_file = words[0].endswith((".yaml", ".yml", ".json"))
    runner = recipe.read(words[0]) if is_file else recipe.of_task(words[0], flag_values.environment)
    task = flag_values.task if is_file else words[0]
    show(recipe.gin_file(runner, flag_values.num_envs, task, flag_values.environment).rstrip())
    return 0
