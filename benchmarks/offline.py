"""What importing and loading a data set costs: seconds, and the most memory the process ever had.

  python -m benchmarks.offline --transitions=1_000_000 --episode_length=1000

Writes a data set of 17 observations and 6 actions with Minari (HDF5) into --directory, then, in a process each, runs
`alfish import`, loads the result into an OfflineBuffer, and draws batches from it. Writes a table to
`benchmarks/results/offline.md`. Needs the extra 'minari'.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.throughput import RESULTS, machine

OBSERVATION_SIZE, ACTION_SIZE = 17, 6
BATCH_SIZE, NUM_BATCHES = 256, 2000
NAME = "bench/random-v0"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transitions", type=int, default=1_000_000)
    parser.add_argument("--episode_length", type=int, default=1000)
    parser.add_argument("--directory", default=None, help="where data are put; None: a temporary one")
    parser.add_argument("--measure", help=argparse.SUPPRESS)  # in a process of its own
    arguments = parser.parse_args()
    if arguments.measure:
        STEPS[arguments.measure](arguments)
        return
    with tempfile.TemporaryDirectory() as temporary:
        directory = arguments.directory or temporary
        environment = os.environ | {"MINARI_DATASETS_PATH": directory, "OMP_NUM_THREADS": "1"}
        command = [
            sys.executable, "-m", "benchmarks.offline", f"--transitions={arguments.transitions}",
            f"--episode_length={arguments.episode_length}", f"--directory={directory}",
        ]  # fmt: skip
        lines = []
        for step in STEPS:
            output = subprocess.run(
                [*command, f"--measure={step}"], env=environment, check=True, stdout=subprocess.PIPE, text=True
            ).stdout
            rows = [line for line in output.splitlines() if line.startswith("|")]
            print(*rows, sep="\n", flush=True)
            lines += rows
    count = f"{arguments.transitions:,} transitions in episodes of {arguments.episode_length:,}"
    head = f"# Offline data\n\n`python -m benchmarks.offline`: {count}; {machine()}\n\n"
    table = "| | seconds | most memory, MB | |\n|---|---|---|---|\n" + "\n".join(lines) + "\n"
    (RESULTS / "offline.md").write_text(head + table)


def write(arguments: argparse.Namespace) -> None:
    """The data set, an episode at a time."""
    import minari
    from gymnasium import spaces
    from minari.data_collector import EpisodeBuffer

    generator = np.random.default_rng(0)
    length = arguments.episode_length
    space = spaces.Box(-np.inf, np.inf, (OBSERVATION_SIZE,), np.float64)
    start, data_set = time.perf_counter(), None
    for _ in range(0, arguments.transitions, length):
        ended = np.arange(length) == length - 1
        buffer = EpisodeBuffer(
            observations=generator.standard_normal((length + 1, OBSERVATION_SIZE)),
            actions=generator.uniform(-1, 1, (length, ACTION_SIZE)).astype(np.float32),
            rewards=generator.standard_normal(length),
            terminations=np.zeros(length, bool),
            truncations=ended,
        )
        if data_set is None:
            data_set = minari.create_dataset_from_buffers(
                NAME, [buffer], observation_space=space, action_space=spaces.Box(-1, 1, (ACTION_SIZE,), np.float32)
            )
        else:
            data_set.update_dataset_from_buffer([buffer])
    report("Minari writes it", start)


def import_(arguments: argparse.Namespace) -> None:
    from alfish.__main__ import main as alfish

    start = time.perf_counter()
    status = alfish(["import", f"--source=minari:{NAME}", f"--output={arguments.directory}/imported"])
    assert status == 0
    size = sum(path.stat().st_size for path in Path(arguments.directory, "imported").rglob("*") if path.is_file())
    report("`alfish import` from Minari's HDF5", start, f"{size / 1e6:,.0f} MB written")


def load(arguments: argparse.Namespace) -> None:
    from alfish.offline import OfflineBuffer

    start = time.perf_counter()
    buffer = OfflineBuffer([f"alfish:{arguments.directory}/imported"])
    assert buffer.num_starts() == arguments.transitions
    report("OfflineBuffer from what was written", start)
    for _ in range(20):
        buffer.sample(BATCH_SIZE)
    start = time.perf_counter()
    for _ in range(NUM_BATCHES):
        buffer.sample(BATCH_SIZE)
    each = (time.perf_counter() - start) / NUM_BATCHES
    report("the same, and 2,000 batches of 256", start, f"{1e6 * each:.0f} us a batch")


def load_minari(arguments: argparse.Namespace) -> None:
    from alfish.offline import OfflineBuffer

    start = time.perf_counter()
    OfflineBuffer([f"minari:{NAME}"])
    report("OfflineBuffer from Minari's HDF5", start)


def report(what: str, start: float, more: str = "") -> None:
    seconds = time.perf_counter() - start
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    print(f"| {what} | {seconds:.1f} | {memory:,.0f} | {more} |")


STEPS = {"write": write, "import": import_, "load": load, "load_minari": load_minari}


if __name__ == "__main__":
    main()
