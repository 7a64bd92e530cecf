"""Several policies with workers on a Ray cluster: the bits are those of processes of one machine."""

import functools
from pathlib import Path

import gin
import pytest
import torch
from ray_cluster import MARKS, ON_RAY, QUICK, wait_until_no_worker_is_left
from toy_games import Meeting
from worker_games import Constant, Walker

from alfish.environments.games import make_games
from alfish.training.trainer import Trainer
from alfish.unrollers import AsyncUnroller
from benchmarks.ray_nodes import Nodes

ray = pytest.importorskip("ray")
pytestmark = MARKS
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def nodes():
    """A head and a node, on which the games and algorithms of the tests can be imported."""
    made = Nodes((4, 4), [HERE, HERE.parent / "tools"], {"enable_worker_prestart": False})
    try:
        yield made
    finally:
        made.close()


def trained(root_dir, workers):
    """Returns the networks and the metrics of a lockstep run, after a policy was built again in the middle."""
    unroller = functools.partial(AsyncUnroller, num_workers=2, mode="lockstep", workers=workers)
    trainer = Trainer(
        root_dir,
        algorithm=Walker,
        environment=functools.partial(make_games, Meeting, num_games=2),
        policies={"x": "*", "y": "*", "z": "*"},
        unroller=unroller,
        unroll_length=8,
        num_iterations=6,
        listeners=[],
        device="cpu",
    )
    try:
        for report in trainer.iterate():
            if report.iterations == 3:
                trainer.unroller.rebuild(trainer.unroller.members[0], {}, parent=trainer.unroller.members[1])
    finally:
        trainer.close()
    assert trainer.unroller.state_dict()["generation"] > 0
    return trainer.algorithm.state_dict(), trainer.metrics.results()


@pytest.mark.usefixtures("nodes")
def test_lockstep_is_bit_identical_to_local_processes(tmp_path, nodes):
    gin.bind_parameter("z/PolicySettings.algorithm", Constant)
    on_ray = trained(tmp_path / "ray", ON_RAY)
    here = trained(tmp_path / "here", QUICK)
    torch.testing.assert_close(on_ray, here, rtol=0, atol=0, equal_nan=True)
    wait_until_no_worker_is_left(nodes)
