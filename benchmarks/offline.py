"""Cost of importing and loading a data set: seconds, and peak memory of the process.

  python -m benchmarks.offline --transitions=1_000_000 --episode_length=1000

Writes a data set of 17 observations and 6 actions with Minari (HDF5). Then one process runs `alfish import`, and
another loads the result into an OfflineBuffer and draws batches. Needs the extra 'minari', and
Linux, which reports a process's memory. Writes a table to `benchmarks/results/offline.md`.
"""

import argparse
import os
import sys
import tempfile

from benchmarks import RESULTS, processes, tables
from benchmarks.runs.offline import STEPS

HEADER = "| | seconds | most memory, MB | |\n|---|---|---|---|"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transitions", type=int, default=1_000_000)
    parser.add_argument("--episode_length", type=int, default=1000)
    parser.add_argument("--directory", default=None, help="where a temporary directory for the data is made")
    arguments = parser.parse_args()
    lines = [HEADER]
    with tempfile.TemporaryDirectory(dir=arguments.directory) as temporary:
        directory = os.path.abspath(temporary)
        environment = processes.with_threads(1) | {"MINARI_DATASETS_PATH": directory}
        sizes = [str(arguments.transitions), str(arguments.episode_length)]
        for step in STEPS:
            command = [sys.executable, "-m", "benchmarks.runs.offline", step, *sizes, directory]
            for row in processes.run_script(command, environment)["rows"]:
                lines.append(tables.line(row))
                print(lines[-1], flush=True)
    count = f"{arguments.transitions:,} transitions in episodes of {arguments.episode_length:,}"
    head = f"# Offline data\n\n`python -m benchmarks.offline`: {count}; {processes.machine()}\n\n"
    tables.write_text(RESULTS / "offline.md", head + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
