"""Wall time of whole commands: the shipped commands without a flag, beside other libraries on the same recipes.

  python -m benchmarks.shipped                                          everything: hours
  python -m benchmarks.shipped --tasks=ppo_cartpole --peers=sb3:1,sb3:2,sbx:1 --seeds=0,1,2,3,4
  python -m benchmarks.shipped --table                                  only table and picture, from existing runs

alfish is called as a user calls it, `alfish train --gin_file=ppo_cartpole.gin`, with its own evaluations, checkpoints
and summaries; where the budget below is shorter than the conf's, and for seeds other than 0, one binding says so. It
runs twice: with an empty cache of compiled code, and with the cache that the first run left. Peers (NAME:THREADS) train
the same recipe with as many evaluations of as many episodes, and save nothing. Libraries take turns seed by seed. A
ratio is to the peer with the threads that serve it best.

The clock is that of this process. It starts before the other process does, and is read when a line arrives and when the
process has ended. Imports, compilation and evaluations are included. Each run is written when it has ended, and runs
that are there are not repeated, so the same command continues after an interruption.

Writes `benchmarks/results/shipped.{csv,md}` and `docs/pictures/wall_seconds.png`.
"""

import argparse
import datetime
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import PROJECT, RESULTS, processes, tables
from benchmarks.runs.shipped import TASKS, Task

CSV = RESULTS / "shipped.csv"
PICTURE = PROJECT / "docs" / "pictures" / "wall_seconds.png"
EMPTY, WARM = "alfish, empty cache", "alfish, warm cache"
KEY = ("task", "library", "threads", "seed")
FIELDS = (*KEY, "event", "env_steps", "seconds", "return", "versions", "machine", "date")
PACKAGES = {"alfish": ("alfish", "torch"), "sb3": ("stable-baselines3", "torch"), "sbx": ("sbx-rl", "jax")}
PANELS_IN_A_ROW = 3
COLORS = {
    EMPTY: ("C0", EMPTY),
    WARM: ("C1", WARM),
    "sb3": ("C2", "stable-baselines3"),
    "sbx": ("C3", "SBX"),
}
EVALUATION = re.compile(r"Evaluation at ([\d,]+) steps: return (-?[\d,.]+)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--peers", default="sb3:1,sb3:2,sbx:1,sbx:2", help="each PEER:THREADS; empty: none")
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    if not arguments.table:
        peers = [peer.partition(":")[::2] for peer in arguments.peers.split(",") if peer]
        pythons = {name: processes.peer_python(name) for name, _ in peers}
        for task in arguments.tasks.split(","):
            for seed in map(int, arguments.seeds.split(",")):
                _take_turns(TASKS[task], seed, [(name, threads or "1") for name, threads in peers], pythons)
    rows = tables.read_rows(CSV)
    if rows:
        tables.write_text(CSV.with_suffix(".md"), text := table(rows))
        draw(rows, PICTURE)
        print(text)


def _take_turns(task: Task, seed: int, peers: Sequence[tuple[str, str]], pythons: Mapping[str, str]) -> None:
    """Makes the runs of a seed that are not there yet."""
    cache = Path(tempfile.gettempdir()) / f"alfish-shipped-{os.getuid()}" / f"{task.name}-{seed}"
    for library in (EMPTY, WARM):
        if _is_there(key := {"task": task.name, "library": library, "threads": "auto", "seed": seed}):
            continue
        if library == EMPTY:
            shutil.rmtree(cache, ignore_errors=True)
        elif not cache.is_dir():  # the run that left it is of an earlier call
            _run_ours(task, seed, cache)
        _publish(key, _run_ours(task, seed, cache), sys.executable, "alfish")
    shutil.rmtree(cache, ignore_errors=True)
    for name, threads in peers:
        if not _is_there(key := {"task": task.name, "library": name, "threads": threads, "seed": seed}):
            command = processes.side(pythons[name], name, "shipped", task.name, seed)
            _publish(key, timed(command, processes.with_threads(int(threads))), pythons[name], name)


def _run_ours(task: Task, seed: int, cache: Path) -> list[dict[str, Any]]:
    """Runs `alfish train`; the cache of compiled code is made in `cache` if it is not there."""
    cache.mkdir(parents=True, exist_ok=True)
    bindings = [] if task.is_budget else [f"--gin_param=Trainer.num_env_steps={task.env_steps}"]
    bindings += [f"--gin_param=Trainer.seed={seed}"] if seed else []
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment |= {"XDG_CACHE_HOME": str(cache), "TORCHINDUCTOR_CACHE_DIR": str(cache), "PYTHONPATH": str(PROJECT)}
    with tempfile.TemporaryDirectory() as root_dir:
        command = [sys.executable, "-m", "alfish", "train", f"--gin_file={task.name}.gin", f"--root_dir={root_dir}"]
        return timed([*command, *bindings], environment)


def timed(command: Sequence[str], environment: Mapping[str, str]) -> list[dict[str, Any]]:
    """Runs a program and returns its evaluations and its end, with the seconds since it was started.

    Raises:
      SystemExit: it failed; holds the last lines that it wrote.
    """
    events: list[dict[str, Any]] = []
    lines: list[str] = []
    began = time.monotonic()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=dict(environment), cwd=PROJECT
    )
    with process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                seconds = round(time.monotonic() - began, 3)
                lines = [*lines[-20:], line]
                if found := EVALUATION.search(line):
                    env_steps, value = (number.replace(",", "") for number in found.groups())
                    events.append({"event": "evaluation", "env_steps": env_steps, "seconds": seconds, "return": value})
            process.wait()
        finally:
            process.kill()  # one that has ended does not mind; another must not go on unwatched
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{''.join(lines)}")
    return [*events, {"event": "end", "seconds": round(time.monotonic() - began, 3)}]


def _is_there(key: Mapping[str, Any]) -> bool:
    return any(_key(row) == _key(key) for row in tables.read_rows(CSV))


def _key(row: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(str(row[name]) for name in KEY)


def _publish(key: Mapping[str, Any], events: Sequence[Mapping[str, Any]], python: str, library: str) -> None:
    """Writes a run into the CSV."""
    names = PACKAGES[library]
    code = f"from importlib.metadata import version; print(*(f'{{n}} {{version(n)}}' for n in {names!r}), sep=', ')"
    versions = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()
    origin = {"versions": versions, "machine": processes.machine(), "date": datetime.date.today().isoformat()}
    tables.replace_rows(CSV, [{**key, **event, **origin} for event in events], FIELDS, KEY, _order)
    print(
        f"{key['task']} {key['library']}:{key['threads']} seed {key['seed']}: {events[-1]['seconds']:.1f} s", flush=True
    )


def _order(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return list(TASKS).index(row["task"]), row["library"], row["threads"], int(row["seed"]), float(row["seconds"])


def _runs(rows: Sequence[Mapping[str, str]], task: str) -> dict[tuple[str, str], list[list[Mapping[str, str]]]]:
    """Returns the events of each run of a task, by library and threads."""
    found: dict[tuple[str, str], dict[str, list[Mapping[str, str]]]] = {}
    for row in rows:
        if row["task"] == task:
            found.setdefault((row["library"], row["threads"]), {}).setdefault(row["seed"], []).append(row)
    return {variant: list(runs.values()) for variant, runs in found.items()}


def _ends(runs: Sequence[Sequence[Mapping[str, str]]]) -> np.ndarray:
    """Returns the seconds of whole runs."""
    return np.array([float(run[-1]["seconds"]) for run in runs])


def _reached(runs: Sequence[Sequence[Mapping[str, str]]], threshold: float) -> np.ndarray:
    """Returns the seconds to the first evaluation that reaches a threshold; inf where none does."""
    return np.array(
        [
            min((float(e["seconds"]) for e in run[:-1] if float(e["return"]) >= threshold), default=math.inf)
            for run in runs
        ]
    )


def _best(runs: Mapping[tuple[str, str], Any]) -> dict[str, str]:
    """Returns the number of threads with which each library's runs end first."""
    medians = {variant: np.median(_ends(own)) for variant, own in runs.items()}
    best: dict[str, str] = {}
    for library, threads in sorted(medians, key=lambda variant: medians[variant]):
        best.setdefault(library, threads)
    return best


def table(rows: Sequence[Mapping[str, str]]) -> str:
    """Returns a Markdown table of seconds and ratios, one line for each task, library and number of threads."""
    machines = "; ".join(sorted({row["machine"] for row in rows}))
    headings = [
        "task",
        "library",
        "threads",
        "runs",
        "seconds",
        "seconds to the threshold",
        *(f"/ {n}" for n in (EMPTY, WARM)),
    ]
    lines = [
        f"{machines}. Medians [smallest, largest run] of seconds from the start of the command to its end, and to the "
        "first evaluation that reaches the threshold; ratios of medians of whole runs over alfish's, with a 95 % "
        "bootstrap interval, for the number of threads that serves a library best.",
        "",
        tables.header(headings),
    ]
    for name in dict.fromkeys(row["task"] for row in rows):
        task, runs = TASKS[name], _runs(rows, name)
        best = _best(runs)
        for (library, threads), own in runs.items():
            ends, reached = _ends(own), _reached(own, task.threshold)
            num_reached = int(np.isfinite(reached).sum())
            median = np.median(reached)
            goal = f"{median:.1f}" if math.isfinite(median) else "not reached"
            ratios = [
                tables.times(float(np.median(ends) / np.median(ours)), ends, ours)
                if library not in (EMPTY, WARM) and best[library] == threads and len(ours)
                else ""
                for ours in (_ends(runs.get((variant, "auto"), [])) for variant in (EMPTY, WARM))
            ]
            cells = [
                f"{name}, {task.env_steps:,} steps, {task.threshold:g}",
                " and ".join(dict.fromkeys(run[0]["versions"] for run in own))
                + (library.removeprefix("alfish") if library in (EMPTY, WARM) else ""),
                threads,
                len(own),
                f"{np.median(ends):.1f} [{ends.min():.1f}, {ends.max():.1f}]",
                f"{goal} ({num_reached} of {len(own)})",
                *ratios,
            ]
            lines.append(tables.line(cells))
    return "\n".join(lines) + "\n"


def draw(rows: Sequence[Mapping[str, str]], path: Path) -> None:
    """Draws return against seconds, a panel for each task, with each library's best threads.

    A point is the mean over seeds of one evaluation's returns, at the median of its seconds; a band has the smallest
    and the largest return.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(row["task"] for row in rows))
    height = math.ceil((len(names) + 1) / PANELS_IN_A_ROW)  # the legend has a panel
    size = (4 * PANELS_IN_A_ROW, 3.1 * height)
    figure, grid = plt.subplots(height, PANELS_IN_A_ROW, figsize=size, layout="constrained", squeeze=False)
    lines: dict[str, Any] = {}
    for axis, name in zip(grid.flat, names):
        runs = _runs(rows, name)
        for library, threads in _best(runs).items():
            own = runs[library, threads]
            seconds, values = (
                np.array([[float(e[of]) for e in run[:-1]] for run in own]) for of in ("seconds", "return")
            )
            at = np.median(seconds, 0)
            color, label = COLORS.get(library, ("grey", library))
            (lines[label],) = axis.plot(at, values.mean(0), marker=".", linewidth=1.5, color=color)
            axis.fill_between(at, values.min(0), values.max(0), color=color, alpha=0.15, linewidth=0)
        axis.axhline(TASKS[name].threshold, color="grey", linewidth=0.8, linestyle="--")
        axis.set_xlim(left=0)
        num_seeds = max(map(len, runs.values()))
        seeds = f"{num_seeds} seeds" if num_seeds > 1 else "1 seed"
        axis.set_title(f"{name}, {TASKS[name].env_steps:,} steps, {seeds}", fontsize=10)
        axis.set_xlabel("wall time of the whole command, in seconds")
        axis.set_ylabel("mean return of 20 episodes")
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    for axis in grid.flat[len(names) :]:
        axis.axis("off")
    grid.flat[len(names)].legend(lines.values(), lines, loc="center", frameon=False, fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main()
