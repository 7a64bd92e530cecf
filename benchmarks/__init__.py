"""Measurements: throughput compared with other libraries, and returns of the shipped confs. Not part of the package.

Most are commands, `python -m benchmarks.NAME`, to be called from the project's root; `--help` says what one measures
and writes. `throughput`, `shipped`, `time_to_threshold` and `replay` compare with other libraries. `growth`, `memory`,
`matmul`, `offline`, `threads`, `time_limits`, `transfer` and `exporting` measure alfish only. `data_sets` records the
data of the offline results, `learning` trains and evaluates the confs, `pictures` draws their curves, and `frontier`
draws return against CPU time. `cluster` measures workers on Ray, and what they lose when they are killed; `cost_model`
simulates larger clusters. `fingerprints` compares the bits of training with those of earlier code, and
`package_graph` draws the packages and their imports.

`processes` starts other processes (scripts in `runs/`, requirements of the other libraries in `peers/`), `timing` times
calls, and `tables` writes rows and tables."""

from pathlib import Path

PROJECT = Path(__file__).parent.parent
RESULTS = PROJECT / "benchmarks" / "results"
