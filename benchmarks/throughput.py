"""Environment steps per second compared with other libraries, with the same recipes, in interleaved runs.

  python -m benchmarks.throughput --recipes=ppo_cartpole,dqn_cartpole --peers=sb3,sbx:2,sample-factory:2 --repeats=5
  python -m benchmarks.throughput --recipes=td3_halfcheetah --variants=bfloat16,bfloat16:2 --peers=sb3,sb3:2
  python -m benchmarks.throughput --recipes=ppo_pong,dqn_pong --variants=plain,compiled,auto_bfloat16 --peers=sb3,sb3:2
  python -m benchmarks.throughput --recipes=appo_cartpole,appo_slow --variants=sync,async --peers=sample-factory
  python -m benchmarks.throughput --recipes=sac_halfcheetah --variants=gpu,gpu_host,gpu_graphs --peers=leanrl

Libraries take turns (A B A B ...). Each run is a process of its own; its start-up is not measured. alfish runs plain,
compiled (`Learner.compile`) and, on request, with products in bfloat16 or with `Trainer.num_threads = 'auto'`. Each
peer has its own virtual environment, made from `benchmarks/peers/PEER.txt` on first use. NAME:N gives a peer N threads;
with several values of N, ratios use the peer's fastest one. The cell of a recipe that a peer does not have stays blank.
--busy=N runs N busy processes at the same time.

Writes the raw runs and a table to `benchmarks/results/throughput.{csv,md}` after each recipe, and keeps the rows of
recipes that were not run; with --busy=N it writes `throughput-busyN.{csv,md}`. Give --output for a trial.

A ratio is one of medians, with a bootstrap interval over runs. Memory is the maximum over all processes of a run,
compilers included, sampled twice a second; a page that several processes map counts once.
"""

import argparse
import datetime
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import RESULTS, processes, tables

SYNC = "alfish sync"
RECIPES = ("ppo_cartpole", "dqn_cartpole", "sac_halfcheetah", "ppo_halfcheetah", "td3_halfcheetah")
NUMBERS = ("env_steps_per_second", "peak_memory_mb", "env_steps", "seconds", "cpu_seconds", "updates", "return")
FIELDS = ("recipe", "library", "threads", "seed", *NUMBERS, "versions", "machine", "date")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", default=",".join(RECIPES))
    parser.add_argument(
        "--variants",
        default="plain,compiled",
        help="of alfish, each VARIANT or VARIANT:THREADS: plain, compiled, bfloat16, auto, auto_bfloat16, host; on a "
        "GPU: gpu, gpu_host, gpu_graphs; of APPO: sync, async",
    )
    parser.add_argument("--peers", default="sb3", help="each PEER or PEER:THREADS; empty: none")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, help="CSV in place of the published one; the table is put beside it")
    parser.add_argument("--busy", type=int, default=0, help="processes that compete for the processor")
    arguments = parser.parse_args()
    libraries = [
        (name, int(threads or 1))
        for each in (*(f"alfish {variant}" for variant in arguments.variants.split(",")), *arguments.peers.split(","))
        for name, _, threads in [each.partition(":")]
        if each
    ]
    pythons = {name: sys.executable if is_ours(name) else processes.peer_python(name) for name, _ in libraries}
    common = {"machine": processes.machine(), "date": datetime.date.today().isoformat()}
    published = RESULTS / (f"throughput-busy{arguments.busy}.csv" if arguments.busy else "throughput.csv")
    path = arguments.output or published
    with processes.busy_processes(arguments.busy):
        for recipe in arguments.recipes.split(","):
            able, runs = list(libraries), []
            for seed in range(arguments.repeats):
                for library, threads in list(able):
                    try:
                        result = _run(pythons[library], library, recipe, seed, threads)
                    except processes.NoSuchRecipe:
                        able.remove((library, threads))
                        print(f"{recipe} {library} has no such recipe", flush=True)
                        continue
                    run = {"recipe": recipe, "library": library, "threads": threads, "seed": seed} | result | common
                    run["env_steps_per_second"] = run["env_steps"] / run["seconds"]
                    print(f"{recipe} {library}:{threads} {run['env_steps_per_second']:,.0f} steps/s", flush=True)
                    runs.append(run)
            publish(path, runs)  # whole recipes only, and each at once: a call may take an hour
    print(path.with_suffix(".md").read_text())


def publish(path: Path, runs: list[dict]) -> None:
    """Replaces the old runs of the same recipes in the raw data, and rewrites the table."""
    rows = tables.replace_rows(path, runs, FIELDS, key=["recipe"])
    tables.write_text(path.with_suffix(".md"), table(rows))


def is_ours(library: str) -> bool:
    """Returns whether the library is alfish, in one of its variants."""
    return library.split()[0] == "alfish"


def _run(python: str, library: str, recipe: str, seed: int, threads: int) -> dict:
    """Returns the numbers that a run printed, and its memory."""
    name, *variant = library.split()
    peaks = [0.0]
    result = processes.run_script(
        processes.side(python, name, "throughput", recipe, seed, *variant),
        processes.with_threads(threads),
        watch=lambda pid: peaks.append(processes.memory_mb(pid)),
    )
    return result | {"peak_memory_mb": round(max(peaks)) or ""}


def table(rows: list[dict[str, str]]) -> str:
    """Returns the Markdown table of all recipes from the rows of the CSV."""
    runs = [_run_of(row) for row in rows]
    libraries = sorted({run["library"]: None for run in runs}, key=lambda name: not is_ours(name))
    peers = [name for name in libraries if not is_ours(name) or name == SYNC]
    machines = "; ".join(sorted({run["machine"] for run in runs if run.get("machine")}))
    dates = sorted({run["date"] for run in runs if run.get("date")})
    headings = ["recipe", "library", "threads", "steps/s", "updates/s", "return", "MB", *(f"times {p}" for p in peers)]
    lines = [
        f"{machines}. {' to '.join(dict.fromkeys(dates[:1] + dates[-1:]))}. Medians, env steps per second [smallest, "
        "largest run]; ratio of medians, to the peer with the threads that serve it best, with a 95 % bootstrap "
        "interval; updates a second, the return of the last training episodes (mean of the runs), the largest memory.",
        "",
        tables.header(headings),
    ]
    for recipe in dict.fromkeys(run["recipe"] for run in runs):
        of_recipe = [run for run in runs if run["recipe"] == recipe]
        by_library = {
            (name, threads): [run for run in of_recipe if (run["library"], run["threads"]) == (name, threads)]
            for name in libraries
            for threads in sorted({run["threads"] for run in of_recipe if run["library"] == name})
        }
        speeds = {key: np.array([run["env_steps_per_second"] for run in own]) for key, own in by_library.items()}
        best = {
            peer: max((speed for (name, _), speed in speeds.items() if name == peer), key=np.median, default=None)
            for peer in peers
        }
        for (name, threads), own in by_library.items():
            speed = speeds[name, threads]
            updates = np.median([run["updates"] / run["seconds"] for run in own])
            mean = np.mean([run["return"] for run in own])
            memory = max((run["peak_memory_mb"] for run in own if run["peak_memory_mb"]), default="")
            cells = [
                recipe,
                own[0]["versions"] + (f" ({name.split()[1]})" if is_ours(name) else ""),
                threads,
                f"{np.median(speed):,.0f} [{speed.min():,.0f}, {speed.max():,.0f}]",
                f"{updates:,.0f}",
                f"{mean:.1f}",
                f"{memory:,.0f}" if memory else "",
                *(
                    _ratio(speed, of_peer) if is_ours(name) and name != peer and of_peer is not None else ""
                    for peer, of_peer in best.items()
                ),
            ]
            lines.append(tables.line(cells))
    return "\n".join(lines) + "\n"


def _run_of(row: dict[str, str]) -> dict[str, Any]:
    """Returns a row with its numbers; cells that were not measured stay empty."""
    numbers = {name: float(row[name]) if row[name] else "" for name in NUMBERS}
    return row | numbers | {"threads": int(row["threads"])}


def _ratio(ours: np.ndarray, theirs: np.ndarray) -> str:
    return tables.times(float(np.median(ours) / np.median(theirs)), ours, theirs)


if __name__ == "__main__":
    main()
