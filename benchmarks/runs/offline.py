"""A step of `benchmarks.offline`: `python -m benchmarks.runs.offline STEP TRANSITIONS EPISODE_LENGTH DIRECTORY`.

Prints one JSON object: {"rows": [[what, seconds, most memory in MB, more], ...]}. Each step has a process of its own,
whose memory and imports are measured: what is not measured is not imported.
"""

import argparse
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.timing import seconds_a_call

OBSERVATION_SIZE, ACTION_SIZE = 17, 6
BATCH_SIZE, NUM_BATCHES = 256, 2000
NAME = "bench/random-v0"
Row = tuple[str, str, str, str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=STEPS)
    parser.add_argument("transitions", type=int)
    parser.add_argument("episode_length", type=int)
    parser.add_argument("directory")
    arguments = parser.parse_args()
    print(json.dumps({"rows": list(STEPS[arguments.step](arguments))}))


def write(arguments: argparse.Namespace) -> Iterator[Row]:
    """Yields the episodes of the data set."""
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
    yield row("Minari writes it", start)


def import_(arguments: argparse.Namespace) -> Iterator[Row]:
    """Imports the data set as `alfish import` does."""
    from alfish.__main__ import main as alfish

    start = time.perf_counter()
    status = alfish(["import", f"--source=minari:{NAME}", f"--output={arguments.directory}/imported"])
    assert status == 0
    size = sum(path.stat().st_size for path in Path(arguments.directory, "imported").rglob("*") if path.is_file())
    yield row("`alfish import` from Minari's HDF5", start, f"{size / 1e6:,.0f} MB written")


def load(arguments: argparse.Namespace) -> Iterator[Row]:
    """Loads the imported data set into memory and draws batches."""
    from alfish.offline import OfflineBuffer

    start = time.perf_counter()
    buffer = OfflineBuffer([f"alfish:{arguments.directory}/imported"])
    assert buffer.num_starts() == arguments.transitions
    yield row("OfflineBuffer from what was written", start)
    seconds_a_call(lambda _: buffer.sample(BATCH_SIZE), 20)
    start = time.perf_counter()
    each = seconds_a_call(lambda _: buffer.sample(BATCH_SIZE), NUM_BATCHES)
    yield row("the same, and 2,000 batches of 256", start, f"{1e6 * each:.0f} us a batch")


def load_minari(arguments: argparse.Namespace) -> Iterator[Row]:
    """Loads the data set of Minari into memory without an import."""
    from alfish.offline import OfflineBuffer

    start = time.perf_counter()
    OfflineBuffer([f"minari:{NAME}"])
    yield row("OfflineBuffer from Minari's HDF5", start)


def row(what: str, start: float, more: str = "") -> Row:
    """Prints seconds since the start, and the peak memory of the process in MB."""
    seconds = time.perf_counter() - start
    # Of this program alone: `ru_maxrss` also has what the process held in which it was started.
    most = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert most is not None
    return what, f"{seconds:.1f}", f"{int(most[1]) / 1e3:,.0f}", more


STEPS = {"write": write, "import": import_, "load": load, "load_minari": load_minari}


if __name__ == "__main__":
    main()
