"""TD3BC: TD3 but for the actor's loss, which is worked by hand; and data of which cloning learns the wrong thing."""

import functools

import numpy as np
import pytest
import torch
from gymnasium import spaces

from alfish.algorithms.bc import BC
from alfish.algorithms.ddpg import DDPG
from alfish.algorithms.td3 import TD3
from alfish.algorithms.td3_bc import TD3BC
from alfish.data import Batch, Experience, StepType, TimeStep, trainable
from alfish.learner.batches import Minibatches
from alfish.learner.learner import Learner
from alfish.networks import MLP, CriticEnsemble, DeterministicActor, Torso

FIRST, MID, LAST = StepType.FIRST, StepType.MID, StepType.LAST
OBSERVATION = spaces.Box(-1, 1, (3,), np.float32)
REWARD = spaces.Box(-np.inf, np.inf, (), np.float32)
BOX = spaces.Box(-1, 1, (2,), np.float32)
NESTED = {"arm": BOX, "hand": (spaces.Box(-1, 1, (1,), np.float32),)}
SMALL = functools.partial(MLP, layers=(32,), activation="relu")


def make(algorithm=TD3BC, action=BOX, **settings):
    torch.manual_seed(0)
    actor = functools.partial(DeterministicActor, mlp=SMALL, gain=1.0)
    critic = functools.partial(CriticEnsemble, layers=(32,), ensemble_size=1 if algorithm is DDPG else 2)
    return algorithm(OBSERVATION, action, REWARD, **{"actor": actor, "critic": critic, "gamma": 0.5, **settings})


def rows(num_windows=6, length=2, seed=1):
    torch.manual_seed(seed)
    shape = (length, num_windows)
    kinds = torch.full(shape, MID, dtype=torch.int32)
    action = torch.rand(*shape, 2) * 2 - 1
    time_step = TimeStep(kinds, torch.randn(shape), torch.ones(shape), torch.randn(*shape, 3), action, kinds)
    return Experience(time_step, action, None, None)


def losses_of(algorithm, experience):
    torch.manual_seed(2)  # of the smoothing noise
    return algorithm.calc_loss(experience, algorithm.train_step(experience, None).info)


@pytest.mark.parametrize("length", [2, 4])
@pytest.mark.parametrize("alpha", [2.5, 0.4])
def test_the_actors_loss_by_hand(alpha, length):
    algorithm, experience = make(alpha=alpha, actor_period=1), rows(length=length)
    observation = experience.time_step.observation[0]
    action = algorithm.actor(observation)
    q = algorithm.critic(observation, action)[0]
    scale = alpha / float(q.detach().abs().mean())
    expected = (action - experience.action[0]).square().mean(-1) - scale * q
    loss = losses_of(algorithm, experience).loss["actor"]
    torch.testing.assert_close(loss, expected[None])
    # The scale is a constant.
    actor = list(algorithm.actor.parameters())
    for found, wanted in zip(torch.autograd.grad(loss.sum(), actor), torch.autograd.grad(expected.sum(), actor)):
        torch.testing.assert_close(found, wanted)
        assert found.any()


def test_reward_units_do_not_change_the_balance():
    algorithm, experience = make(actor_period=1), rows()
    actor = list(algorithm.actor.parameters())
    gradients = []
    for factor in (1.0, 1000.0):
        with torch.no_grad():
            algorithm.critic.body[-1].weight.mul_(factor)
            algorithm.critic.body[-1].bias.mul_(factor)
        gradients.append(torch.autograd.grad(losses_of(algorithm, experience).loss["actor"].sum(), actor))
    for one, other in zip(*gradients):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("period", [1, 2])
def test_everything_else_is_td3(period):
    """The critics' loss, who has a turn, and what is drawn."""
    ours, theirs = make(actor_period=period), make(TD3, actor_period=period)
    for update in range(3):
        experience = rows(seed=10 + update)
        mine, expected = losses_of(ours, experience), losses_of(theirs, experience)
        assert set(mine.loss) == set(expected.loss) == ({"critic", "actor"} if ours.trains("actor") else {"critic"})
        assert torch.equal(mine.loss["critic"], expected.loss["critic"])
        assert torch.equal(mine.priority, expected.priority)
        for algorithm in (ours, theirs):
            algorithm.after_update()
    assert (ours.weighted_losses, theirs.weighted_losses) == (None, ("critic",))


@pytest.mark.parametrize("algorithm", [DDPG, TD3])
def test_the_others_have_the_loss_that_they_had(algorithm):
    made, experience = make(algorithm, **({} if algorithm is DDPG else {"actor_period": 1})), rows()
    observation = experience.time_step.observation[:1]
    expected = -made.critic(observation, made.actor(observation), num_members=1)[0]
    assert torch.equal(losses_of(made, experience).loss["actor"], expected)


def test_a_nested_action_is_compared_in_one_vector():
    algorithm, experience = make(action=NESTED, actor_period=1), rows()
    hand = torch.rand(2, 6, 1)
    experience = experience._replace(action={"arm": experience.action, "hand": (hand,)})
    observation = experience.time_step.observation[0]
    action = algorithm.actor(observation)
    q = algorithm.critic(observation, action)[0]
    taken = torch.cat([experience.action["arm"], hand], -1)[0]
    expected = (action - taken).square().mean(-1) - 2.5 / q.abs().mean() * q
    torch.testing.assert_close(losses_of(algorithm, experience).loss["actor"], expected[None])


def test_a_constant_critic_gives_a_finite_loss():
    algorithm = make(actor_period=1)
    with torch.no_grad():
        for parameter in algorithm.critic.parameters():
            parameter.zero_()
    assert torch.isfinite(losses_of(algorithm, rows()).loss["actor"]).all()


# What it learns.


def bandit(num_windows=2000):
    """One action an episode: three in four about -0.5, which earn 0, the others about 0.5, which earn 1."""
    torch.manual_seed(0)
    shape = (2, num_windows)
    is_better = torch.rand(num_windows) < 0.25
    taken = (torch.where(is_better, 0.5, -0.5) + 0.1 * torch.randn(num_windows)).clamp(-1, 1)[:, None]
    kinds = torch.tensor([[FIRST], [LAST]], dtype=torch.int32).expand(shape)
    reward = torch.stack([torch.zeros(num_windows), is_better.float()])
    action = torch.stack([taken, torch.zeros_like(taken)])
    discount = torch.tensor([[1.0], [0.0]]).expand(shape)
    return Experience(TimeStep(kinds, reward, discount, torch.ones(*shape, 3), action, kinds), action, None, None)


def trained(algorithm, experience, num_updates, learning_rate):
    torch.manual_seed(0)
    index = torch.randint(experience.time_step.reward.shape[1], (num_updates, 64))
    batch = Batch(experience, trainable(experience.time_step.step_type))
    Learner(algorithm, learning_rate=learning_rate).train([Minibatches(batch, index)])
    row = TimeStep(None, None, None, torch.ones(1, 3), None, None)
    with torch.no_grad():
        return algorithm.predict_step(row, None).output.item()


@pytest.mark.slow
def test_prefers_better_actions_and_stays_near_data_unlike_td3():
    action, experience = spaces.Box(-1, 1, (1,), np.float32), bandit()
    clone = BC(OBSERVATION, action, REWARD, torso=functools.partial(Torso, mlp=SMALL))
    assert abs(trained(clone, experience, 200, 1e-2) + 0.25) < 0.05  # the mean of the two, which nobody does
    assert abs(trained(make(action=action, alpha=0.0), experience, 300, 3e-3) + 0.25) < 0.05
    assert trained(make(TD3, action), experience, 400, 3e-3) > 0.9  # where the critic was never told anything
    assert 0.2 < trained(make(action=action), experience, 600, 3e-3) < 0.8
