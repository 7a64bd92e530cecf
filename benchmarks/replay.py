"""Cost of replay beside other libraries: microseconds of a call that pushes rows or samples a batch.

  python -m benchmarks.replay --repeats=5

Rows are of 17 observations and 6 actions, in a ring of 1 M rows of which --rows get filled: pushed one by one of one
environment, and eight by eight of eight; then batches of 256 transitions are drawn from the latter. Each library is
handed what its own training loop hands it (numpy arrays, or tensors), and gives what its learner reads. Those that can
also draw batches of 256 by priority from a ring that is full, and give each batch new priorities. alfish also draws 32
transitions of stacks of four 84x84 frames, each stored once; and starts of windows alone, without reading the rows,
by priority and uniformly. Libraries take turns run by run on one thread, in a process each; peers live in the virtual
environment of `benchmarks/peers/replay.txt`.

Writes the raw runs and a table of medians to `benchmarks/results/replay.{csv,md}`, in place of all that was there.
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
