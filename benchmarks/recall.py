"""Returns of PPO with each kind of memory on Recall: a cue is to be named 12 or 64 steps after it was shown.

  python -m benchmarks.recall                               all memories and delays, seeds 0 to 2
  python -m benchmarks.recall --memories=GRU --delays=12    some
  python -m benchmarks.recall --table                       only the table, from the CSV
  python -m benchmarks.recall --commands                    the commands of training

Trains `ppo_recall.gin` with the settings of `MEMORIES` and `DELAYS`, evaluates the last checkpoint for 100 episodes,
and writes a row for each run into docs/results/recall.csv. Runs are kept under --root; finished runs are not repeated.
"""

import argparse
import sys
from pathlib import Path

import numpy as np

from benchmarks import PROJECT, processes, tables

RESULT = PROJECT / "docs" / "results" / "recall.csv"
FIELDS = ["memory", "delay", "seed", "env_steps", "num_episodes", "mean", "ci_low", "ci_high"]
NUM_EPISODES = 100
MEMORIES = {
    "GRU": (),
    "two GRUs": ("Torso.memory=@StackedMemory", "StackedMemory.layers=[@GRU, @GRU]"),
    "MinGRU": ("Torso.memory=@MinGRU",),
    "AttentionWindow": ("Torso.memory=@AttentionWindow", "AttentionWindow.length=80"),
}
DELAYS = {
    12: ("Recall.delay=12",),
    # An episode has 66 rows, so that unrolls contain whole ones, and gradients reach from the action to the cue.
    64: (
        "Recall.delay=64",
        "make_environment.num_envs=32",
        "Trainer.unroll_length=132",
        "EpochBatches.minibatch_size=1056",
        "Trainer.num_env_steps=200000",
        "Evaluate.period=50000",
    ),
}
# Learning rates beside the conf's 1.5e-3, of those that were tried with seed 100.
RATES = {("MinGRU", 12): 5e-3, ("MinGRU", 64): 1e-2}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memories", default=",".join(MEMORIES))
    parser.add_argument("--delays", default=",".join(map(str, DELAYS)))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--root", type=Path, default=Path("runs/recall"))
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--commands", action="store_true")
    arguments = parser.parse_args()
    memories, delays = arguments.memories.split(","), [int(delay) for delay in arguments.delays.split(",")]
    for delay in delays if not arguments.table else []:
        for seed in map(int, arguments.seeds.split(",")):
            for memory in memories:
                root_dir = arguments.root / f"{memory.replace(' ', '-')}-{delay}-{seed}"
                command = training(memory, delay, seed, root_dir)
                if arguments.commands:
                    print("alfish", *(f"'{word}'" if " " in word else word for word in command))
                else:
                    measure(memory, delay, seed, root_dir, command)
    if not arguments.commands:
        print(table())


def training(memory: str, delay: int, seed: int, root_dir: Path) -> list[str]:
    """Returns the words of a command that trains, after `alfish`."""
    rate = RATES.get((memory, delay))
    settings = [*DELAYS[delay], *MEMORIES[memory], *([f"learning_rate/Linear.start={rate}"] if rate else [])]
    settings.append(f"Trainer.seed={seed}")
    return ["train", "--gin_file=ppo_recall.gin", f"--root_dir={root_dir}", *(f"--gin_param={one}" for one in settings)]


def measure(memory: str, delay: int, seed: int, root_dir: Path, command: list[str]) -> None:
    """Trains and evaluates a run, and writes its row, unless it has one."""
    key = {"memory": memory, "delay": str(delay), "seed": str(seed)}
    if any(key.items() <= row.items() for row in tables.read_rows(RESULT)):
        return
    environment = processes.with_threads(1)
    processes.alfish(*command)
    evaluate = ["evaluate", f"--root_dir={root_dir}", f"--num_episodes={NUM_EPISODES}", "--json"]
    result = processes.run_script([sys.executable, "-m", "alfish", *evaluate], environment)
    row = key | {name: result[name] for name in FIELDS[3:]}
    tables.replace_rows(RESULT, [row], FIELDS, ["memory", "delay", "seed"])
    print(f"{memory}, {delay} steps, seed {seed}: {row['mean']:.2f}", flush=True)


def table() -> str:
    """Returns a Markdown table of the CSV."""
    rows = tables.read_rows(RESULT)
    lines = [tables.header(["memory", *(f"{delay} steps, each seed" for delay in DELAYS)])]
    for memory in MEMORIES:
        cells = []
        for delay in DELAYS:
            own = [row for row in rows if (row["memory"], row["delay"]) == (memory, str(delay))]
            each = [float(row["mean"]) for row in sorted(own, key=lambda row: int(row["seed"]))]
            cells.append(f"{', '.join(f'{mean:.2f}' for mean in each)} ({np.mean(each):.2f})" if each else "not run")
        lines.append(tables.line([memory, *cells]))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
