"""What a step and an update may cost, counted and not timed: operations that torch dispatches, and calls in Python.

A count that rises above its ceiling is a slowdown on every machine. One that falls far below shows that the ceiling
should come down: lower it.
"""

import functools
import sys

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from alfish.algorithms.dqn import DQN
from alfish.algorithms.ppo import PPO
from alfish.algorithms.sac import SAC
from alfish.algorithms.td3 import TD3
from alfish.batches import EpochBatches, ReplayBatches
from alfish.environments import make_environment
from alfish.learner import Learner
from alfish.trainer import Trainer
from alfish.unrollers import SyncUnroller


class Operations(TorchDispatchMode):
    """Counts the operations of this thread, those of backward included."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        self.count += 1
        return function(*arguments, **(keywords or {}))


def python_calls(function):
    """How many Python functions and builtins `function()` calls."""
    count = 0

    def on_event(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(on_event)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def counts(function):
    with Operations() as operations:
        function()
    return operations.count, python_calls(function)


REPLAY = {"capacity": 1000, "batch_size": 32, "warmup_env_steps": 40}
ON_POLICY = {"num_epochs": 1, "minibatch_size": 128}
RECIPES = {
    "ppo": (PPO, "MountainCar-v0", 8, 16, functools.partial(EpochBatches, **ON_POLICY)),
    "dqn": (DQN, "MountainCar-v0", 1, 1, functools.partial(ReplayBatches, **REPLAY)),
    "sac": (SAC, "Pendulum-v1", 1, 1, functools.partial(ReplayBatches, **REPLAY)),
    "td3": (TD3, "Pendulum-v1", 1, 1, functools.partial(ReplayBatches, **REPLAY)),
}
# Of a vector step through numpy, through torch, and of a plain update with the batch it is made on.
CEILINGS = {
    ("ppo", "numpy step"): (3, 370),
    ("ppo", "torch step"): (26, 460),
    ("ppo", "update"): (410, 800),
    ("dqn", "numpy step"): (4, 150),
    ("dqn", "torch step"): (24, 195),
    ("dqn", "update"): (235, 670),
    ("sac", "numpy step"): (2, 185),
    ("sac", "torch step"): (28, 205),
    ("sac", "update"): (445, 1490),
    ("td3", "numpy step"): (2, 155),
    ("td3", "torch step"): (26, 200),
    ("td3", "update"): (270, 1190),
}


def make(root_dir, recipe, numpy_after=None):
    algorithm, env_id, num_envs, unroll_length, batches = RECIPES[recipe]
    trainer = Trainer(
        root_dir,
        algorithm=algorithm,
        environment=functools.partial(make_environment, env_id=env_id, num_envs=num_envs),
        batches=batches,
        unroller=functools.partial(SyncUnroller, numpy_after=numpy_after),
        learner=functools.partial(Learner, max_grad_norm=0.5, compile=False),
        unroll_length=unroll_length,
        listeners=[],
        num_env_steps=10**6,
        device="cpu",
    )
    trainer.start()
    iterations = trainer.iterate()
    while trainer.updates < 4:
        next(iterations)
    return trainer


def of_a_step(trainer):
    """Of one more vector step in an unroll: the difference between two unrolls, which have all else in common."""
    (few, few_calls), (many, many_calls) = (counts(lambda n=n: trainer.unroller.unroll(n)) for n in (4, 12))
    return (many - few) / 8, (many_calls - few_calls) / 8


def of_an_update(trainer):
    """Of one update, or of two halved, with sampling or preprocessing."""
    if trainer.algorithm.on_policy:
        return counts(lambda: trainer.learner.train(trainer.batches.chunks(0), summarize=False))

    def two():
        for _ in range(2):
            trainer.learner.train(trainer.batches.chunks(trainer.batches.state_dict()["num_updates"] + 41), False)

    operations, calls = counts(two)
    return operations / 2, calls / 2


@pytest.mark.parametrize(("recipe", "what"), CEILINGS)
def test_what_it_costs_stays_below_its_ceiling_and_not_far_below(tmp_path, recipe, what):
    trainer = make(tmp_path, recipe, 0 if what == "numpy step" else None)
    found = of_an_update(trainer) if what == "update" else of_a_step(trainer)
    trainer.close()
    for count, ceiling in zip(found, CEILINGS[recipe, what]):
        assert 0.8 * ceiling <= count <= 1.05 * ceiling, f"{recipe}, {what}: {found}"
