"""A Ray cluster of this machine for a module of tests, and workers on it."""

import functools
import time
from pathlib import Path

import pytest

from alfish.unrollers import Workers
from alfish.unrollers.ray import RayWorkers
from benchmarks.ray_nodes import Nodes

# Ray's own code warns, when it is imported and in its threads.
MARKS = [
    pytest.mark.ray,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray", "ignore::FutureWarning:ray"),
]
QUICK = functools.partial(Workers, close_timeout=2.0)
ON_RAY = functools.partial(RayWorkers, workers=QUICK, per_host=2, cpus_per_worker=0.5)


@pytest.fixture(scope="module")
def nodes():
    """A head and three nodes, on which the tests' modules can be imported. A dead node is noticed in 2 s, not in 15."""
    pytest.importorskip("ray")
    health = {"health_check_period_ms": 500, "health_check_failure_threshold": 4, "health_check_timeout_ms": 5000}
    # Else each node starts a process for each of its cores, most of which no test uses.
    idle = {"enable_worker_prestart": False, "prestart_worker_first_driver": False}
    here = Path(__file__).parent
    made = Nodes((4, 4, 4), [here, here.parent / "tools"], health | idle)
    try:
        yield made
    finally:
        made.close()
    assert made.processes() == []


def wait_until_no_worker_is_left(nodes, seconds=60):
    """Ray kills actors in the background, and hosts that it cannot reach end themselves."""
    deadline = time.monotonic() + seconds
    while left := nodes.processes("alfish.processes.server"):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
