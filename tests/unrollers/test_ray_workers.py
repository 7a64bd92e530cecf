"""Workers on a Ray cluster: the rows are those of one machine, and every failure has one sentence."""

import functools
import json

import pytest
import torch
from ray_cluster import nodes  # noqa: F401
from test_async import ALIKE, unroller_of
from worker_parts import Seeing, SeeingOffPolicy

from alfish import nest
from alfish.__main__ import main
from alfish.unrollers import Workers
from alfish.unrollers.ray import RayWorkers

pytestmark = [
    pytest.mark.ray,
    pytest.mark.usefixtures("nodes"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray", "ignore::FutureWarning:ray"),
]
ray = pytest.importorskip("ray")

QUICK = functools.partial(Workers, close_timeout=2.0)
ON_RAY = functools.partial(RayWorkers, workers=QUICK, per_host=2, cpus_per_worker=0.5)


def lockstep(algorithm, workers):
    """Rows and records of five iterations of four workers, whose weights change."""
    unroller = unroller_of(ALIKE, algorithm, num_workers=4, mode="lockstep", workers=workers)
    rows = []
    try:
        for k in range(5):
            rows.append((nest.map(torch.clone, unroller.unroll(4)), unroller.records))
            unroller._algorithm.weight.data.fill_(k + 1)
            unroller.publish()
            unroller._ledger.check_valid()
    finally:
        unroller.close()
    return rows


@pytest.mark.parametrize("algorithm, per_host", [(Seeing, 1), (Seeing, 2), (SeeingOffPolicy, 2)])
def test_in_lockstep_every_bit_is_that_of_one_machine(algorithm, per_host):
    here = lockstep(algorithm, QUICK)
    there = lockstep(algorithm, functools.partial(ON_RAY, per_host=per_host))
    for (one, arrived), (other, also) in zip(here, there, strict=True):
        assert all(map(torch.equal, nest.leaves(one), nest.leaves(other)))
        assert (arrived.step_type == also.step_type).all() and (arrived.reward == also.reward).all()


def test_the_shipped_conf_trains_on_a_cluster(tmp_path):
    bindings = [
        *("AsyncUnroller.num_workers=4", "RayWorkers.per_host=2", "AsyncUnroller.mode='lockstep'"),
        *("Trainer.num_env_steps=None", "Trainer.num_iterations=3", "Trainer.unroll_length=8"),
        *("make_environment.num_envs=2", "EpochBatches.num_epochs=2", "EpochBatches.minibatch_size=8"),
        *("Evaluate.num_episodes=1", "Trainer.max_evaluation_length=40", "Learner.compile=False"),
    ]
    files = ["--gin_file=appo_cartpole.gin", "--gin_file=ray.gin"]
    params = [f"--gin_param={binding}" for binding in bindings]
    assert main(["train", *files, *params, f"--root_dir={tmp_path / 'run'}"]) == 0
    done = json.loads((tmp_path / "run" / "done").read_text())
    assert done["iterations"] == 3 and 150 < done["env_steps"] <= 3 * 8 * 8  # rows of resets do not count
    assert not ray.is_initialized()
