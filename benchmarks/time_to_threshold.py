"""Seconds until a deterministic evaluation first reaches a threshold, each library with its own tuned recipe.

  python -m benchmarks.time_to_threshold                                            everything: hours
  python -m benchmarks.time_to_threshold --tasks=ppo_cartpole --libraries=alfish,sb3 --seeds=0,1,2,3,4
  python -m benchmarks.time_to_threshold --tasks=ppo_cartpole --libraries=alfish --gin_param=Learner.compile=True
  python -m benchmarks.time_to_threshold --table                                    only the table, from existing runs

alfish trains its shipped confs; stable-baselines3 uses the hyperparameters of RL Baselines3 Zoo
(`runs/sb3_run.py`). Libraries take turns seed by seed, each run in its own process on one torch thread. The time
begins with the process, so it includes imports and compilation (with an empty cache). It ends with the last iteration
before the evaluation that reaches the threshold, and stops during evaluations, while alfish's compiler works on.
Evaluations are equal for both: the same
period in environment steps, the same episodes, statistics frozen. A run that spends its recipe's budget is censored.

Writes `benchmarks/results/time_to_threshold.{csv,md}`, the CSV after every run; existing runs are not repeated.
"""

import argparse
import datetime
import math
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from benchmarks import RESULTS, processes, tables
from benchmarks.runs.threshold import TASKS

CSV = RESULTS / "time_to_threshold.csv"
OURS = "alfish"
KEY = ("task", "library", "seed")
NUMBERS = ("threshold", "mean", "wall_seconds", "cpu_seconds", "evaluation_seconds")
COUNTS = ("seed", "env_steps", "updates")
FIELDS = (
    *KEY, "threshold", "reached", "mean", "wall_seconds", "cpu_seconds", "env_steps", "updates", "evaluation_seconds",
    "versions", "machine", "date",
)  # fmt: skip
MEASURES = {"wall_seconds": ".1f", "cpu_seconds": ".1f", "env_steps": ",.0f"}
HEADINGS = [
    "task", "library", "reached", "wall seconds", "CPU seconds", "env steps", "wall / alfish's", "CPU / alfish's"
]  # fmt: skip


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
    runs = read()
    if runs and not arguments.max_env_steps:
        text = table(runs)
        print(text)
        if not arguments.table:
            tables.write_text(CSV.with_suffix(".md"), text)


def _run_all(arguments: argparse.Namespace) -> None:
    names = {library: library for library in arguments.libraries.split(",")}
    if OURS in names:
        names[OURS] = " ".join([OURS, *arguments.gin_param])
    pythons = {library: sys.executable if library == OURS else processes.peer_python(library) for library in names}
    for task in arguments.tasks.split(","):
        for seed in map(int, arguments.seeds.split(",")):
            # The other order every other seed, so that what follows what is no advantage.
            for library in reversed(names) if seed % 2 else names:
                key = {"task": task, "library": names[library], "seed": seed}
                there = any(_key(run) == _key(key) for run in read())
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
                    tables.replace_rows(CSV, [run], FIELDS, KEY, _order)


def _run(python: str, library: str, key: dict, arguments: argparse.Namespace) -> dict:
    options = [f"--gin_param={binding}" for binding in arguments.gin_param] if library == OURS else []
    if arguments.max_env_steps:
        options.append(f"--max_env_steps={arguments.max_env_steps}")
    command = processes.side(python, library, "threshold", key["task"], key["seed"], *options)
    with tempfile.TemporaryDirectory() as cache:
        # What an earlier run has compiled is not there, as it is not for whoever trains for the first time.
        environment = processes.with_threads(1) | {"TORCHINDUCTOR_CACHE_DIR": cache}
        result = processes.run_script([*command, f"--started={time.monotonic()}"], environment)
    return result | {"machine": processes.machine(), "date": datetime.date.today().isoformat()}


def _key(run: dict) -> tuple[str, ...]:
    return tuple(str(run[name]) for name in KEY)


def _order(run: Mapping[str, Any]) -> tuple[int, str, int]:
    return list(TASKS).index(run["task"]), run["library"], int(run["seed"])


def read() -> list[dict[str, Any]]:
    """Returns the measured runs, with their numbers."""
    return [
        row
        | {"reached": row["reached"] == "True"}
        | {name: float(row[name]) for name in NUMBERS}
        | {name: int(row[name]) for name in COUNTS}
        for row in tables.read_rows(CSV)
    ]


def table(runs: list[dict]) -> str:
    """Returns a Markdown table of medians and ratios, one line for each task and library."""
    machines = "; ".join(dict.fromkeys(run["machine"] for run in runs))
    lines = [
        f"{machines}, one torch thread; medians over seeds, to the first evaluation "
        "that reaches the threshold, without the time of evaluations; ratio of medians over alfish's, 95 % bootstrap "
        "interval over seeds. A run that never reaches it counts as endless: `>` marks a median of such runs, of which "
        "the figure is when they ended.",
        "",
        tables.header(HEADINGS),
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
            lines.append(tables.line(cells))
    return "\n".join(lines) + "\n"


def _label(library: str, runs: list[dict]) -> str:
    """Returns the versions, and changes of the configuration."""
    versions = " and ".join(dict.fromkeys(run["versions"] for run in runs))
    changes = library.split()[1:]
    return f"{versions} ({' '.join(changes)})" if changes else versions


def _values(runs: list[dict], name: str) -> np.ndarray:
    return np.array([run[name] if run["reached"] else math.inf for run in runs])


def _at_least(runs: list[dict], name: str) -> tuple[float, str]:
    """Returns the median, or a lower bound of it."""
    censored = math.isinf(np.median(_values(runs, name)))
    return float(np.median([run[name] for run in runs])), ">" if censored else ""


def _median(runs: list[dict], name: str, form: str) -> str:
    median, more = _at_least(runs, name)
    return f"{more}{median:{form}}"


def _ratio(theirs: list[dict], ours: list[dict], name: str) -> str:
    """Returns the ratio of two medians; a bound if one of them is infinite."""
    (above, their_more), (below, our_more) = _at_least(theirs, name), _at_least(ours, name)
    if their_more and our_more:
        return "not known"
    sign = ">" if their_more else "<" if our_more else ""
    return sign + tables.times(above / below, _values(theirs, name), _values(ours, name))


if __name__ == "__main__":
    main()
