from functools import partial

import pytest
import torch
from test_learning_toys import PPO_SETTINGS, _network, _trainer
from test_ppo import _chunks, _ppo, _unroll
from torch import nn
from toys import OneState

from alfish.algorithms.composition import RND, Composed
from alfish.algorithms.normalized_returns import (
    NormalizedReturnsA2C,
    NormalizedReturnsAPPO,
    NormalizedReturnsPPO,
    NormalizedValueHead,
)
from alfish.algorithms.ppo import PPO
from alfish.errors import UsageError
from alfish.learner.learner import Learner
from alfish.networks import ActorCritic

CLASSES = [NormalizedReturnsPPO, NormalizedReturnsA2C, NormalizedReturnsAPPO]


def normalizing(kind=NormalizedReturnsPPO, num_rewards=None, **settings):
    plain = _ppo(num_rewards=num_rewards)
    torch.manual_seed(0)
    return kind(plain.observation_spec, plain.action_spec, plain.reward_spec, **settings)


def observed(head, *returns):
    for each in returns:
        head.observe(torch.tensor(each)[:, None], torch.ones(len(each), dtype=torch.bool))


def test_gradient_equals_that_of_the_normalized_loss():
    torch.manual_seed(0)
    head, features = NormalizedValueHead(nn.Linear(3, 1)), torch.randn(5, 3)
    observed(head, [10.0, 30.0])  # mean 20, std 10
    output = nn.functional.linear(features, head.weight, head.bias)
    value = head(features)
    torch.testing.assert_close(value, 20 + 10 * output)
    target = torch.linspace(0, 40, 5)[:, None]
    parameters = list(head.parameters())
    found = torch.autograd.grad(0.5 * (value - target).square().sum(), parameters)
    expected = torch.autograd.grad(0.5 * (output - (target - 20) / 10).square().sum(), parameters)
    torch.testing.assert_close(found, expected)


def test_values_stay_when_the_statistics_move():
    torch.manual_seed(0)
    head, features = NormalizedValueHead(nn.Linear(3, 1)), torch.randn(5, 3)
    observed(head, [10.0, 30.0])
    before = head(features)
    observed(head, [-500.0, 300.0, 700.0])
    assert head.std > 100
    torch.testing.assert_close(head(features), before)


def test_equal_returns_have_a_positive_std_unless_zero():
    head = NormalizedValueHead(nn.Linear(3, 1))
    observed(head, [0.0, 0.0])
    assert head.std == 0 and not head(torch.randn(5, 3)).any()
    observed(head, [0.0, 0.0, 8.0, -8.0])
    assert head.std > 0
    same = NormalizedValueHead(nn.Linear(3, 1))
    observed(same, [8.0, 8.0])
    assert same.std == pytest.approx(0.008)


def trained(algorithm, factor):
    """Returns the algorithm after three iterations with rewards times `factor`."""
    learner = Learner(algorithm, learning_rate=1e-2, max_grad_norm=0.5)
    for seed in range(3):
        experience = _unroll(algorithm, seed=seed)
        step = experience.time_step
        experience = experience._replace(time_step=step._replace(reward=step.reward * factor))
        torch.manual_seed(seed)
        learner.train(_chunks(algorithm, experience, 1))
        with torch.no_grad():
            algorithm.after_iteration(experience)
    return list(algorithm.network.parameters())


@pytest.mark.parametrize("kind", [*CLASSES, PPO])
def test_the_unit_of_the_reward_changes_no_weight(kind):
    """Powers of two scale floats without rounding, so that weights would be the same bits but for small constants."""
    settings = {"normalize_advantage": True}
    small, large = (trained(normalizing(kind, **settings), factor) for factor in (2.0**-10, 2.0**10))
    same = all(torch.allclose(one, other, rtol=1e-3, atol=1e-4) for one, other in zip(small, large))
    assert same == (kind is not PPO)


def test_each_entry_of_a_vector_reward_has_its_statistics():
    algorithm = normalizing(num_rewards=2)
    experience = _unroll(algorithm)
    step = experience.time_step
    experience = experience._replace(time_step=step._replace(reward=step.reward * torch.tensor([1.0, 100.0])))
    with torch.no_grad():
        target = algorithm.preprocess_experience(experience).info.target
        algorithm.after_iteration(experience)
    trains = torch.ones(16, 4, dtype=torch.bool)
    trains[3, 0] = False  # the LAST row
    torch.testing.assert_close(algorithm.network.value_head.std, target[trains].std(0, correction=0))


def test_a_saved_state_has_the_statistics():
    first, second = normalizing(), normalizing()
    trained(first, 50.0)
    second.load_state_dict(first.state_dict())
    step = _unroll(first).time_step
    assert torch.equal(first.network.value(step, None), second.network.value(step, None))


def test_networks_without_a_linear_value_head_are_refused():
    class Deep(ActorCritic):
        def __init__(self, *specs):
            super().__init__(*specs)
            self.value_head = nn.Sequential(self.value_head)

    with pytest.raises(UsageError, match=r"Deep.value_head is not an nn.Linear"):
        normalizing(network=Deep)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_compiled_updates_equal_plain_updates(interpreted):
    plain, compiled = normalizing(), normalizing()
    unrolls = [_unroll(plain, seed=seed) for seed in range(2)]
    for algorithm, compiles in ((plain, False), (compiled, True)):
        learner = Learner(algorithm, learning_rate=1e-3, compile=compiles)
        for experience in unrolls:
            learner.train(_chunks(algorithm, experience, 1))
            with torch.no_grad():
                algorithm.after_iteration(experience)
        assert learner.is_plain != compiles, "the update can be compiled"
    for one, other in zip(plain.parameters(), compiled.parameters()):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_the_returns_of_a_composition_include_the_bonus(tmp_path):
    inner = partial(NormalizedReturnsPPO, network=_network())
    settings = PPO_SETTINGS | {"algorithm": partial(Composed, algorithm=inner, rewards=[RND], separate_values=True)}
    trainer = _trainer(tmp_path, OneState, 0, 3, **settings)
    trainer.train()
    assert (trainer.algorithm.algorithm.network.value_head.std > 0).all()
