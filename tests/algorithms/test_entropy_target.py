import math
from functools import partial

import numpy as np
import pytest
import torch
from gymnasium import spaces
from test_learning_toys import PPO_SETTINGS, _network, _trainer
from test_ppo import _batch, _chunks, _ppo, _unroll
from toys import Bandit

from alfish import specs
from alfish.algorithms.entropy_target import EntropyTargetPPO, default_target
from alfish.errors import UsageError
from alfish.learner.batches import EpochBatches
from alfish.learner.learner import Learner


def targeting(action="discrete", **settings):
    plain = _ppo(action)
    torch.manual_seed(0)
    return EntropyTargetPPO(plain.observation_spec, plain.action_spec, plain.reward_spec, **settings)


def test_the_losses_are_those_of_ppo_with_the_temperature_and_of_the_temperature():
    settings = {"entropy_coef": 0.01, "uniform_kl_coef": 0.02}
    plain, algorithm = (make(**settings) for make in (_ppo, partial(targeting, entropy_target=0.4)))
    experience = _unroll(plain)
    losses = []
    for each in (plain, algorithm):
        batch = _batch(each, experience)
        info = each.train_step(batch.experience, None).info
        losses.append(each.calc_loss(batch.experience, info))
    entropy = info.policy.entropy()
    assert torch.allclose(losses[1].loss["all"], losses[0].loss - 0.01 * entropy)
    assert torch.allclose(losses[1].loss["temperature"], math.log(0.01) * (entropy - 0.4))
    assert losses[1].extra["temperature"].item() == pytest.approx(0.01)
    of_policy = torch.autograd.grad(losses[1].loss["all"].sum(), algorithm.log_temperature, allow_unused=True)
    assert of_policy == (None,), "the policy's loss does not change the temperature"
    weights = list(algorithm.network.parameters())
    assert set(torch.autograd.grad(losses[1].loss["temperature"].sum(), weights, allow_unused=True)) == {None}


@pytest.mark.parametrize(("target", "expected"), [(9.0, 1.0), (-9.0, 0.5)])
def test_the_temperature_stays_in_its_range(target, expected):
    algorithm = targeting(entropy_target=target, initial_temperature=0.7, lowest_temperature=0.5)
    learner = Learner(algorithm, learning_rate={"all": 1e-3, "temperature": 0.3})
    learner.train(_chunks(algorithm, _unroll(algorithm), 4, 16))
    assert algorithm.log_temperature.exp().item() == pytest.approx(expected)


def test_default_target_entropy_of_choices_and_box_entries():
    space = spaces.Dict(
        a=spaces.Discrete(4), b=spaces.MultiDiscrete([2, 3]), c=spaces.MultiBinary(3),
        d=spaces.Box(-1, 1, (5,), np.float32),
    )  # fmt: skip
    expected = 0.5 * (math.log(4) + math.log(6) + 3 * math.log(2)) - 5
    assert default_target(specs.action_spec(space)) == pytest.approx(expected)


def test_an_initial_temperature_outside_of_its_range_is_refused():
    with pytest.raises(UsageError, match=r"initial_temperature is 2.0, outside of \[0.0001, 1.0\]"):
        targeting(initial_temperature=2.0)


@pytest.mark.parametrize(
    ("action", "target", "num_iterations"),
    [("discrete", None, 60), pytest.param("box", 0.6, 80, marks=pytest.mark.slow)],
)
def test_the_entropy_is_held_at_its_target(tmp_path, action, target, num_iterations):
    """Without a weight of the entropy, the policy of this task becomes certain in 20 iterations."""
    algorithm = partial(
        EntropyTargetPPO, entropy_target=target, initial_temperature=0.1, lowest_temperature=0.01,
        network=_network(), gamma=0.5, lambda_=0.5,
    )  # fmt: skip
    settings = PPO_SETTINGS | {
        "algorithm": algorithm,
        "learner": partial(Learner, learning_rate={"all": 1e-2, "temperature": 0.03}, max_grad_norm=0.5),
        "batches": partial(EpochBatches, num_epochs=4, minibatch_size=64),
    }
    trainer = _trainer(tmp_path, partial(Bandit, action), 0, num_iterations, summary_period=1, **settings)
    trainer.start()
    entropies = [report.scalars["train/entropy"] for report in trainer.iterate()]
    target = trainer.algorithm._target
    trainer.close()
    assert np.mean(entropies[num_iterations // 2 :]) == pytest.approx(target, rel=0.05)
