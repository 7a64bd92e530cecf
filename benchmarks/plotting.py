"""Seconds of `alfish plot` and `alfish compare` over many runs.

    python -m benchmarks.plotting            # 5 seeds of 3 configurations, and 200 runs of 1 M steps; a minute
    python -m benchmarks.plotting --table    # prints the table of what was measured

The runs are directories as `alfish train` leaves them, written without training: a row of metrics for each 1000 steps,
and an evaluation of 20 episodes for each 10,000. Rows go to docs/results/plotting.csv: seconds by the clock, for which
the machine must be idle, and in CPU time.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from alfish.runs.writers import Counters, CSVWriter
from benchmarks import PROJECT, tables

PATH = PROJECT / "docs" / "results" / "plotting.csv"
FIELDS = ("command", "num_runs", "num_configurations", "num_env_steps", "seconds", "processor_seconds")
SIZES = [(15, 3, 1_000_000), (200, 10, 1_000_000)]  # runs, configurations, env steps of each
COMMANDS = {"plot": ["--output=curves.png"], "compare": ["--threshold=475"]}
NUM_METRICS = 40
CONFIGURATION = """PPO.gamma = {gamma}
make_environment.env_id = 'CartPole-v1'
Trainer.algorithm = @PPO
Trainer.environment = @make_environment
Trainer.seed = {seed}
"""


def write_run(directory: Path, gamma: float, seed: int, num_env_steps: int) -> None:
    """Writes the files of a run that the commands read."""
    (directory / "eval").mkdir(parents=True)
    for name in ("config.gin", "operative_config.gin"):
        (directory / name).write_text(CONFIGURATION.format(gamma=gamma, seed=seed))
    rng = np.random.default_rng([seed, int(1000 * gamma)])
    names = [f"train/metric_{k}" for k in range(NUM_METRICS)]
    writer = CSVWriter(directory / "metrics.csv")
    for clock in range(1000, num_env_steps + 1, 1000):
        counters = clock, clock // 250, clock // 10, clock / 3000
        row = dict(zip(names, rng.normal(size=NUM_METRICS).tolist()))
        if clock % 10_000 == 0:
            returns = np.minimum(500, 600 * clock / num_env_steps + rng.normal(0, 20, 20))
            row |= {"evaluation/mean_return": float(returns.mean()), "evaluation/mean_length": 200.0}
            lines = ["episode,seed,return,length", *(f"{k},{k},{value},200" for k, value in enumerate(returns))]
            (directory / "eval" / f"evaluation-{clock:012d}.csv").write_text("\n".join(lines) + "\n")
        writer.scalars(row, Counters(clock, *counters))
    writer.close()


def measure(num_runs: int, num_configurations: int, num_env_steps: int) -> list[dict[str, Any]]:
    """Returns a row for each command."""
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        for k in range(num_runs):
            seed, configuration = divmod(k, num_configurations)
            write_run(Path(directory) / "runs" / str(k), round(0.9 + 0.005 * configuration, 3), seed, num_env_steps)
        for command, flags in COMMANDS.items():
            before, began = os.times(), time.perf_counter()
            words = [sys.executable, "-m", "alfish", command, "runs/*", *flags]
            subprocess.run(words, cwd=directory, env=os.environ | {"PYTHONPATH": str(PROJECT)}, check=True)
            seconds, after = time.perf_counter() - began, os.times()
            used = after.children_user + after.children_system - before.children_user - before.children_system
            counts = num_runs, num_configurations, num_env_steps
            rows.append(dict(zip(FIELDS, (command, *counts, round(seconds, 1), round(used, 1)))))
    return rows


def table() -> str:
    """Returns the table of the results page: a row for each command and number of runs."""
    columns = ["command", "runs", "configurations", "env steps of each", "seconds", "CPU seconds"]
    lines = [tables.header(columns)]
    for row in tables.read_rows(PATH):
        counts = [row["num_runs"], row["num_configurations"], f"{int(row['num_env_steps']):,}"]
        lines.append(tables.line([f"`alfish {row['command']}`", *counts, row["seconds"], row["processor_seconds"]]))
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="print the table, and measure nothing")
    if not parser.parse_args(arguments).table:
        for size in SIZES:
            tables.replace_rows(PATH, measure(*size), FIELDS, ("command", "num_runs"))
    print(table())
    return 0


if __name__ == "__main__":
    sys.exit(main())
