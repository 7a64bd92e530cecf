"""A Ray cluster of several nodes on this machine, for tests and for nobody else."""

import contextlib
import os
import tempfile
from pathlib import Path

import pytest

import alfish

STORE_BYTES = 80 << 20  # Ray takes no less than 75 MiB


class Nodes:
    """A head without processor cores, and nodes with some, each with an object store and a raylet of its own."""

    def __init__(self, *cpus):
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        # As on another machine, nothing but what is installed there can be imported: here alfish, and the tests' parts.
        paths = [str(Path(alfish.__file__).parents[1]), str(Path(__file__).parent)]
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
        from ray.cluster_utils import Cluster

        self._directory = tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True)
        head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": STORE_BYTES}
        self.cluster = Cluster(initialize_head=True, head_node_args={**head, "temp_dir": self._directory.name})
        self.nodes = [self.add(count) for count in cpus]

    @property
    def address(self):
        return self.cluster.address

    def add(self, cpus):
        return self.cluster.add_node(num_cpus=cpus, object_store_memory=STORE_BYTES)

    def close(self):
        from ray.exceptions import RaySystemError, RpcError

        with contextlib.suppress(RpcError, RaySystemError):  # a busy machine's GCS may end before it answers
            self.cluster.shutdown()
        self._directory.cleanup()


@pytest.fixture(scope="module")
def nodes():
    """Three nodes of four cores. RAY_ADDRESS names them, so that no test finds somebody else's cluster."""
    pytest.importorskip("ray")
    made = Nodes(4, 4, 4)
    before = os.environ.get("RAY_ADDRESS")
    os.environ["RAY_ADDRESS"] = made.address
    try:
        yield made
    finally:
        if before is None:
            del os.environ["RAY_ADDRESS"]
        else:
            os.environ["RAY_ADDRESS"] = before
        made.close()
