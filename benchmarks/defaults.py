"""Defaults on tasks that nobody tuned: `alfish.train(ALGORITHM, environment)` beside stable-baselines3's own defaults.

  python -m benchmarks.defaults                                     everything: hours
  python -m benchmarks.defaults --algorithms=PPO --tasks=docking    some rows
  python -m benchmarks.defaults --tasks=second                      another set of tasks, see `unknown_tasks`
  python -m benchmarks.defaults --table                             only the tables, from existing runs

Each library is called as its first example shows, with the environment, the budget and the seed, and nothing else.
The libraries take turns, seed by seed, on the same core with one thread. Seconds are those of the call, without the
imports of the libraries; alfish's include its evaluations and checkpoints. After it, 20 episodes of the policy's mode
are played by the same loop, the same episodes for both.

Runs that are there are not repeated, so the same command continues after an interruption. Writes
`docs/results/defaults.csv`, a row for each run, and prints the tables of docs/results.md.
"""

import argparse
import datetime
import itertools
import math
import os
import queue
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks import PROJECT, processes, tables
from benchmarks.runs.unknown_tasks import BUDGETS, FIRST, SECOND, TASKS, THIRD

CSV = PROJECT / "docs" / "results" / "defaults.csv"
KEY = ("algorithm", "task", "library", "seed")
FIELDS = (*KEY, "env_steps", "mean", "std", "min", "max", "seconds", "machine", "date")
LIBRARIES = ("alfish", "sb3")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithms", default=",".join(BUDGETS))
    parser.add_argument("--tasks", default="first,second", help="names of tasks, or first, second or third for a set")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    if not arguments.table:
        sets = {"first": list(FIRST), "second": list(SECOND), "third": list(THIRD)}
        names = [name for part in arguments.tasks.split(",") for name in sets.get(part, [part])]
        chosen = itertools.product(map(int, arguments.seeds.split(",")), arguments.algorithms.split(","), names)
        run([(name, task, seed) for seed, name, task in chosen if name in TASKS[task].algorithms])
    for tasks in (FIRST, SECOND, THIRD):
        print(table([row for row in tables.read_rows(CSV) if row["task"] in tasks]) + "\n")


def run(rows: Sequence[tuple[str, str, int]]) -> None:
    """Makes the runs that are not there yet, as many at a time as there are cores."""
    pythons = {"alfish": sys.executable, "sb3": processes.peer_python("sb3")}
    left: queue.SimpleQueue[tuple[str, str, int]] = queue.SimpleQueue()
    for row in rows:
        left.put(row)
    lock = threading.Lock()
    errors: list[BaseException] = []

    def work(core: int) -> None:
        while not errors:
            try:
                algorithm, task, seed = left.get_nowait()
            except queue.Empty:
                return
            for library in LIBRARIES if seed % 2 else LIBRARIES[::-1]:
                key = {"algorithm": algorithm, "task": task, "library": library, "seed": seed}
                try:
                    with lock:
                        is_there = any(_key(row) == _key(key) for row in tables.read_rows(CSV))
                    if not is_there:
                        found = _run(key, core, pythons[library])
                        with lock:
                            publish(key, found)
                except (SystemExit, Exception) as error:  # raised again below, in the main thread
                    errors.append(error)
                    return

    threads = [threading.Thread(target=work, args=(core,)) for core in sorted(os.sched_getaffinity(0))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def _run(key: Mapping[str, Any], core: int, python: str) -> dict[str, Any]:
    """Runs one call on one core; returns its seconds and the returns of its policy."""
    command = processes.side(python, key["library"], "defaults", key["task"], key["seed"], key["algorithm"])
    return processes.run_script(["taskset", "--cpu-list", str(core), *command], processes.with_threads(1))


def publish(key: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Writes a run into the CSV."""
    returns = np.array(found["returns"])
    row = {
        **key,
        "env_steps": BUDGETS[key["algorithm"]],
        **{name: f"{getattr(returns, name)():.6g}" for name in ("mean", "std", "min", "max")},
        "seconds": round(found["seconds"], 1),
        "machine": processes.machine(),
        "date": datetime.date.today().isoformat(),
    }
    tables.replace_rows(CSV, [row], FIELDS, KEY, _order)
    print(*key.values(), row["mean"], f"{row['seconds']} s", flush=True)


def _key(row: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(str(row[name]) for name in KEY)


def _order(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return list(BUDGETS).index(row["algorithm"]), list(TASKS).index(row["task"]), row["library"], int(row["seed"])


def compared(ours: np.ndarray, theirs: np.ndarray) -> str:
    """Returns 'above', 'level' or 'below': means over seeds differ by more than the larger deviation of seeds, or not.

    Args:
      ours, theirs: `[seeds]` mean returns. Differences below a thousandth of the larger mean are level too.
    """
    difference = ours.mean() - theirs.mean()
    spread = max(ours.std(), theirs.std(), 1e-3 * max(abs(ours.mean()), abs(theirs.mean())))
    return "level" if abs(difference) <= spread else "above" if difference > 0 else "below"


def table(rows: Sequence[Mapping[str, str]]) -> str:
    """Returns a Markdown table, a line for each algorithm and task with runs of both libraries."""
    headings = [
        "algorithm",
        "task",
        "env steps",
        "alfish",
        "stable-baselines3",
        "",
        "seconds",
        "their seconds",
        "ratio",
    ]
    lines, verdicts, ratios = [tables.header(headings)], [], []
    for algorithm, task in dict.fromkeys((row["algorithm"], row["task"]) for row in rows):
        own = [row for row in rows if (row["algorithm"], row["task"]) == (algorithm, task)]
        found = {name: {row["seed"]: row for row in own if row["library"] == name} for name in LIBRARIES}
        seeds = sorted(found["alfish"].keys() & found["sb3"].keys())
        if not seeds:
            continue
        means, seconds = (
            [np.array([float(found[name][seed][field]) for seed in seeds]) for name in LIBRARIES]
            for field in ("mean", "seconds")
        )
        ratio = float(np.median(seconds[1]) / np.median(seconds[0]))
        verdicts.append(compared(*means))
        ratios.append(ratio)
        cells = [algorithm, task.replace("_", " "), f"{BUDGETS[algorithm]:,}", *map(_shown, means), verdicts[-1]]
        lines.append(tables.line([*cells, *(f"{np.median(each):.0f}" for each in seconds), f"{ratio:.1f}"]))
    if not ratios:
        return "there are no runs"
    counts = ", ".join(f"{verdicts.count(word)} {word}" for word in ("above", "level", "below"))
    speeds = f"median {np.median(ratios):.1f}, smallest {min(ratios):.1f}"
    return "\n".join([*lines, "", f"{len(ratios)} rows: {counts}. Ratio of seconds: {speeds}."])


def _shown(means: np.ndarray) -> str:
    """Returns the mean over seeds, and each seed, with four significant digits."""
    return f"{_number(means.mean())} ({', '.join(map(_number, means))})"


def _number(value: float) -> str:
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    digits = 3 - math.floor(math.log10(abs(value)))
    return f"{round(value, digits):,.{max(0, min(digits, 4))}f}"


if __name__ == "__main__":
    main()
