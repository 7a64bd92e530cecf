"""Microseconds of a call that pushes rows to replay or samples a batch, compared with other libraries.

  python -m benchmarks.replay --repeats=5

Rows have 17 observations and 6 actions. The ring has a capacity of 1 M rows, of which --rows are filled: one row at a
time from one environment, then eight rows at a time from eight environments. From the latter, batches of 256
transitions are drawn. Each library receives what its own training loop passes (numpy arrays or tensors), and returns
what its learner reads. Libraries that support it also draw batches of 256 by priority from a full ring, and update the
priorities of each batch. alfish also draws 32 transitions of stacks of four 84x84 frames, each stored once, and draws
start positions only, by priority and uniformly. Libraries take turns, each run in its own process on one thread. The
other libraries use the virtual environment of `benchmarks/peers/replay.txt`.

Replaces `benchmarks/results/replay.{csv,md}` by the raw runs and a table of medians.
"""

import argparse
import datetime
import sys

import numpy as np

from benchmarks import RESULTS, processes, tables
from benchmarks.runs.replay import FRAMES_SHARE, LIBRARIES

MEASURES = {
    "push_1": "push, 1 environment",
    "push_8": "push, 8 environments",
    "sample": "sample 256",
    "prioritized": "prioritized: sample 256 of 1 M, and update",
    "draw_update": "of this, draw and update",
    "draw": "uniform: draw 256 of 1 M",
    "sample_frames": "sample 32 stacks of 4 frames",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--libraries", default=",".join(LIBRARIES))
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    libraries = arguments.libraries.split(",")
    pythons = {name: sys.executable if name == "alfish" else processes.peer_python("replay") for name in libraries}
    runs = []
    for repeat in range(arguments.repeats):
        for library, python in pythons.items():
            command = [python, "-m", "benchmarks.runs.replay", library, str(arguments.rows)]
            result = processes.run_script(command, processes.with_threads(1))
            runs.append({"library": library, "repeat": repeat} | result)
            print(runs[-1], flush=True)
    tables.write_rows(RESULTS / "replay.csv", runs, ["library", "repeat", *MEASURES, "versions"])
    text = table(runs, libraries, arguments.rows)
    tables.write_text(RESULTS / "replay.md", text)
    print(text)


def table(runs: list[dict], libraries: list[str], num_rows: int) -> str:
    """Returns a Markdown table of the runs' medians, one line for each library."""
    lines = [
        f"{processes.machine()}. {datetime.date.today().isoformat()}. Microseconds a call on one thread, medians "
        f"[smallest, largest run]; {num_rows:,} rows, or {num_rows // FRAMES_SHARE:,} frames.",
        "",
        tables.header(["library", *MEASURES.values()]),
    ]
    for library in libraries:
        own = [run for run in runs if run["library"] == library]
        cells = [_cell([run[name] for run in own if name in run]) for name in MEASURES]
        lines.append(tables.line([own[0]["versions"], *cells]))
    return "\n".join(lines) + "\n"


def _cell(values: list[float]) -> str:
    return f"{np.median(values):.1f} [{min(values):.1f}, {max(values):.1f}]" if values else ""


if __name__ == "__main__":
    main()
