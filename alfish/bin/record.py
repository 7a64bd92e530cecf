"""Records whole episodes of a run's policy as a data set.

  alfish record --root_dir=runs/sac --num_episodes=100 --output=data/pendulum
  alfish record --root_dir=runs/sac --num_episodes=100 --output=minari:pendulum/expert-v0
  alfish record --root_dir=runs/sac --output=data/good --sample --min_return=-200

A Minari data set needs the extra 'minari': pip install 'alfish[minari]'.

The seed of episode k is `seed + k`, by default far from the seeds of evaluations. Every started episode is finished, so
the data do not depend on --num_envs. Observations are raw, and include the true final observation. Actions are stored
as executed, in the environment's units. If an environment is reset with the seed of an episode and executes its
actions, it returns the same observations and rewards.

The data set stores its origin: the algorithm, the configuration with every default, the checkpoint (steps and sha256),
the seed of each episode, and the mean, minimum and maximum return of all episodes that were run. An existing output is
refused before any work starts. docs/offline.md explains more.
"""

import contextlib
import json
import math
from typing import TYPE_CHECKING, Any

from absl import flags

import alfish
from alfish.bin import shared_flags
from alfish.configuration import reading
from alfish.errors import RunError, UsageError, counted
from alfish.runs.files import sha256

if TYPE_CHECKING:
    from gymnasium.envs.registration import EnvSpec

    from alfish.offline import Validator
    from alfish.training.evaluator import Evaluator
    from alfish.training.trainer import Trainer

FLAGS = flags.FlagValues()
# Evaluations begin with seed 0, and a policy that learns from recorded episodes should be evaluated in others.
shared_flags.define_episodes(FLAGS, 100, seed=1_000_000)
flags.DEFINE_string("output", None, "Directory to create, or minari:namespace/name-v0.", flag_values=FLAGS)
flags.DEFINE_integer("num_envs", 8, shared_flags.NUM_ENVS, 1, flag_values=FLAGS)
flags.DEFINE_float("min_return", None, "Write only episodes with at least this return.", flag_values=FLAGS)


def main(flag_values: flags.FlagValues) -> int:
    check_arguments(flag_values.root_dir, flag_values.output)
    which = shared_flags.checkpoint(flag_values.checkpoint)
    num_episodes, least = flag_values.num_episodes, flag_values.min_return
    from alfish.configuration.opening import open_run
    from alfish.offline import DataReport, Spaces, Validator, open_writer
    from alfish.offline.outputs import rebuildable

    with open_run(*shared_flags.run(flag_values)) as trainer:
        about = origin(trainer, which)
        env_steps = trainer.load_policy(about["checkpoint"]["steps"])
        with contextlib.closing(
            trainer.evaluator(num_episodes, flag_values.num_envs, flag_values.max_length)
        ) as evaluator:
            environment = evaluator.environment
            if not hasattr(environment, "observation_space"):
                raise UsageError(
                    f"{environment.name} is a game of several policies, and episodes of such games cannot be recorded; "
                    "record a run of one policy"
                )
            spaces = Spaces(environment.observation_space, environment.action_space)
            env_spec = rebuildable(environment.env_spec)
            report = DataReport(f"{flag_values.root_dir} at {env_steps:,} env steps")
            validator = Validator(spaces, report=report)
            with open_writer(flag_values.output, spaces, env_spec) as writer:
                returns, seeds = _record(evaluator, validator, writer, flag_values)
                validator.finish()
                about |= {
                    "env_spec": as_json(env_spec),
                    "seed": flag_values.seed,
                    "seeds": seeds if environment.seeds_rows else None,  # None if one seed resets all environments
                    "sample": flag_values.sample,
                    "min_return": least,
                    "num_cut": evaluator.num_cut,
                    "reference_scores": {
                        "num_episodes": num_episodes,
                        "mean": math.fsum(returns) / num_episodes,
                        "min": min(returns),
                        "max": max(returns),
                    },
                    "report": report.as_dict(),
                }
                writer.finish(about)
    print(report)
    left_out = f"; {num_episodes - len(seeds):,} returned less than {least:g}" if least is not None else ""
    print(f"{counted(num_episodes, 'episode')} run from seed {flag_values.seed}, {len(seeds):,} written{left_out}")
    print(written(flag_values.output))
    return 0


def _record(
    evaluator: "Evaluator", validator: "Validator", writer: Any, flag_values: flags.FlagValues
) -> tuple[list[float], list[int]]:
    """Runs all episodes, and writes the episodes with a sufficient return.

    Returns the returns of all episodes, and the seeds of the written episodes.
    """
    least, report = flag_values.min_return, validator.report
    returns: list[float] = []
    seeds: list[int] = []
    for episode in evaluator.test_episodes(flag_values.num_episodes, flag_values.seed, flag_values.sample):
        returns.append(float(evaluator.scalarized(episode.rewards).sum(dtype="float64")))
        if least is not None and returns[-1] < least:
            continue
        for _ in validator.check(episode):
            writer.add(episode)  # written with the executed actions, without corrections
            seeds.append(flag_values.seed + int(episode.id))
        if report.num_bad:
            raise RunError(f"{report.sentences('error')}; fix the environment; nothing was written")
    if not seeds:
        raise UsageError(
            f"none of {len(returns):,} episodes returned --min_return={least:g} or more, the best returned "
            f"{max(returns):g}; nothing was written"
        )
    return returns, seeds


def check_arguments(root_dir: str | None, output: str | None) -> None:
    """Raises UsageError if the run or the output is missing, or if the output already exists."""
    shared_flags.check_root_dir(root_dir)
    if not output:
        raise UsageError(
            "--output is missing: give a directory to create, or a data set such as minari:namespace/name-v0"
        )
    from alfish.offline import open_writer

    open_writer(output)


def origin(trainer: "Trainer", which: str | int) -> dict[str, Any]:
    """Returns what a data set stores about the run that made it, as values that JSON can hold.

    Args:
      trainer: trainer of the run.
      which: name of the run's checkpoint: 'latest', 'best' or a number of steps.

    Raises:
      UsageError: the checkpoint does not exist, or its file does not hold a checkpoint.
    """
    described: dict[str, Any] = {}

    def describe(state: dict[str, Any]) -> None:
        config, env_steps = state["config"].get(reading.OPERATIVE_FILE), state["counters"]["env_steps"]
        if not isinstance(config, str | None) or not isinstance(env_steps, int):
            raise TypeError("its configuration is not text, or its number of environment steps is not an integer")
        described.update(config=config, env_steps=env_steps)

    steps, _ = trainer.directory.checkpoints.load(which, describe)
    path = trainer.directory.path / "checkpoints" / f"checkpoint-{steps:012d}.pt"
    return {
        "alfish_version": alfish.__version__,
        "algorithm": type(trainer.algorithm).__name__,
        "config": described["config"],
        "checkpoint": {"steps": steps, "env_steps": described["env_steps"], "sha256": sha256(path)},
    }


def as_json(env_spec: "EnvSpec | None") -> Any:
    return None if env_spec is None else json.loads(env_spec.to_json())


def written(output: str) -> str:
    source = output if output.startswith("minari:") else f"alfish:{output}"
    return f"written to {output}; read it with OfflineBuffer.sources = ['{source}']"
