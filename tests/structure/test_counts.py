"""What a step and an update may cost, counted and not timed: operations that torch dispatches, bytes that these write,
and calls in Python; of compiled updates, also how many graphs there are.

A count that rises above its ceiling is a slowdown on every machine. One that falls far below shows that the ceiling
should come down: lower it.
"""

import functools

import numpy as np
import pytest
import torch
from calls import python_calls
from torch.utils._python_dispatch import TorchDispatchMode

from alfish import nest
from alfish.algorithms.dqn import DQN
from alfish.algorithms.ppo import PPO
from alfish.algorithms.sac import SAC
from alfish.algorithms.td3 import TD3
from alfish.environments import make_environment
from alfish.learner.batches import EpochBatches, ReplayBatches
from alfish.learner.learner import Learner
from alfish.training.trainer import Trainer
from alfish.unrollers import SyncUnroller


class Operations(TorchDispatchMode):
    """Counts this thread's operations, those of backward included, and the bytes of what they return, views apart."""

    def __init__(self):
        super().__init__()
        self.count = self.num_bytes = 0

    @classmethod
    def _should_skip_dynamo(cls):
        return False  # avoids importing all of torch's compiler at the first call

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        self.count += 1
        if not function.is_view:
            self.num_bytes += sum(leaf.nbytes for leaf in nest.leaves(result) if isinstance(leaf, torch.Tensor))
        return result


def counts(function):
    with Operations() as operations:
        function()
    return np.array([operations.count, operations.num_bytes, python_calls(function)])


REPLAY = {"capacity": 1000, "batch_size": 32, "warmup_env_steps": 40}
ON_POLICY = {"num_epochs": 1, "minibatch_size": 128}
RECIPES = {
    "ppo": (PPO, "MountainCar-v0", 8, 16, functools.partial(EpochBatches, **ON_POLICY)),
    "dqn": (DQN, "MountainCar-v0", 1, 1, functools.partial(ReplayBatches, **REPLAY)),
    "sac": (SAC, "Pendulum-v1", 1, 1, functools.partial(ReplayBatches, **REPLAY)),
    "td3": (TD3, "Pendulum-v1", 1, 1, functools.partial(ReplayBatches, **REPLAY)),
}
# Of a vector step through numpy, through torch, and of a plain update with the batch it is made on: operations, bytes,
# calls in Python.
CEILINGS = {
    ("ppo", "numpy step"): (1, 96, 284),
    ("ppo", "torch step"): (22, 9_000, 407),
    ("ppo", "update"): (403, 1_950_000, 797),
    ("dqn", "numpy step"): (2, 12, 109),
    ("dqn", "torch step"): (21, 1_080, 190),
    ("dqn", "update"): (208, 321_000, 629),
    ("sac", "numpy step"): (1, 4, 110),
    ("sac", "torch step"): (24, 1_060, 200),
    ("sac", "update"): (443, 7_800_000, 1137),
    ("td3", "numpy step"): (1, 4, 101),
    ("td3", "torch step"): (22, 1_060, 184),
    ("td3", "update"): (269, 7_230_000, 824),
}


def make(root_dir, recipe, numpy_policy=None, compile=False):
    algorithm, env_id, num_envs, unroll_length, batches = RECIPES[recipe]
    trainer = Trainer(
        root_dir,
        algorithm=algorithm,
        environment=functools.partial(make_environment, env_id=env_id, num_envs=num_envs),
        batches=batches,
        unroller=functools.partial(SyncUnroller, numpy_policy=numpy_policy),
        learner=functools.partial(Learner, max_grad_norm=0.5, compile=compile),
        unroll_length=unroll_length,
        listeners=[],
        num_env_steps=10**6,
        device="cpu",
    )
    trainer.start()
    iterations = trainer.iterate()
    while trainer.clock.updates < 4:
        next(iterations)
    return trainer


def of_a_step(trainer):
    """Of one more vector step in an unroll: the difference between two unrolls, which have all else in common."""
    few, many = (counts(lambda n=n: trainer.unroller.unroll(n)) for n in (4, 12))
    return (many - few) / 8


def of_an_update(trainer):
    """Of one update, or of two halved, with sampling or preprocessing."""
    if trainer.algorithm.on_policy:
        return counts(lambda: trainer.learner.train(trainer.batches.chunks(0), summarize=False))

    def two():
        for _ in range(2):
            steps = trainer.batches.state_dict()["num_updates"] + 41
            trainer.learner.train(trainer.batches.chunks(steps, not trainer.learner.is_plain), False)

    return counts(two) / 2


@pytest.mark.parametrize(("recipe", "what"), CEILINGS)
def test_cost_is_close_below_its_limit(tmp_path, recipe, what):
    trainer = make(tmp_path, recipe, 0 if what == "numpy step" else None)
    found = of_an_update(trainer) if what == "update" else of_a_step(trainer)
    trainer.close()
    # Of operations there is not one more; bytes and calls vary a little with what episodes do.
    for count, ceiling, slack in zip(found, CEILINGS[recipe, what], (1.0, 1.02, 1.05), strict=True):
        assert 0.8 * ceiling <= count <= slack * ceiling, f"{recipe}, {what}: {found}"


# Of a step of eight environments in an evaluation.
EVALUATION_CEILINGS = {"ppo": (23, 10688, 538), "dqn": (22, 10592, 523), "sac": (25, 10592, 512)}


@pytest.mark.parametrize("recipe", EVALUATION_CEILINGS)
def test_an_evaluation_step_stays_below_its_cost_limit(tmp_path, recipe):
    trainer = make(tmp_path, recipe)
    evaluator = trainer.evaluator(8)
    with evaluator._acting(0, False):
        rows = evaluator._rows(8, 0, False)
        next(rows), next(rows)
        found = counts(lambda: next(rows))
    evaluator.close(), trainer.close()
    for count, ceiling, slack in zip(found, EVALUATION_CEILINGS[recipe], (1.0, 1.02, 1.05), strict=True):
        assert 0.8 * ceiling <= count <= slack * ceiling, f"{recipe}: {found}"


# Of a call of a policy that acts through numpy.
ACT_CEILINGS = {"ppo": (0, 0, 62), "dqn": (0, 0, 58), "sac": (0, 0, 66)}


@pytest.mark.parametrize("recipe", ACT_CEILINGS)
def test_a_policy_call_stays_below_its_cost_limit(tmp_path, recipe):
    trainer = make(tmp_path, recipe)
    policy, observation = trainer.policy(), trainer.environment.observation_space.sample()
    for _ in range(10):  # the first calls compare numpy with torch
        policy.act(observation)
    found = counts(lambda: policy.act(observation))
    trainer.close()
    for count, ceiling, slack in zip(found, ACT_CEILINGS[recipe], (1.0, 1.0, 1.05), strict=True):
        assert 0.8 * ceiling <= count <= slack * ceiling, f"{recipe}: {found}"


# Of a compiled update with its batch: graphs, calls in Python, each kernel among them.
COMPILED_CEILINGS = {"ppo": (1, 350), "dqn": (1, 128), "sac": (1, 168), "td3": (2, 179)}


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(name, marks=pytest.mark.long if name in ("sac", "td3") else pytest.mark.slow)
        for name in COMPILED_CEILINGS
    ],
)
def test_compiled_updates_make_no_extra_graphs_or_calls(tmp_path, recipe):
    trainer = make(tmp_path, recipe, compile=True)
    learner, iterations = trainer.learner, trainer.iterate()
    while trainer.clock.updates < 16:
        next(iterations)
    calls = of_an_update(trainer)[2]
    for _ in range(8):
        next(iterations)
    trainer.close()
    num_graphs, ceiling = COMPILED_CEILINGS[recipe]
    assert not learner.is_plain and len(learner._compiled._made) == num_graphs
    assert 0.8 * ceiling <= calls <= 1.05 * ceiling, f"{recipe}: {calls}"
