"""Seconds until a deterministic evaluation first reaches a threshold, each library with its own tuned recipe.

  python -m benchmarks.time_to_threshold                                            everything: hours
  python -m benchmarks.time_to_threshold --tasks=ppo_cartpole --libraries=alfish,sb3 --seeds=0,1,2,3,4
  python -m benchmarks.time_to_threshold --tasks=ppo_cartpole --libraries=alfish --gin_param=Learner.compile=True
  python -m benchmarks.time_to_threshold --table                                    only the table, from what is there

alfish trains its shipped confs, stable-baselines3 the hyperparameters of RL Baselines3 Zoo (`runs/sb3_threshold.py`).
Libraries take turns seed by seed, each run in a process of its own on one torch thread. The clock runs from the start
of the process, imports and compilation (with an empty cache) included, to the end of the iteration before the
evaluation that reaches the threshold, and stands still during evaluations. These are the same for both: so many
environment steps apart, the same episodes, statistics frozen. A run that spends its recipe's own budget is censored.

Writes `benchmarks/results/time_to_threshold.{csv,md}`, the CSV after every run; runs that are there are not run again.
"""

import argparse
import csv
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.runs.threshold import TASKS
from benchmarks.throughput import _venv

PROJECT = Path(__file__).parent.parent
RESULTS = PROJECT / "benchmarks" / "results"
CSV = RESULTS / "time_to_threshold.csv"
OURS = "alfish"
MEASURES = {"wall_seconds": ".1f", "cpu_seconds": ".1f", "env_steps": ",.0f"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--libraries", default="alfish,sb3")
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--gin_param", action="append", default=[], help="of alfish; its rows are named after it")
    parser.add_argument("--max_env_steps", type=int, help="end runs here: a trial, of which nothing is written")
    parser.add_argument("--again", action="store_true", help="run what is there too")
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    if not arguments.table:
        _run_all(arguments)
    runs = _read()
    if runs and not arguments.max_env_steps:
        text = table(runs)
        print(text)
        if not arguments.table:
            (RESULTS / "time_to_threshold.md").write_text(text)


def _run_all(arguments: argparse.Namespace) -> None:
    names = {library: library for library in arguments.libraries.split(",")}
    if OURS in names:
        names[OURS] = " ".join([OURS, *arguments.gin_param])
    pythons = {library: sys.executable if library == OURS else _venv(library) for library in names}
    for task in arguments.tasks.split(","):
        for seed in map(int, arguments.seeds.split(",")):
            # The other order every other seed, so that what follows what is no advantage.
            for library in reversed(names) if seed % 2 else names:
                key = {"task": task, "library": names[library], "seed": seed}
                there = any(_key(run) == _key(key) for run in _read())
                if there and not (arguments.again or arguments.max_env_steps):
                    continue
                run = key | {"threshold": TASKS[task].threshold} | _run(pythons[library], library, key, arguments)
                how = "reached" if run["reached"] else "not reached"
                print(
                    f"{task} {names[library]} seed {seed}: {how} ({run['mean']:.1f}) in {run['wall_seconds']:.1f} s, "
                    f"{run['cpu_seconds']:.1f} of CPU, {run['env_steps']:,} env steps",
                    flush=True,
                )
                if not arguments.max_env_steps:
                    _write([other for other in _read() if _key(other) != _key(run)] + [run])


def _run(python: str, library: str, key: dict, arguments: argparse.Namespace) -> dict:
    options = [f"--gin_param={binding}" for binding in arguments.gin_param] if library == OURS else []
    if arguments.max_env_steps:
        options.append(f"--max_env_steps={arguments.max_env_steps}")
    command = [python, "-m", f"benchmarks.runs.{library}_threshold", key["task"], str(key["seed"]), *options]
    with tempfile.TemporaryDirectory() as cache:
        # What an earlier run has compiled is not there, as it is not for whoever trains for the first time.
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": cache}
        command.append(f"--started={time.monotonic()}")
        finished = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=PROJECT)
    if finished.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{finished.stderr}")
    return json.loads(finished.stdout.splitlines()[-1])


def _key(run: dict) -> tuple[str, str, int]:
    return run["task"], run["library"], int(run["seed"])


def _read() -> list[dict]:
    rows = list(csv.DictReader(CSV.open())) if CSV.is_file() else []
    numbers = ("threshold", "mean", "wall_seconds", "cpu_seconds", "evaluation_seconds")
    counts = ("seed", "env_steps", "updates")
    return [
        row
        | {"reached": row["reached"] == "True"}
        | {name: float(row[name]) for name in numbers}
        | {name: int(row[name]) for name in counts}
        for row in rows
    ]


def _write(runs: list[dict]) -> None:
    """Puts the file in place whole, so that whenever the command is killed, it keeps what it has."""
    RESULTS.mkdir(exist_ok=True)
    unfinished = CSV.with_suffix(".unfinished")
    tasks = list(TASKS)
    with open(unfinished, "w", newline="") as file:
        writer = csv.DictWriter(file, runs[0])
        writer.writeheader()
        writer.writerows(sorted(runs, key=lambda run: (tasks.index(run["task"]), run["library"], run["seed"])))
    os.replace(unfinished, CSV)


def table(runs: list[dict]) -> str:
    lines = [
        f"{platform.machine()}, {os.cpu_count()} cores, one torch thread; medians over seeds, to the first evaluation "
        "that reaches the threshold, without the time of evaluations; ratio of medians over alfish's, 95 % bootstrap "
        "interval over seeds. A run that never reaches it counts as endless: `>` marks a median of such runs, of which "
        "the figure is when they ended.",
        "",
        "| task | library | reached | wall seconds | CPU seconds | env steps | wall / alfish's | CPU / alfish's |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for task in dict.fromkeys(run["task"] for run in runs):
        of_task = [run for run in runs if run["task"] == task]
        base = [run for run in of_task if run["library"] == OURS]
        for library in dict.fromkeys(run["library"] for run in of_task):
            own = [run for run in of_task if run["library"] == library]
            cells = [
                f"{task}, {own[0]['threshold']:g}",
                _label(library, own),
                f"{sum(run['reached'] for run in own)} of {len(own)}",
            ]
            cells += [_median(own, name, form) for name, form in MEASURES.items()]
            compared = base and library != OURS
            cells += [_ratio(own, base, name) if compared else "" for name in ("wall_seconds", "cpu_seconds")]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _label(library: str, runs: list[dict]) -> str:
    """The versions, and what of the configuration was changed."""
    versions = " and ".join(dict.fromkeys(run["versions"] for run in runs))
    changes = library.split()[1:]
    return f"{versions} ({' '.join(changes)})" if changes else versions


def _values(runs: list[dict], name: str) -> np.ndarray:
    return np.array([run[name] if run["reached"] else math.inf for run in runs])


def _at_least(runs: list[dict], name: str) -> tuple[float, str]:
    """The median, or what it is more than."""
    censored = math.isinf(np.median(_values(runs, name)))
    return float(np.median([run[name] for run in runs])), ">" if censored else ""


def _median(runs: list[dict], name: str, form: str) -> str:
    median, more = _at_least(runs, name)
    return f"{more}{median:{form}}"


def _ratio(theirs: list[dict], ours: list[dict], name: str) -> str:
    """Of medians; where one is endless, a bound."""
    (above, their_more), (below, our_more) = _at_least(theirs, name), _at_least(ours, name)
    if their_more and our_more:
        return "not known"
    generator = np.random.default_rng(0)
    draws = [np.median(generator.choice(_values(runs, name), (10_000, len(runs))), axis=1) for runs in (theirs, ours)]
    with np.errstate(invalid="ignore"):
        ratios = draws[0] / draws[1]
    # Endless by endless may be anything. No interpolation: between a number and infinity there is nothing.
    low = np.percentile(np.nan_to_num(ratios, nan=0.0, posinf=math.inf), 2.5, method="inverted_cdf")
    high = np.percentile(np.nan_to_num(ratios, nan=math.inf, posinf=math.inf), 97.5, method="inverted_cdf")
    sign = ">" if their_more else "<" if our_more else ""
    return f"{sign}{above / below:.2f}x [{low:.2f}, {high:.2f}]"


if __name__ == "__main__":
    main()
