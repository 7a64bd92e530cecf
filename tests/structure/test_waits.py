"""Where an iteration waits for a GPU, counted by `far_device` on a machine without one.

A GPU works while Python continues. Where Python reads a value, it waits until the GPU has done all of its work, and
then the GPU waits for Python. The aim is one read for each unroll, and none in a step.
"""

import functools
from collections import Counter
from pathlib import Path

import gin
import gymnasium
import numpy as np
import pytest
import torch
from fake_libraries import TASK, install_isaac_lab
from fakes import StampedSimulator
from far_device import FarDevice
from gymnasium import spaces

from alfish.algorithms.composition import RND, Composed
from alfish.algorithms.flashsac import FlashSAC
from alfish.algorithms.ppo import PPO
from alfish.algorithms.sac import SAC
from alfish.algorithms.td3 import TD3
from alfish.environments import make_environment
from alfish.environments.toy import TensorPointMass
from alfish.learner.batches import EpochBatches, ReplayBatches
from alfish.learner.kl_adaptive import KLAdaptive
from alfish.learner.learner import Learner
from alfish.parameters.schedules import Linear
from alfish.replay import AlignedRingBuffer
from alfish.simulators.isaac_lab import IsaacLab
from alfish.training.trainer import Trainer
from alfish.transforms import ObservationNormalizer, RewardNormalizer
from alfish.unrollers import DeviceUnroller, HostUnroller, SyncUnroller

NUM_ENVS = 16
# Algorithm, length of an unroll, length of an episode, batches.
RECIPES = {
    "ppo": (PPO, 8, 5, functools.partial(EpochBatches, num_epochs=2, minibatch_size=64)),
    "sac": (
        SAC,
        1,
        100,  # no reset in the iterations that are counted, since it is not a step for which an update is due
        functools.partial(
            ReplayBatches, capacity=4000, batch_size=32, warmup_env_steps=64, updates_per_env_step=1 / NUM_ENVS
        ),
    ),
}
NORMALIZERS = [ObservationNormalizer, RewardNormalizer]
# Reads of an iteration, by the function that reads.
UNROLL = {"unrollers/sync.py: _record": 1}
REPLAY = {"replay/row_store.py: accept": 1}
IN_LINE = {"data.py: in_line": 1}  # how many rows an unroll has, where episodes end and begin in the same step


class Far(TensorPointMass):
    """Has its tensors on the far device."""

    def __init__(self, num_envs, length):
        super().__init__(num_envs, length)
        self.device = FarDevice.device
        self._position, self._elapsed = self._position.to(self.device), self._elapsed.to(self.device)


class Pushed(gymnasium.Env):
    """Has its rows on the CPU: a point on a line is pushed, in episodes of fixed length."""

    observation_space, action_space = spaces.Box(-100, 100, (1,), np.float32), spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self, length):
        self._length = length

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._position, self._elapsed = self.np_random.uniform(-1, 1, 1).astype(np.float32), 0
        return self._position, {}

    def step(self, action):
        self._position, self._elapsed = self._position + action, self._elapsed + 1
        return self._position, -float(abs(self._position[0])), False, self._elapsed == self._length, {}


class FarSimulator(StampedSimulator):
    action_space = spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self, num_envs, length):
        super().__init__(num_envs, FarDevice.device, final="always", lengths=(length, 3))


class FarIsaacLab(IsaacLab):
    def __init__(self, num_envs, length):
        super().__init__(TASK, num_envs)
        self.action_space = FarSimulator.action_space


@pytest.fixture(autouse=True)
def small_networks():
    gin.parse_config("MLP.layers = (8,)\nCriticEnsemble.layers = (8,)")


@pytest.fixture
def far(monkeypatch):
    with FarDevice() as far:
        monkeypatch.setattr("alfish.training.run_parts.device_named", lambda name: torch.device(name))
        yield far


def make(
    root_dir, recipe, transforms=(), env=Far, device="meta", learning_rate=3e-4, unroller=SyncUnroller, **settings
):
    algorithm, unroll_length, length, batches = RECIPES[recipe]
    trainer = Trainer(
        root_dir,
        algorithm=functools.partial(algorithm, **settings),
        environment=functools.partial(
            make_environment, env_id=functools.partial(env, length=length), num_envs=NUM_ENVS
        ),
        batches=batches,
        transforms=list(transforms),
        unroller=unroller,
        learner=functools.partial(Learner, max_grad_norm=0.5, compile=False, learning_rate=learning_rate),
        unroll_length=unroll_length,
        listeners=[],
        num_env_steps=10**6,
        device=device,
    )
    trainer.start()
    iterations = trainer.iterate()
    while trainer.clock.updates < 4:
        next(iterations)
    return trainer, iterations


def waits_of(far, iterations, count=2):
    """Returns the waits of an iteration; all of `count` iterations have the same."""
    found = []
    for _ in range(count):
        far.clear()
        next(iterations)
        found.append(far.where())
    assert all(one == found[0] for one in found)
    return found[0]


@pytest.mark.parametrize("transforms", [(), NORMALIZERS], ids=["raw", "normalized"])
@pytest.mark.parametrize(("recipe", "expected"), [("ppo", UNROLL), ("sac", UNROLL | REPLAY)])
def test_an_iteration_waits_only_here(tmp_path, far, recipe, expected, transforms):
    trainer, iterations = make(tmp_path, recipe, transforms)
    expected = Counter(expected)
    assert waits_of(far, iterations) == expected
    trainer.close()


@pytest.mark.parametrize("transforms", [(), NORMALIZERS], ids=["raw", "normalized"])
@pytest.mark.parametrize(
    ("recipe", "unroller", "expected"),
    [
        ("sac", HostUnroller, {}),
        ("ppo", functools.partial(HostUnroller, lag=0), {}),
        ("sac", SyncUnroller, {"environments/environment.py: convert": 2}),
    ],
)
def test_an_iteration_with_environments_on_the_cpu_waits_only_here(
    tmp_path, far, recipe, unroller, expected, transforms
):
    trainer, iterations = make(tmp_path, recipe, transforms, Pushed, unroller=unroller)
    assert waits_of(far, iterations) == Counter(expected)
    assert far.unpinned == []
    trainer.close()


@pytest.mark.parametrize("env", [FarSimulator, FarIsaacLab])
@pytest.mark.parametrize(
    ("algorithm", "unroller", "expected"),
    [(SAC, SyncUnroller, UNROLL), (SAC, DeviceUnroller, {}), (TD3, DeviceUnroller, {}), (FlashSAC, DeviceUnroller, {})],
)
def test_an_iteration_with_an_aligned_replay_waits_for_its_records_only(
    tmp_path, far, monkeypatch, env, algorithm, unroller, expected
):
    install_isaac_lab(monkeypatch, device=far.device)
    _, *lengths, batches = RECIPES["sac"]
    monkeypatch.setitem(RECIPES, "sac", (algorithm, *lengths, functools.partial(batches, buffer=AlignedRingBuffer)))
    trainer, iterations = make(tmp_path, "sac", env=env, unroller=unroller)
    assert waits_of(far, iterations) == Counter(expected)
    trainer.close()


@pytest.mark.parametrize("env", [FarSimulator, FarIsaacLab])
@pytest.mark.parametrize(("recipe", "expected"), [("ppo", UNROLL), ("sac", UNROLL | REPLAY)])
def test_an_iteration_in_a_simulator_waits_only_here(tmp_path, far, monkeypatch, recipe, expected, env):
    install_isaac_lab(monkeypatch, device=far.device)
    trainer, iterations = make(tmp_path, recipe, env=env)
    assert waits_of(far, iterations) == expected | IN_LINE
    trainer.close()


def test_weights_of_separate_values_are_not_read(tmp_path, far, monkeypatch):
    algorithm, *rest = RECIPES["ppo"]
    parts = {"rewards": [functools.partial(RND, coef=Linear(1.0, 0.5))], "separate_values": True}
    monkeypatch.setitem(RECIPES, "ppo", (functools.partial(Composed, algorithm=algorithm, **parts), *rest))
    trainer, iterations = make(tmp_path, "ppo")
    assert waits_of(far, iterations) == UNROLL
    trainer.close()


def test_a_limit_of_the_kl_is_not_read(tmp_path, far):
    trainer, iterations = make(tmp_path, "ppo", learning_rate=1e-2, target_kl=1e-4)
    assert waits_of(far, iterations) == UNROLL
    made = trainer.learner.updates
    trainer.learner.state_dict()  # settles the last updates
    assert 0 < trainer.learner.updates < made
    trainer.close()


def test_a_learning_rate_that_follows_the_kl_is_not_read(tmp_path, far):
    trainer, iterations = make(tmp_path, "ppo", learning_rate=KLAdaptive(1e-3))
    before = trainer.learner.state_dict()["rates"]["all"].item()
    assert waits_of(far, iterations) == UNROLL
    assert trainer.learner.state_dict()["rates"]["all"].item() != before
    trainer.close()


def test_no_step_of_an_unroll_waits(tmp_path, far):
    trainer, _ = make(tmp_path, "ppo", NORMALIZERS)
    found = []
    for length in (4, 12):
        far.clear()
        trainer.unroller.unroll(length)
        found.append(len(far.waits))
    assert found[0] == found[1]
    trainer.close()


def test_a_sent_tensor_returns_unchanged(far):
    sent = torch.arange(6.0).view(2, 3)
    there, back = sent.to(far.device), torch.empty(3, 2).pin_memory()
    there[0].zero_()
    assert back.copy_(there.t(), non_blocking=True) is back
    assert back.tolist() == [[0, 3], [0, 4], [0, 5]]


def test_training_on_another_device_equals_the_cpu(tmp_path, far):
    found = []
    for device, env in (("cpu", TensorPointMass), ("meta", Far)):
        trainer, iterations = make(tmp_path / device, "ppo", NORMALIZERS, env, device)
        next(iterations)
        found.append([tensor.detach().cpu() for tensor in trainer.algorithm.state_dict().values()])
        trainer.close()
    for on_cpu, on_far in zip(*found, strict=True):
        assert torch.allclose(on_cpu, on_far, rtol=1e-3, atol=1e-4)


OPERATIONS = {
    "waits": {
        "a number": lambda x: x[0].item(),
        "a branch": lambda x: bool((x > 0).any()),
        "a list": lambda x: x.tolist(),
        "a copy": lambda x: x.cpu(),
        "nonzero": lambda x: x.nonzero(),
        "unique": lambda x: x.unique(),
        "masked_select": lambda x: x.masked_select(x > 0),
        "rows by a mask": lambda x: x[x > 0],
        "writing rows by a mask": lambda x: x.__setitem__(x > 0, -x[:2]),
        "equal": lambda x: torch.equal(x, x),
        "bincount": lambda x: x.long().abs().bincount(),
        "repeats": lambda x: x.repeat_interleave(x.long().abs()),
    },
    "unpinned": {
        "a copy": lambda x: torch.ones(3).to(x.device),
        "writing a copy": lambda x: x.copy_(torch.ones(3), non_blocking=True),
        "an index": lambda x: x[torch.tensor([0, 1])],
    },
    None: {
        "where": lambda x: torch.where(x > 0, x, 0),
        "a number by a mask": lambda x: x.__setitem__(x > 0, 1.0),
        "rows by numbers": lambda x: x[(x > 0).long()],
        "known repeats": lambda x: x.repeat_interleave((x > -9).long(), output_size=len(x)),
        "a sum": lambda x: x.sum().square_(),
        "a pinned copy": lambda x: x.copy_(torch.ones(3).pin_memory(), non_blocking=True),
        "a copy to pinned memory": lambda x: torch.ones(3).pin_memory().copy_(x, non_blocking=True),
    },
}


@pytest.mark.parametrize("kind", OPERATIONS)
def test_the_far_device_counts_operations_that_wait(far, monkeypatch, kind):
    monkeypatch.setattr("far_device.PACKAGE", Path(__file__).parent)
    for name, call in OPERATIONS[kind].items():
        x = torch.from_numpy(np.array([1.0, -2.0, 3.0], np.float32)).to(far.device)
        far.clear()
        call(x)
        assert [len(far.waits), len(far.unpinned)] == [kind == "waits", kind == "unpinned"], name
