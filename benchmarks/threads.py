"""Speed with one thread, with `Trainer.num_threads = 'auto'` and with two threads, on an idle machine and a busy one.

  python -m benchmarks.threads --threads=auto
  python -m benchmarks.threads --recipes=sac_halfcheetah,td3_halfcheetah --threads=1,auto,2

The first command takes a quarter of an hour on two cores: five runs of each recipe of `throughput` alone and five
beside a busy process. At the end it names the recipes that keep less than `KEPT` of their idle speed.

Compiled runs of alfish with the recipes of `throughput` take turns: each number of threads alone, then each beside
`--busy` processes that only count. Each run is a process of its own; its start-up is not measured.

Writes the raw runs and a table to `benchmarks/results/threads.{csv,md}` after each recipe, and keeps the rows of
recipes that were not run. Ratios are of medians. Processor time, of all threads, depends less on other work than speed.
"""

import argparse
import datetime
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import RESULTS, processes, tables
from benchmarks.throughput import RECIPES

NUMBERS = ("seconds", "cpu_seconds", "env_steps", "updates", "return")
FIELDS = ("recipe", "threads", "busy", "seed", *NUMBERS, "versions", "machine", "date")
# Variant of `alfish_run` and torch's threads.
THREADS = {"1": ("compiled", 1), "auto": ("auto", 1), "2": ("compiled", 2)}
KEPT = 0.4  # of the idle speed, beside one busy process on two cores
HEADINGS = (
    "recipe", "threads", "busy", "updates/s", "of one thread", "of its idle speed", "processor ms/update",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", default=",".join(RECIPES))
    parser.add_argument("--threads", default="1,auto", help=f"of {', '.join(THREADS)}")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--busy", type=int, default=1, help="processes that compete for the processor")
    arguments = parser.parse_args()
    common = {"machine": processes.machine(), "date": datetime.date.today().isoformat()}
    path = RESULTS / "threads.csv"
    for recipe in arguments.recipes.split(","):
        runs = []
        for seed in range(arguments.repeats):
            for busy in (0, arguments.busy):
                for threads in arguments.threads.split(","):
                    with processes.busy_processes(busy):
                        result = _run(recipe, seed, threads)
                    runs.append({"recipe": recipe, "threads": threads, "busy": busy, "seed": seed} | result | common)
                    rate = result["updates"] / result["seconds"]
                    print(f"{recipe} {threads} threads beside {busy}: {rate:,.0f} updates/s", flush=True)
        publish(path, runs)
    print(path.with_suffix(".md").read_text())
    slow = [f"{recipe} with {threads} threads" for recipe, threads in below(tables.read_rows(path), KEPT)]
    print(f"Below {KEPT} of the idle speed: {', '.join(slow) or 'none'}")


def below(rows: list[dict[str, str]], kept: float) -> list[tuple[str, str]]:
    """Returns recipes and threads whose median speed beside busy processes is less than `kept` of the idle one."""
    speeds = _speeds(rows)
    return [
        (recipe, threads)
        for (recipe, threads, busy), speed in speeds.items()
        if busy != "0" and np.median(speed) < kept * np.median(speeds[recipe, threads, "0"])
    ]


def _speeds(rows: list[dict[str, str]]) -> dict[tuple[str, str, str], np.ndarray]:
    """Returns updates a second of the runs of each recipe, threads and number of busy processes."""
    speeds: dict[tuple[str, str, str], np.ndarray] = {}
    for row in rows:
        key = row["recipe"], row["threads"], row["busy"]
        speeds[key] = np.append(speeds.get(key, []), float(row["updates"]) / float(row["seconds"]))
    return speeds


def publish(path: Path, runs: list[dict[str, Any]]) -> None:
    """Replaces the old runs of the same recipes in the raw data, and rewrites the table."""
    rows = tables.replace_rows(path, runs, FIELDS, key=["recipe"])
    tables.write_text(path.with_suffix(".md"), table(rows))


def _run(recipe: str, seed: int, threads: str) -> dict[str, Any]:
    variant, count = THREADS[threads]
    command = processes.side(sys.executable, "alfish", "throughput", recipe, seed, variant)
    return processes.run_script(command, processes.with_threads(count))


def table(rows: list[dict[str, str]]) -> str:
    """Returns the Markdown table of all recipes from the rows of the CSV."""
    lines = [tables.header(HEADINGS)]
    speeds = _speeds(rows)
    for (recipe, threads, busy), speed in speeds.items():
        own = [row for row in rows if (row["recipe"], row["threads"], row["busy"]) == (recipe, threads, busy)]
        processor = np.median([1000 * float(row["cpu_seconds"]) / float(row["updates"]) for row in own])
        cells = [
            recipe,
            threads,
            busy,
            f"{np.median(speed):,.0f} [{speed.min():,.0f}, {speed.max():,.0f}]",
            _times(speed, speeds.get((recipe, "1", busy)) if threads != "1" else None),
            _times(speed, speeds.get((recipe, threads, "0")) if busy != "0" else None),
            f"{processor:.2f}",
        ]
        lines.append(tables.line(cells))
    return "\n".join(lines) + "\n"


def _times(above: np.ndarray, below: np.ndarray | None) -> str:
    return "" if below is None else tables.times(float(np.median(above) / np.median(below)), above, below)


if __name__ == "__main__":
    main()
