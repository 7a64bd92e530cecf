"""Learning: on environments whose right answer is known, in seconds, at three seeds."""

import collections
import copy
from functools import partial

import pytest
import torch

from alfish.algorithms.a2c import A2C
from alfish.algorithms.appo import APPO
from alfish.algorithms.ppo import PPO
from alfish.batches import EpochBatches
from alfish.data import TimeStep
from alfish.environments import make_environment
from alfish.environments.toy import Bandit, NestedBandit, OneState
from alfish.learner import Learner
from alfish.networks import MLP, ActorCritic, Encoder, Flat, Torso
from alfish.schedules import Linear
from alfish.trainer import Trainer
from alfish.unrollers import SyncUnroller

ACTIONS = ["discrete", "box", "multi_discrete", "multi_binary"]
seeds = pytest.mark.parametrize("seed", [0, 1, 2])


def _network(**encoder):
    torso = partial(Torso, encoder=partial(Encoder, **encoder), mlp=partial(MLP, layers=(32,)))
    return partial(ActorCritic, actor_torso=torso, critic_torso=torso)


PPO_SETTINGS = {
    "algorithm": partial(PPO, network=_network(), gamma=0.5, lambda_=0.5),
    "batches": partial(EpochBatches, num_epochs=8, minibatch_size=64),
    "learner": partial(Learner, learning_rate=1e-2, max_grad_norm=0.5),
    "unroll_length": 16,
}
A2C_SETTINGS = {
    "algorithm": partial(A2C, network=_network(), gamma=0.5, entropy_coef=0.0, normalize_advantage=True),
    "batches": partial(EpochBatches, num_epochs=1),
    "learner": partial(Learner, learning_rate=2e-2, max_grad_norm=0.5),
    "unroll_length": 8,
}
APPO_SETTINGS = PPO_SETTINGS | {"algorithm": partial(APPO, network=_network(), gamma=0.5, lambda_=0.5)}
IMPALA_SETTINGS = A2C_SETTINGS | {
    "algorithm": partial(APPO, network=_network(), gamma=0.5, lambda_=1.0, loss="impala"),
    # Nothing holds its policy close to that of old rows, so that steps must become small.
    "learner": partial(Learner, learning_rate=Linear(1e-2), max_grad_norm=0.5),
}


class Lagging(SyncUnroller):
    """Acts with the weights of 4 iterations ago."""

    def __init__(self, environment, algorithm, transforms):
        self._learned, self._acting = algorithm, copy.deepcopy(algorithm)
        self._versions = collections.deque(maxlen=5)
        super().__init__(environment, self._acting, transforms)

    def unroll(self, length, at_random=False):
        self._versions.append(copy.deepcopy(self._learned.state_dict()))
        self._acting.load_state_dict(self._versions[0])
        return super().unroll(length, at_random)


def _trainer(tmp_path, env, seed, num_iterations, **settings):
    environment = partial(make_environment, env_id=env, num_envs=8)
    return Trainer(
        tmp_path, environment=environment, listeners=[], metrics=[], seed=seed, device="cpu",
        num_iterations=num_iterations, **settings,
    )  # fmt: skip


def _evaluate(trainer):
    """Mean return of the policy's mode over 64 episodes of 4 actions, at best 4."""
    evaluator = trainer.evaluator(64)
    try:
        return evaluator.evaluate(64, seed=1000).mean
    finally:
        evaluator.close()


@seeds
@pytest.mark.parametrize("action", ACTIONS)
def test_ppo_solves_the_bandit(tmp_path, action, seed):
    trainer = _trainer(tmp_path, partial(Bandit, action), seed, 20, **PPO_SETTINGS)
    assert _evaluate(trainer) < 3.5
    trainer.train()
    assert _evaluate(trainer) > 3.7


@seeds
@pytest.mark.parametrize("action", ACTIONS)
def test_a2c_solves_the_bandit(tmp_path, action, seed):
    trainer = _trainer(tmp_path, partial(Bandit, action), seed, 150, **A2C_SETTINGS)
    trainer.train()
    assert _evaluate(trainer) > 3.7


@seeds
@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize(
    ("settings", "num_iterations"), [(APPO_SETTINGS, 40), (IMPALA_SETTINGS, 300)], ids=["APPO", "IMPALA"]
)
def test_appo_solves_the_bandit_from_old_rows(tmp_path, settings, num_iterations, action, seed):
    trainer = _trainer(tmp_path, partial(Bandit, action), seed, num_iterations, unroller=Lagging, **settings)
    trainer.train()
    assert _evaluate(trainer) > 3.7


@seeds
@pytest.mark.parametrize("nested_action", [False, True], ids=["MultiDiscrete", "nested"])
def test_ppo_solves_the_nested_bandit(tmp_path, nested_action, seed):
    settings = PPO_SETTINGS | {"algorithm": partial(PPO, network=_network(image=Flat), gamma=0.5, lambda_=0.5)}
    environment = partial(NestedBandit, nested_action, image_size=8)
    trainer = _trainer(tmp_path, environment, seed, 30, **settings)
    trainer.train()
    assert _evaluate(trainer) > 3.7


@seeds
@pytest.mark.parametrize(
    ("settings", "num_iterations"),
    [(PPO_SETTINGS, 50), (A2C_SETTINGS, 150), (APPO_SETTINGS, 50)],
    ids=["PPO", "A2C", "APPO"],
)
def test_a_truncated_stream_of_ones_is_worth_one_over_one_minus_gamma(tmp_path, settings, num_iterations, seed):
    cls = settings["algorithm"].func
    algorithm = partial(cls, network=_network(), gamma=0.9)
    trainer = _trainer(tmp_path, OneState, seed, num_iterations, **settings | {"algorithm": algorithm})
    trainer.train()
    with torch.no_grad():
        time_step = TimeStep(None, None, None, torch.ones(1, 1), None, None)
        value = trainer.algorithm.network.value(time_step, None)
    assert value.item() == pytest.approx(1 / (1 - 0.9), rel=0.02)
