"""Workers, actors and nodes die, and one is stopped; no row is torn, lost or doubled, and no process is left.

Half a minute, or ALFISH_SOAK_SECONDS (ten minutes in `make soak`).
"""

import os
import time
from pathlib import Path

import pytest
from ray_cluster import MARKS, nodes  # noqa: F401

from benchmarks.ray_runs import soak

pytestmark = [*MARKS, pytest.mark.usefixtures("nodes")]
pytest.importorskip("ray")
SECONDS = float(os.environ.get("ALFISH_SOAK_SECONDS", "20"))
KINDS = ("actor", "worker", "raylet", "stop")


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_every_row_is_right_while_hosts_die(nodes):  # noqa: F811
    lines, memory = [], []
    began = time.monotonic()
    num_rows, breaking = soak(
        nodes,
        SECONDS,
        num_workers=4,
        settle=10.0,
        log=lambda line: (lines.append(line), memory.append(resident_bytes())),
        kinds=KINDS,
        pause=(3.0, 5.0),
        host_timeout=3.0,
    )
    print(f"{num_rows} rows, {breaking}, {time.monotonic() - began:.0f} s")
    assert all(breaking.broken[kind] > 0 for kind in KINDS) and num_rows > 1000
    assert len({kind for kind, _ in breaking.waits}) >= 3  # new rows came after most of them
    assert any("silent for" in line for line in lines)
    assert memory[-1] - memory[len(memory) // 3] < 30e6
    deadline = time.monotonic() + 20  # hosts that were stopped, or lost their node, end themselves
    while left := nodes.processes("alfish.unrollers.workers.server"):
        assert time.monotonic() < deadline, left
        time.sleep(0.2)
