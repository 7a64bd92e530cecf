"""Environment steps per second beside peers, on the same recipe, in one interleaved run.

  python -m benchmarks.throughput --recipes=ppo_cartpole,dqn_cartpole --peers=sb3 --repeats=5

Libraries take turns run by run (A B A B ...), each run in a process of its own on one torch thread, start-up left out.
alfish runs as it is, compiled (`Learner.compile`), and if asked with products in bfloat16 as well. A peer lives in a
virtual environment of its own, made from `benchmarks/peers/PEER.txt` when first needed. Writes the raw runs and a table
to `benchmarks/results/throughput.{csv,md}`, where recipes that were not run keep their rows. The ratio is of medians,
its interval a bootstrap over runs.
"""

import argparse
import csv
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
RESULTS = HERE / "results"
RECIPES = ("ppo_cartpole", "dqn_cartpole", "sac_halfcheetah", "ppo_halfcheetah", "td3_halfcheetah")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", default=",".join(RECIPES))
    parser.add_argument("--variants", default="plain,compiled", help="of alfish: plain, compiled, bfloat16")
    parser.add_argument("--peers", default="sb3")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    ours = [f"alfish {variant}" for variant in arguments.variants.split(",")]
    peers = arguments.peers.split(",")
    pythons = dict.fromkeys(ours, sys.executable) | {peer: _venv(peer) for peer in peers}
    runs = []
    for recipe in arguments.recipes.split(","):
        for repeat in range(arguments.repeats):
            for library, python in pythons.items():
                run = {"recipe": recipe, "library": library, "seed": repeat} | _run(python, library, recipe, repeat)
                run["env_steps_per_second"] = run["env_steps"] / run["seconds"]
                print(f"{recipe} {library} {run['env_steps_per_second']:,.0f} steps/s", flush=True)
                runs.append(run)
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / "throughput.csv"
    runs = [*_other_recipes(path, {run["recipe"] for run in runs}), *runs]
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, runs[0])
        writer.writeheader()
        writer.writerows(runs)
    table = _table(runs, ours, peers)
    (RESULTS / "throughput.md").write_text(table)
    print(table)


def _other_recipes(path: Path, recipes: set[str]) -> list[dict]:
    """The rows that are there already of recipes that were not run now."""
    rows = list(csv.DictReader(path.open())) if path.is_file() else []
    numbers = ("env_steps", "seconds", "updates", "return", "env_steps_per_second")
    return [row | {name: float(row[name]) for name in numbers} for row in rows if row["recipe"] not in recipes]


def _run(python: str, library: str, recipe: str, seed: int) -> dict:
    name, *variant = library.split()
    script = HERE / "runs" / f"{name}_run.py"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent) if name == "alfish" else ""}
    command = [python, str(script), recipe, str(seed), *variant]
    finished = subprocess.run(command, capture_output=True, text=True, env=environment)
    if finished.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{finished.stderr}")
    return json.loads(finished.stdout.splitlines()[-1])


def _venv(peer: str) -> str:
    """The Python of a peer's virtual environment."""
    directory = HERE / "peers" / f".venv-{peer}"
    python = directory / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", directory], check=True)
        requirements = HERE / "peers" / f"{peer}.txt"
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--requirement", requirements], check=True)
    return str(python)


def _table(runs: list[dict], ours: list[str], peers: list[str]) -> str:
    lines = [
        f"{platform.machine()}, {os.cpu_count()} cores, one torch thread; medians, env steps per second "
        f"[smallest, largest run]; ratio of medians with a 95 % bootstrap interval.",
        "",
        f"| recipe | library | steps/s | updates/s | return | {' | '.join(f'times {peer}' for peer in peers)} |",
        f"|---|---|---|---|---|{'---|' * len(peers)}",
    ]
    for recipe in dict.fromkeys(run["recipe"] for run in runs):
        by_library = {name: [run for run in runs if (run["recipe"], run["library"]) == (recipe, name)]
                      for name in [*ours, *peers]}  # fmt: skip
        speeds = {name: np.array([run["env_steps_per_second"] for run in own]) for name, own in by_library.items()}
        for name, own in by_library.items():
            speed = speeds[name]
            updates = np.median([run["updates"] / run["seconds"] for run in own])
            mean = np.mean([run["return"] for run in own])
            ratios = " | ".join(_ratio(speed, speeds[peer]) if name in ours else "" for peer in peers)
            spread = f"{np.median(speed):,.0f} [{speed.min():,.0f}, {speed.max():,.0f}]"
            label = f"{own[0]['versions']}{' (' + name.split()[1] + ')' if name in ours else ''}"
            lines.append(f"| {recipe} | {label} | {spread} | {updates:,.0f} | {mean:.1f} | {ratios} |")
    return "\n".join(lines) + "\n"


def _ratio(ours: np.ndarray, theirs: np.ndarray) -> str:
    generator = np.random.default_rng(0)
    draws = [np.median(generator.choice(side, (10_000, len(side))), axis=1) for side in (ours, theirs)]
    low, high = np.percentile(draws[0] / draws[1], [2.5, 97.5])
    return f"{np.median(ours) / np.median(theirs):.2f}x [{low:.2f}, {high:.2f}]"


if __name__ == "__main__":
    main()
