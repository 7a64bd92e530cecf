"""Evaluates the policy of a run on whole, seeded episodes.

  alfish evaluate --root_dir=runs/ppo --num_episodes=100
  alfish evaluate --root_dir=runs/ppo --checkpoint=best --json
  alfish evaluate --root_dir=runs/ppo --video --video_episodes=4
  alfish evaluate --root_dir=runs/sac --gin_param="make_environment.env_kwargs = {'g': 5.0}"

The seed of episode k is `seed + k`. Every started episode is finished, so the result does not depend on --num_envs. An
episode that does not end is cut after Trainer.max_evaluation_length steps (100,000 by default) and counts as truncated;
--max_length sets another limit. --json prints one JSON object with the keys env_steps, num_episodes, mean, std, ci_low,
ci_high (a 95 % bootstrap interval of the mean), min, max, returns, lengths and num_cut (the number of episodes that
were cut). With several objectives or policies, the object also has by_objective: the returns of each objective, or the
mean return of each policy's agents, by name. If infos at the ends of episodes have the numbers in
Trainer.evaluation_infos (by default success and is_success), the object also has infos: the numbers of each episode, by
name; --gin_param="Trainer.evaluation_infos = ['*']" reads all numbers. --lineup names the policies of agents in games:
--lineup='adversary_*=chaser,agent_*=random'. --video films the first episode into the run's directory `films`;
--video_episodes=4 films the first four side by side. Films do not change the results. Films need the extra 'video': pip
install 'alfish[video]'. --code=run evaluates with the source code that the listener CodeSnapshot saved in the run.
--gin_param replaces a binding of the run, to evaluate the policy in another environment.
"""

import contextlib
import json
from typing import Any

from absl import flags

from alfish.bin import shared_flags
from alfish.errors import counted, significant

FLAGS = flags.FlagValues()
shared_flags.define_episodes(FLAGS, 20)
shared_flags.define_lineup(FLAGS)
shared_flags.define_code(FLAGS)
flags.DEFINE_integer("num_envs", 8, shared_flags.NUM_ENVS, 1, flag_values=FLAGS)
shared_flags.define_films(FLAGS)
flags.DEFINE_boolean("json", False, "Print one JSON object and nothing else.", flag_values=FLAGS)


def main(flag_values: flags.FlagValues) -> int:
    from alfish.configuration.opening import open_run
    from alfish.training.films import Camera, Recorder

    shared_flags.check_root_dir(flag_values.root_dir)
    num_filmed = shared_flags.num_filmed(flag_values, flag_values.num_episodes)
    if num_filmed:
        shared_flags.check_writable_run(flag_values.root_dir, "--video")
    with open_run(*shared_flags.run(flag_values)) as trainer:
        env_steps = trainer.load_policy(shared_flags.checkpoint(flag_values.checkpoint))
        clock = trainer.clock.value
        done = f"{env_steps:,} env steps" if trainer.batches.acts else f"{clock:,} updates"
        arguments: dict[str, Any] = {"render_mode": "rgb_array"} if num_filmed else {}
        arguments |= shared_flags.lineup(flag_values)
        num_envs = max(flag_values.num_envs, num_filmed)
        evaluator = trainer.evaluator(flag_values.num_episodes, num_envs, flag_values.max_length, **arguments)
        with contextlib.ExitStack() as stack:
            stack.callback(evaluator.close)
            recorder = None
            if num_filmed:
                camera, place = Camera(evaluator.environment, "--video"), trainer.directory.path
                stem = f"checkpoint-{clock:012d}"
                recorder = Recorder.into_run(camera, place, stem, num_filmed, "--video", flag_values.captions)
                stack.enter_context(recorder)
            evaluation = evaluator.evaluate(
                flag_values.num_episodes,
                flag_values.seed,
                flag_values.sample,
                env_steps,
                recorder,
                flag_values.captions,
            )
    summary = evaluation.summary()
    if flag_values.json:
        print(json.dumps(summary))
        return 0
    for film, count in recorder.written if recorder else ():
        print(f"{film}: {count} frames")
    print(f"checkpoint at {done}, {counted(summary['num_episodes'], 'episode')} from seed {flag_values.seed}")
    shown = {name: significant(summary[name]) for name in ("mean", "ci_low", "ci_high", "std", "min", "max")}
    print(f"return  mean {shown['mean']}  95 % interval [{shown['ci_low']}, {shown['ci_high']}]")
    print(f"        std {shown['std']}  min {shown['min']}  max {shown['max']}")
    for name, value in evaluation.means().items():
        print(f"        {name}  mean {significant(value)}")
    for name, words in evaluation.info_words().items():
        print(f"info    {name}  mean {words}")
    cut = f", {counted(evaluation.num_cut, 'episode')} cut" if evaluation.num_cut else ""
    print(f"length  mean {significant(sum(summary['lengths']) / len(summary['lengths']))}{cut}")
    return 0
