"""Evaluates the policy of a run on whole, seeded episodes.

  alfish evaluate --root_dir=runs/ppo --num_episodes=100
  alfish evaluate --root_dir=runs/ppo --checkpoint=best --json

The seed of episode k is `seed + k`. Every episode that starts is run to its end, so the result does not depend on
--num_envs. An episode that does not end is cut after Trainer.max_evaluation_length steps (100,000 by default) and
counts as truncated; --max_length sets another limit. --json prints one JSON object with the keys env_steps,
num_episodes, mean, std, ci_low, ci_high (a 95 % bootstrap interval of the mean), min, max, returns, lengths and num_cut
(the number of episodes that were cut).
"""

import json

from absl import flags

from alfish.bin import shared_flags
from alfish.errors import UsageError
from alfish.formatting import counted, significant

FLAGS = flags.FlagValues()
shared_flags.define_episodes(FLAGS, 20)
flags.DEFINE_integer("num_envs", 8, shared_flags.NUM_ENVS, 1, flag_values=FLAGS)
flags.DEFINE_boolean("json", False, "Print one JSON object and nothing else.", flag_values=FLAGS)


def main(flag_values: flags.FlagValues) -> int:
    from alfish.configuration.opening import open_run

    if not flag_values.root_dir:
        raise UsageError("--root_dir is missing: name a run of `alfish train`")
    with open_run(flag_values.root_dir, flag_values.device, flag_values.allow_import) as trainer:
        which = shared_flags.checkpoint(flag_values.checkpoint)
        if not trainer.batches.acts:
            which, _ = trainer.directory.checkpoints.load(which)
        env_steps = trainer.load_policy(which)
        done = f"{env_steps:,} env steps" if trainer.batches.acts else f"{which:,} updates"
        evaluator = trainer.evaluator(flag_values.num_episodes, flag_values.num_envs, flag_values.max_length)
        evaluation = evaluator.evaluate(flag_values.num_episodes, flag_values.seed, flag_values.sample, env_steps)
        evaluator.close()
    summary = evaluation.summary()
    if flag_values.json:
        print(json.dumps(summary))
        return 0
    print(f"checkpoint at {done}, {counted(summary['num_episodes'], 'episode')} from seed {flag_values.seed}")
    shown = {name: significant(summary[name]) for name in ("mean", "ci_low", "ci_high", "std", "min", "max")}
    print(f"return  mean {shown['mean']}  95 % interval [{shown['ci_low']}, {shown['ci_high']}]")
    print(f"        std {shown['std']}  min {shown['min']}  max {shown['max']}")
    for name, returns in evaluation.by_objective.items():
        print(f"        {name}  mean {significant(sum(returns) / len(returns))}")
    cut = f", {counted(evaluation.num_cut, 'episode')} cut" if evaluation.num_cut else ""
    print(f"length  mean {significant(sum(summary['lengths']) / len(summary['lengths']))}{cut}")
    return 0
