"""Runs with `HostUnroller` and `DeviceUnroller` on a GPU, and on the CPU where there is none."""

import functools

import pytest
import torch
from scripted import assert_equal

from alfish import nest
from alfish.algorithms.acting import changing_tensors
from alfish.algorithms.sac import SAC
from alfish.environments import make_environment
from alfish.environments.functional.tasks import Pendulum
from alfish.learner.batches import ReplayBatches
from alfish.learner.learner import Learner
from alfish.networks import MLP, CriticEnsemble
from alfish.replay import AlignedRingBuffer, RingBuffer
from alfish.training.listeners import CheckpointSaver
from alfish.training.trainer import Trainer
from alfish.unrollers import DeviceUnroller, HostUnroller

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=[needs_gpu, pytest.mark.slow])]


class ShortPendulum(Pendulum):
    max_episode_steps = 7


# Environment, unroller, buffer.
CASES = {
    "environments on the CPU": ("Pendulum-v1", HostUnroller, RingBuffer),
    "environments on the device": (
        ShortPendulum,
        DeviceUnroller,
        functools.partial(AlignedRingBuffer, end_fraction=1.0),
    ),
}


def trainer_of(root_dir, case, device, num_env_steps=96, width=8, batch_size=8, **learner):
    env_id, unroller, buffer = CASES[case]
    return Trainer(
        root_dir,
        algorithm=functools.partial(
            SAC,
            actor_mlp=functools.partial(MLP, layers=(width,)),
            critic=functools.partial(CriticEnsemble, layers=(width,)),
        ),
        environment=functools.partial(make_environment, env_id, 2),
        unroller=unroller,
        batches=functools.partial(
            ReplayBatches, capacity=200, batch_size=batch_size, warmup_env_steps=8, buffer=buffer
        ),
        learner=functools.partial(Learner, **{"compile": False, **learner}),
        unroll_length=1,
        num_env_steps=num_env_steps,
        listeners=[CheckpointSaver(48)],
        seed=3,
        device=device,
    )


def trained(root_dir, *arguments, **settings):
    trainer = trainer_of(root_dir, *arguments, **settings)
    trainer.train()
    return nest.map(torch.Tensor.cpu, changing_tensors(trainer.algorithm, trainer.transforms))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES)
def test_a_seed_gives_the_same_bits(tmp_path, case, device):
    first, second = (trained(tmp_path / name, case, device) for name in "ab")
    assert_equal(first, second)
    assert all(tensor.isfinite().all() for tensor in first)


@needs_gpu
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_no_iteration_waits(tmp_path, case):
    trainer = trainer_of(tmp_path, case, "cuda")
    trainer.start()
    iterations = trainer.iterate()
    while trainer.clock.updates < 8:
        next(iterations)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(4):
            next(iterations)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    trainer.close()


@needs_gpu
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("learner", [{"cuda_graphs": True}, {"precision": "tf32"}, {"precision": "bfloat16"}], ids=str)
def test_graphs_of_a_gpu_agree_with_plain_updates(tmp_path, case, learner):
    """The learner compares its first graphs with plain updates, and falls back if they differ."""
    trainer = trainer_of(tmp_path, case, "cuda", width=256, batch_size=256, compile=True, **learner)
    trainer.train()
    assert not trainer.learner.is_plain and trainer.clock.updates > 40
    graphs = trainer.learner._compiled._made.values()
    assert all((graph.recorded is not None) == ("cuda_graphs" in learner) for graph in graphs) and graphs
