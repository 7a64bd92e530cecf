"""What PPO and SAC reach if a truncated episode bootstraps from one or another observation, or from none.

  python -m benchmarks.time_limits                                   # what is missing: a quarter of an hour on one core
  python -m benchmarks.time_limits --seeds=0 --algorithms=ppo        # some runs
  python -m benchmarks.time_limits --table                           # only the table and the picture

Pendulum has no terminal state. The runs train in episodes that are truncated after 50 steps, and evaluations have
the task's usual 200 steps. The rules differ in the LAST row of a truncated episode only:

- final: its true final observation, as everywhere in alfish;
- previous: the observation of the row before, from which the last action was chosen (rsl_rl);
- reset: the first observation of the next episode, which is all that an environment that resets in the same step
  returns if it keeps no final observation (FastTD3 and FlashSAC on Isaac Lab);
- none: discount 0, as if the episode had terminated.

`Truncating` writes that row; the algorithms are alfish's own, with the shipped confs of Pendulum but for the number of
environments and steps. Runs whose rows are in `docs/results/time_limits.csv` are not repeated, and a run that was
interrupted continues. Writes the CSV, `docs/pictures/time_limits.png`, and prints the table of docs/results.md.
"""

import argparse
import functools
import time
from collections.abc import Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch

import alfish
from alfish.analysis import statistics
from alfish.data import TimeStep
from alfish.environments import Environment, make_environment
from alfish.environments.functional import FunctionalEnvironment, Pendulum
from alfish.environments.make import spawn_seeds
from alfish.nest import Nest
from benchmarks import PROJECT, tables

CSV = PROJECT / "docs" / "results" / "time_limits.csv"
PICTURE = PROJECT / "docs" / "pictures" / "time_limits.png"
KEY = ("algorithm", "rule", "seed", "env_steps")
FIELDS = (*KEY, "mean_return", "cpu_seconds")
LIMIT = 50  # steps of a training episode
RULES = {
    "final": "value of the final observation (alfish)",
    "previous": "value of the row before",
    "reset": "value of the reset observation",
    "none": "none: truncation ends the return",
}
# What differs from the shipped confs of Pendulum.
SETTINGS: dict[str, dict[str, Any]] = {
    "ppo": {
        "num_env_steps": 100_000,
        "unroll_length": 32,
        "EpochBatches.minibatch_size": 128,
        "Evaluate.period": 10_000,
    },
    "sac": {"num_env_steps": 8000, "Evaluate.period": 500},
}
COMMON = {"Learner.compile": True, "Evaluate.num_episodes": 10, "Evaluate.num_envs": 10}
NUM_ENVS = {"ppo": 64, "sac": 4}


class ShortPendulum(Pendulum):
    """Pendulum whose episodes are truncated after 50 steps."""

    max_episode_steps = LIMIT


class Truncating(FunctionalEnvironment):
    """Environments whose truncated episodes end in a row that is written by a rule.

    Args:
      rule: name of the rule, one of `RULES`.
      seeds: one seed per environment.
    """

    def __init__(self, rule: str, seeds: Sequence[int]):
        super().__init__(ShortPendulum(), seeds)
        self._rule = rule

    def advanced(
        self, tensors: Nest, episodes: Nest, action: Nest, u: torch.Tensor
    ) -> tuple[Nest, TimeStep, torch.Tensor, TimeStep]:
        seen = episodes[2]
        episodes, last, ended, first = super().advanced(tensors, episodes, action, u)
        if self._rule == "none":
            last = last._replace(discount=last.discount.masked_fill(ended, 0))
        elif self._rule != "final":
            other = seen if self._rule == "previous" else first.observation
            last = last._replace(observation=torch.where(ended[:, None], other, last.observation))
        return episodes, last, ended, first


def environment(rule: str, num_envs: int, seed: int = 0, **ignored: Any) -> Environment:
    """Returns environments for training."""
    return Truncating(rule, spawn_seeds(seed, num_envs))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--algorithms", default="ppo,sac")
    parser.add_argument("--root", default="runs/time_limits")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args(arguments)
    if not options.table:
        for seed in options.seeds.split(","):
            for algorithm in options.algorithms.split(","):
                for rule in RULES:
                    measure(algorithm, rule, seed, options.root)
    rows = tables.read_rows(CSV)
    draw(rows)
    print(table(rows))


def measure(algorithm: str, rule: str, seed: str, root: str) -> None:
    """Trains a run, unless its rows are there, and writes a row for each of its evaluations."""
    own = (algorithm, rule, seed)
    if any(tuple(row[name] for name in KEY[:3]) == own for row in tables.read_rows(CSV)):
        return
    directory, began = PROJECT / root / "-".join(own), time.process_time()
    alfish.train(
        conf=f"{algorithm}_pendulum",
        environment="alfish/Pendulum-v1",
        root_dir=directory,
        seed=int(seed),
        **COMMON
        | SETTINGS[algorithm]
        | {
            "Trainer.environment": functools.partial(environment, rule, num_envs=NUM_ENVS[algorithm]),
            "Trainer.evaluation_environment": make_environment,
        },
    )
    seconds = round(time.process_time() - began, 1)
    rows = []
    for path in sorted((directory / "eval").glob("evaluation-*.csv")):
        returns = [float(episode["return"]) for episode in tables.read_rows(path)]
        env_steps = int(path.stem.removeprefix("evaluation-"))
        rows.append(dict(zip(FIELDS, (*own, env_steps, round(float(np.mean(returns)), 2), seconds))))
    tables.replace_rows(CSV, rows, FIELDS, KEY, order=lambda row: [str(row[name]) for name in KEY[:3]])
    print(rows[-1], flush=True)


def curves(rows: Sequence[dict[str, str]], algorithm: str, rule: str) -> tuple[list[int], np.ndarray]:
    """Returns the steps of the evaluations, N of them, and the mean returns `[R, N]` of R seeds."""
    own = [row for row in rows if (row["algorithm"], row["rule"]) == (algorithm, rule)]
    steps = sorted({int(row["env_steps"]) for row in own})
    found = {(row["seed"], int(row["env_steps"])): float(row["mean_return"]) for row in own}
    seeds = sorted({row["seed"] for row in own}, key=int)
    return steps, np.array([[found[seed, step] for step in steps] for seed in seeds])


def table(rows: Sequence[dict[str, str]]) -> str:
    """Returns a Markdown table: means over the seeds with 95 % bootstrap intervals."""
    columns = ["algorithm", "bootstrap", "seeds", "last evaluation", "mean of all evaluations", "each seed, last"]
    lines = [tables.header(columns)]
    for algorithm in SETTINGS:
        for rule, words in RULES.items():
            returns = curves(rows, algorithm, rule)[1]
            if len(returns):
                last, average = (_interval(scores) for scores in (returns[:, -1], returns.mean(1)))
                each = ", ".join(f"{value:.0f}" for value in returns[:, -1])
                lines.append(tables.line([algorithm.upper(), words, len(returns), last, average, each]))
    return "\n".join(lines)


def draw(rows: Sequence[dict[str, str]]) -> None:
    """Draws the mean return over the seeds, and its 95 % bootstrap interval, against environment steps."""
    figure, axes = plt.subplots(1, len(SETTINGS), figsize=(9, 3.4), layout="constrained", sharey=True)
    for axis, algorithm in zip(axes, SETTINGS):
        for rule, words in RULES.items():
            steps, returns = curves(rows, algorithm, rule)
            if not len(returns):
                continue
            thousands = [step / 1000 for step in steps]
            (line,) = axis.plot(thousands, returns.mean(0), linewidth=1.5, label=words)
            if len(returns) > 1:
                axis.fill_between(
                    thousands, *statistics.band(returns, statistics.mean), color=line.get_color(), alpha=0.2
                )
        axis.set_title(f"Pendulum, {algorithm.upper()}, trained in episodes of {LIMIT} steps", fontsize=10)
        axis.set_xlabel("thousand environment steps")
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    axes[0].set_ylabel("mean return of 10 episodes of 200 steps", fontsize=9)
    axes[-1].legend(frameon=False, fontsize=8, loc="lower right")
    figure.savefig(PICTURE, dpi=110)
    plt.close(figure)


def _interval(scores: np.ndarray) -> str:
    value, interval = statistics.estimate(scores[:, None], statistics.mean)
    return f"{value:.1f}" if interval is None else f"{value:.1f} [{interval[0]:.1f}, {interval[1]:.1f}]"


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
