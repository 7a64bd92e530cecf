"""Learning: on environments whose right answer is known, in seconds.

Seed 0 of few cases runs in the fast suite, seed 0 of the others is slow, further seeds are long.
"""

import collections
import copy
from functools import partial

import pytest
import torch
from toys import Bandit, NestedBandit, OneState

from alfish.algorithms.a2c import A2C
from alfish.algorithms.appo import APPO
from alfish.algorithms.ppo import PPO
from alfish.data import TimeStep
from alfish.environments import make_environment
from alfish.learner.batches import EpochBatches
from alfish.learner.learner import Learner
from alfish.networks import MLP, ActorCritic, Encoder, Flat, Torso
from alfish.parameters.schedules import Linear
from alfish.training.trainer import Trainer
from alfish.unrollers import SyncUnroller


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


def seeds(names, *fast, slow=()):
    """Parametrizes by `names` and `seed`; only seed 0 of the cases in `fast` is unmarked."""
    cases = [(case if isinstance(case, tuple) else (case,)) for case in (*fast, *slow)]
    marks = [()] * len(fast) + [pytest.mark.slow] * len(slow)
    parameters = [pytest.param(*case, 0, marks=mark) for case, mark in zip(cases, marks)]
    parameters += [pytest.param(*case, seed, marks=pytest.mark.long) for case in cases for seed in (1, 2)]
    return pytest.mark.parametrize(f"{names}, seed", parameters)


@seeds("action", "discrete", "box", slow=["multi_discrete", "multi_binary"])
def test_ppo_solves_the_bandit(tmp_path, action, seed):
    trainer = _trainer(tmp_path, partial(Bandit, action), seed, 12, **PPO_SETTINGS)
    assert _evaluate(trainer) < 3.5
    trainer.train()
    assert _evaluate(trainer) > 3.7


@seeds("action", "box", slow=["discrete", "multi_discrete", "multi_binary"])
def test_a2c_solves_the_bandit(tmp_path, action, seed):
    trainer = _trainer(tmp_path, partial(Bandit, action), seed, 150, **A2C_SETTINGS)
    trainer.train()
    assert _evaluate(trainer) > 3.7


@seeds(
    "name, action",
    ("appo", "box"),
    ("impala", "discrete"),
    slow=[
        (name, action)
        for name in ("appo", "impala")
        for action in ("discrete", "box", "multi_discrete", "multi_binary")
        if (name, action) not in (("appo", "box"), ("impala", "discrete"))
    ],
)
def test_appo_solves_the_bandit_from_old_rows(tmp_path, name, action, seed):
    settings, num_iterations = {"appo": (APPO_SETTINGS, 20), "impala": (IMPALA_SETTINGS, 200)}[name]
    trainer = _trainer(tmp_path, partial(Bandit, action), seed, num_iterations, unroller=Lagging, **settings)
    trainer.train()
    assert _evaluate(trainer) > 3.7


@seeds("nested_action", True, slow=[False])
def test_ppo_solves_the_nested_bandit(tmp_path, nested_action, seed):
    settings = PPO_SETTINGS | {"algorithm": partial(PPO, network=_network(image=Flat), gamma=0.5, lambda_=0.5)}
    environment = partial(NestedBandit, nested_action, image_size=8)
    trainer = _trainer(tmp_path, environment, seed, 14, **settings)
    trainer.train()
    assert _evaluate(trainer) > 3.7


@seeds("name", "ppo", slow=["a2c", "appo"])
def test_truncated_unit_rewards_are_worth_1_over_1_minus_gamma(tmp_path, name, seed):
    of_name = {"ppo": (PPO_SETTINGS, 20), "a2c": (A2C_SETTINGS, 150), "appo": (APPO_SETTINGS, 50)}
    settings, num_iterations = of_name[name]
    cls = settings["algorithm"].func
    algorithm = partial(cls, network=_network(), gamma=0.9)
    trainer = _trainer(tmp_path, OneState, seed, num_iterations, **settings | {"algorithm": algorithm})
    trainer.train()
    with torch.no_grad():
        time_step = TimeStep(None, None, None, torch.ones(1, 1), None, None)
        value = trainer.algorithm.network.value(time_step, None)
    assert value.item() == pytest.approx(1 / (1 - 0.9), rel=0.02)
