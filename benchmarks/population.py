"""Population-based training against fixed settings: the learning rate of PPO on Pendulum.

  python -m benchmarks.population                three repetitions
  python -m benchmarks.population --seeds=0      one of them
  python -m benchmarks.population --table        only the table

In each repetition 8 members train with `alfish population`, and 8 others begin with the same learning rates and keep
them (`--share=0`). Their last checkpoints are evaluated on 100 episodes. Of the population, only the best member
counts: the one that `best` names, by its own evaluations during training. Writes `docs/results/population.csv`, one row
for each policy, and prints the table for `docs/results.md`. Runs are kept under --root, and what is finished is not
repeated.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np

from benchmarks import PROJECT, processes, tables

RESULTS = PROJECT / "docs" / "results" / "population.csv"
SEEDS = (0, 100, 200)  # of the first members
MEMBERS, GENERATIONS, STEPS = 8, 6, 6144
NUM_EPISODES = 100
RATE = "Learner.learning_rate"
SETTINGS = (
    f"--perturb={RATE}=1e-5..1e-1",
    f"--members={MEMBERS}",
    "--gin_file=ppo_pendulum.gin",
    f"--gin_param=Trainer.num_env_steps={GENERATIONS * STEPS}",
    "--gin_param=Trainer.unroll_length=128",
    "--gin_param=Learner.compile=False",
    f"--gin_param=Evaluate.period={STEPS}",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default=",".join(map(str, SEEDS)))
    parser.add_argument("--root", default="runs/population")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    if not arguments.table:
        for seed in map(int, arguments.seeds.split(",")):
            run(seed, PROJECT / arguments.root / f"seed{seed}", arguments.jobs)
    print(table())


def run(seed: int, root: Path, jobs: int) -> None:
    """Trains a repetition if needed, evaluates its policies, and writes its rows into the CSV file."""
    settings = [*SETTINGS, f"--gin_param=Trainer.seed={seed}", f"--jobs={jobs}"]
    population, fixed = root / "population", root / "fixed"
    processes.alfish("population", *settings, f"--generations={GENERATIONS}", f"--root_dir={population}")
    processes.alfish("population", *settings, "--generations=1", "--share=0", f"--root_dir={fixed}")
    rows = [row(seed, "population", population / "best")]
    rows += [row(seed, f"fixed {member}", fixed / "g000" / f"m{member}") for member in range(MEMBERS)]
    tables.replace_rows(RESULTS, rows, rows[0], ["seed"], lambda row: (int(row["seed"]), row["policy"]))
    means = [f"{one['mean']:.1f}" for one in rows]
    print(f"seed {seed}: {means[0]}, fixed: {', '.join(means[1:])}", flush=True)


def row(seed: int, policy: str, directory: Path) -> dict:
    """Returns the row of a policy: its learning rate at the end, and its evaluation."""
    evaluate = ["evaluate", f"--root_dir={directory}", f"--num_episodes={NUM_EPISODES}", "--json"]
    result = processes.run_script([sys.executable, "-m", "alfish", *evaluate], processes.with_threads(1))
    rate = json.loads((directory / "member.json").read_text())["bindings"][RATE]
    numbers = {name: result[name] for name in ("env_steps", "num_episodes", "mean", "ci_low", "ci_high")}
    return {"seed": seed, "policy": policy, "learning_rate": rate, **numbers}


def table() -> str:
    """Returns the Markdown table of the CSV file."""
    lines = [
        tables.header(["seed", "best of the population", "fixed: median", "fixed: best", "better than the median"])
    ]
    rows = tables.read_rows(RESULTS)
    for seed in sorted({int(row["seed"]) for row in rows}):
        means = {row["policy"]: float(row["mean"]) for row in rows if int(row["seed"]) == seed}
        best = means.pop("population")
        median = float(np.median(list(means.values())))
        better = "yes" if best > median else "no"
        lines.append(tables.line([str(seed), f"{best:.1f}", f"{median:.1f}", f"{max(means.values()):.1f}", better]))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
