"""Measurements: throughput beside other libraries, and returns of the shipped confs. Not part of the package.

Each is a command, `python -m benchmarks.NAME`, to be called from the project's root; `--help` says what it measures and
what it writes. Beside peers: `throughput`, `time_to_threshold` and `replay`. Of alfish alone: `growth`, `memory`,
`products` and `offline`. What the confs learn: `data_sets` records what is offline, `learning` trains and evaluates,
`pictures` draws.

They share how other processes are started (`processes`; the scripts are in `runs/`, and what peers' virtual
environments are made of in `peers/`), the loop that times calls (`timing`), and how rows and tables are written
(`tables`).
"""

from pathlib import Path

PROJECT = Path(__file__).parent.parent
RESULTS = PROJECT / "benchmarks" / "results"
