from functools import partial

import numpy as np
import pytest
import torch
from gymnasium import spaces

from alfish import nest, specs
from alfish.algorithms.a2c import A2C
from alfish.data import Experience, StepType, TimeStep, trainable
from alfish.functional import returns
from alfish.learner.batches import EpochBatches
from alfish.learner.learner import Learner
from alfish.learner.optimizers import TorchOptimizer
from alfish.parameters.schedules import Linear
from alfish.transforms import Transforms

FIRST, MID, LAST = StepType.FIRST, StepType.MID, StepType.LAST
OBSERVATION = spaces.Box(-1, 1, (4,), np.float32)
SGD = partial(TorchOptimizer, optimizer=torch.optim.SGD)


def _a2c(num_rewards=None, **settings):
    torch.manual_seed(0)
    return A2C(OBSERVATION, spaces.Discrete(3), specs.reward_spec(num_rewards), **settings)


def _unroll(a2c, step_type, seed=0):
    torch.manual_seed(seed)
    leading = step_type.shape
    reward = torch.randn(*leading, *a2c.reward_spec.shape)
    none = torch.zeros(leading)
    time_step = TimeStep(step_type, reward, torch.ones(leading), torch.randn(*leading, 4), none, none)
    return Experience(time_step, torch.randint(3, leading), None, None, None)


def _prepare(a2c):
    @torch.no_grad()
    def prepare(experience):
        return a2c.preprocess_experience(experience)

    return prepare


def _chunks(a2c, experience, *settings):
    """What `EpochBatches(*settings)` makes of an unroll for this algorithm, without transforms."""
    source = EpochBatches(*settings)
    length, num_envs = trainable(experience.time_step.step_type).shape
    source.bind(a2c, Transforms([], a2c.observation_spec, a2c.reward_spec), length, num_envs)
    source.add(experience)
    return source.chunks(0)


def _column(*kinds, num_envs=1):
    return torch.tensor(kinds, dtype=torch.int32)[:, None].repeat(1, num_envs)


def test_the_default_return_reaches_to_the_end_of_the_unroll():
    a2c = _a2c(gamma=0.9)
    experience = _unroll(a2c, _column(MID, MID, MID, MID))
    with torch.no_grad():
        value = a2c.network.value(experience.time_step, None)[:, 0]
    reward = experience.time_step.reward[:, 0]
    following, expected = value[3], []
    for t in (2, 1, 0):
        following = reward[t + 1] + 0.9 * following
        expected.insert(0, following)
    info = _prepare(a2c)(experience).info
    torch.testing.assert_close(info.target[:, 0], torch.stack(expected))
    torch.testing.assert_close(info.advantage[:, 0], torch.stack(expected) - value[:3])


@pytest.mark.parametrize("num_rewards", [1, 2, 3])  # 3 is also the number of environments
def test_vector_rewards_have_summed_advantages_and_separate_targets(num_rewards):
    a2c = _a2c(num_rewards, lambda_=0.7)
    experience = _unroll(a2c, _column(FIRST, MID, LAST, FIRST, MID, num_envs=3))
    step = experience.time_step
    with torch.no_grad():
        value = a2c.network.value(step, None)
    expected = returns.gae(step.reward, 0.99 * step.discount, value, step.step_type, 0.7)
    info = _prepare(a2c)(experience).info
    torch.testing.assert_close(info.advantage, expected.sum(-1))
    torch.testing.assert_close(info.target, expected + value[:-1])


def test_advantages_are_normalized_over_trained_rows_if_asked():
    a2c = _a2c(normalize_advantage=True)
    experience = _unroll(a2c, _column(FIRST, MID, LAST, FIRST, MID, LAST, FIRST, MID, num_envs=5))
    mask = trainable(experience.time_step.step_type)
    advantage = _prepare(a2c)(experience).info.advantage[mask]
    assert advantage.mean().item() == pytest.approx(0, abs=1e-5)
    assert advantage.std(correction=0).item() == pytest.approx(1, abs=1e-4)


def test_the_loss_is_policy_value_and_entropy():
    a2c = _a2c(value_coef=0.7, entropy_coef=Linear(0.2, 0.0))
    a2c.progress.fill_(0.5)
    (chunk,) = _chunks(a2c, _unroll(a2c, _column(MID, MID, MID, num_envs=4)), 1)
    experience = chunk.source.experience
    info = a2c.train_step(experience, None).info
    policy_loss = -info.policy.log_prob(experience.action) * experience.info.advantage
    value_loss = 0.5 * (info.value - experience.info.target).square()
    expected = policy_loss + 0.7 * value_loss - 0.1 * info.policy.entropy()
    torch.testing.assert_close(a2c.calc_loss(experience, info).loss, expected)


def test_one_gradient_step_is_the_policy_gradient():
    """The policy's bias, from the rows to the parameter: mean over trained rows of A (one-hot(a) - p)."""
    a2c = _a2c(entropy_coef=0.0, lambda_=0.0, gamma=0.5)
    experience = _unroll(a2c, _column(FIRST, MID, LAST, FIRST, MID))
    step = experience.time_step
    bias = a2c.network.policy_head.heads[0].linear.bias
    with torch.no_grad():
        value, p = a2c.network.value(step, None)[:, 0], a2c.network.policy(step, None)[0].log_p[:, 0].exp()
    expected = torch.zeros(3)
    for t in (0, 1, 3):  # row 2 is LAST, row 4 gives its value
        advantage = step.reward[t + 1, 0] + 0.5 * value[t + 1] - value[t]
        expected += advantage * (torch.eye(3)[experience.action[t, 0]] - p[t]) / 3
    Learner(a2c, optimizer=SGD, learning_rate=1.0).train(_chunks(a2c, experience, 1))
    torch.testing.assert_close(bias.detach(), expected, atol=1e-6, rtol=1e-4)


def test_the_policys_loss_does_not_change_the_critics_torso():
    a2c = _a2c(value_coef=0.0)
    before = [parameter.clone() for parameter in a2c.network.critic_torso.parameters()]
    experience = _unroll(a2c, _column(MID, MID, MID, num_envs=4))
    Learner(a2c).train(_chunks(a2c, experience, 1))
    assert all(torch.equal(a, b) for a, b in zip(before, a2c.network.critic_torso.parameters()))


def test_a_constant_reward_is_explained_by_the_value():
    """With V at its fixed point the advantage is 0, wherever the unroll or the episode ends."""
    a2c = _a2c(gamma=0.9)
    experience = _unroll(a2c, _column(FIRST, MID, LAST, FIRST, MID, MID, num_envs=3))
    ones = nest.map(torch.ones_like, experience.time_step.reward)
    experience = experience._replace(time_step=experience.time_step._replace(reward=ones))
    with torch.no_grad():
        a2c.network.value_head.weight.zero_()
        a2c.network.value_head.bias.fill_(1 / (1 - 0.9))
    info = _prepare(a2c)(experience).info
    mask = trainable(experience.time_step.step_type)
    torch.testing.assert_close(info.advantage, torch.zeros_like(info.advantage), atol=1e-5, rtol=0)
    torch.testing.assert_close(info.target[mask], torch.full_like(info.target[mask], 10.0))
