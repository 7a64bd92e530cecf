"""Guided cost learning: a cost under which demonstrations are likely, by importance sampling, and its reward."""

import functools
import math

import numpy as np
import pytest
import torch
from gymnasium import spaces

from alfish import nest, specs
from alfish.algorithms.composition import Composed, GuidedCost, NormalizedObservation, Transitions
from alfish.algorithms.composition.guided_cost import estimated_log_z
from alfish.algorithms.dqn import DQN
from alfish.algorithms.imitation.external import opened_to_act
from alfish.algorithms.ppo import PPO
from alfish.algorithms.sac import SAC
from alfish.algorithms.td3 import TD3
from alfish.data import Batch, Experience, StepType, TimeStep, trainable
from alfish.errors import UsageError
from alfish.functional.distributions import Categorical
from alfish.learner.optimizers import Adam
from alfish.learner.updates import Updates
from alfish.networks import GRU, ActorCritic, Torso
from alfish.offline import Arrays, Episode, OfflineBuffer, Spaces
from alfish.specs import ActionMask

OBSERVATION, CHOICES, BOX = spaces.Box(-9, 9, (2,), np.float32), spaces.Discrete(3), spaces.Box(-2, 2, (2,), np.float32)
FREQUENCIES = torch.tensor([0.6, 0.3, 0.1])


def data(action=CHOICES, observation=OBSERVATION):
    """10 steps, of which 6, 3 and 1 have the actions 0, 1 and 2, at observations that differ only if they may."""
    random = np.random.default_rng(0)
    taken = np.repeat([0, 1, 2], [6, 3, 1])
    if action is BOX:
        taken = random.uniform(-2, 2, (10, 2)).astype(np.float32)
    rows = random.normal(size=(11, *observation.shape)).astype(np.float32)
    ends = np.zeros((2, 10), bool)
    ends[0, -1] = True
    episode = Episode("", rows.clip(observation.low, observation.high), taken, np.zeros(10, np.float32), *ends)
    return functools.partial(OfflineBuffer, [Arrays([episode], Spaces(observation, action))], num_columns=1)


def make(action=CHOICES, observation=OBSERVATION, **settings):
    torch.manual_seed(0)
    settings = {"layers": (8,), "normalize_reward": False, **settings}
    return GuidedCost(
        specs.observation_spec(observation), specs.action_spec(action), demonstrations=data(action, observation),
        **settings,
    )  # fmt: skip


def steps(*shape, action=CHOICES, seed=0):
    torch.manual_seed(seed)
    taken = specs.sample(specs.action_spec(action), math.prod(shape))
    taken = taken.view(*shape, *taken.shape[1:])
    return Transitions(torch.randn(*shape, 2), taken, torch.randn(*shape, 2), torch.ones(shape))


# Loss.


def test_z_is_the_mean_importance_weight_of_trained_steps():
    cost = torch.tensor([[[0.0, math.log(2), -50.0]], [[math.log(4), 0.0, 3.0]]], requires_grad=True)
    q = torch.tensor([[[0.5, 0.25, 1e-9]], [[0.125, 0.5, 0.1]]])
    trains = torch.tensor([[True, True, False]])
    log_z, effective = estimated_log_z(cost, q.log(), trains)
    # Weights: 1 / 0.5 = 2, 0.5 / 0.25 = 2, 0.25 / 0.125 = 2 and 1 / 0.5 = 2.
    assert log_z.item() == pytest.approx(math.log(2)) and effective.item() == pytest.approx(1)
    log_z.backward()
    torch.testing.assert_close(cost.grad, torch.tensor([[[-0.25, -0.25, 0]], [[-0.25, -0.25, 0]]]))
    # Weights 2, 2, 2, 2 x 5: (2 + 2 + 2 + 10) / 4, and 16^2 / (4 (4 + 4 + 4 + 100)).
    q[1, 0, 1] = 0.1
    log_z, effective = estimated_log_z(cost, q.log(), trains)
    assert log_z.item() == pytest.approx(math.log(4)) and effective.item() == pytest.approx(256 / 448)


def test_gradients_are_finite_where_no_step_trains():
    cost = torch.zeros(2, 1, 3, requires_grad=True)
    log_z, effective = estimated_log_z(cost, torch.zeros(2, 1, 3), torch.zeros(1, 3, dtype=torch.bool))
    assert torch.isfinite(log_z) and torch.isfinite(effective)
    (0 * log_z).backward()
    assert (cost.grad == 0).all()


def test_the_loss_is_the_likelihood_of_demonstrations_under_cost_and_density():
    part, transitions = make(), steps(1, 7)
    log_prob = functools.partial(lambda observation, action: -0.5 - 0.1 * action)
    torch.manual_seed(5)
    found = part.loss_given_policy(transitions, log_prob)
    torch.manual_seed(5)
    expert = part.demonstrations(torch.Size((1, 7)))
    weights = []
    for each in (transitions, expert):
        cost, density = part.cost(each.observation, each.action), part.density(each.observation, each.action)
        q = (log_prob(None, each.action).exp() + density.log_prob(each.action).exp()) / 2
        weights.append((-cost).exp() / q)
    expected = cost + torch.cat(weights).mean().log() - density.log_prob(expert.action)
    torch.testing.assert_close(found.loss, expected)
    assert torch.equal(found.extra["expert_cost"], cost)


@pytest.mark.parametrize("policy", [(1 / 3, 1 / 3, 1 / 3), (0.1, 0.1, 0.8)])
def test_bandit_cost_becomes_the_demonstration_log_probability(policy):
    nothing = spaces.Box(0, 0, (1,), np.float32)  # a single observation
    part, policy = make(observation=nothing), Categorical.of(torch.tensor(policy).log())
    policy = Categorical(policy.log_p.expand(1, 256, 3))
    optimizer = torch.optim.Adam(part.parameters())
    observation = torch.zeros(1, 256, 1)
    for k in range(120):
        torch.manual_seed(k)
        transitions = Transitions(observation, policy.sample(), observation, torch.ones(1, 256))
        optimizer.param_groups[0]["lr"] = 0.05 * (1 - k / 120)
        optimizer.zero_grad()
        loss = part.loss_given_policy(transitions, lambda observation, action: policy.log_prob(action)).loss
        loss.mean().backward()
        optimizer.step()
    each = torch.arange(3).view(1, 3)
    with torch.no_grad():
        cost = part.cost(torch.zeros(1, 3, 1), each)
        density = part.density(torch.zeros(1, 3, 1), each).log_prob(each).exp()
    torch.testing.assert_close((-cost).softmax(-1)[0], FREQUENCIES, atol=0.03, rtol=0)
    torch.testing.assert_close(density[0], FREQUENCIES, atol=0.03, rtol=0)


def test_the_model_of_the_demonstrations_gives_forbidden_actions_no_probability():
    observation = spaces.Dict(mask=ActionMask(3), place=OBSERVATION)
    with opened_to_act():
        part = GuidedCost(specs.observation_spec(observation), specs.action_spec(CHOICES), layers=(8,))
    rows = {"mask": torch.tensor([[1, 0, 1]], dtype=torch.int8), "place": torch.ones(1, 2)}
    found = part.density(rows, torch.zeros(1, dtype=torch.int64)).log_p.exp()
    torch.testing.assert_close(found, torch.tensor([[0.5, 0.0, 0.5]]), atol=0.05, rtol=0)


# Reward.


@pytest.mark.parametrize("action", [CHOICES, BOX])
def test_reward_is_minus_the_cost_centered_over_trained_steps(action):
    part, transitions = make(action), steps(4, 6, action=action)
    trains = torch.rand(4, 6) < 0.5
    with torch.no_grad():
        cost = part.cost(transitions.observation, transitions.action)
        found = part.reward(transitions._replace(trains=trains))
        torch.testing.assert_close(part.reward(transitions), cost.mean() - cost)
    assert found[trains].mean().abs() < 1e-5
    torch.testing.assert_close(found - found[0, 0], cost[0, 0] - cost)


def test_costs_are_bounded_by_their_limit():
    part, transitions = make(cost_limit=0.5), steps(1, 50)
    with torch.no_grad():
        plain = part.cost(transitions.observation, transitions.action)
        part.cost_network[-1].weight.mul_(1000)
        bounded = part.cost(transitions.observation, transitions.action)
    assert plain.abs().max() < 0.5 and bounded.abs().max() == pytest.approx(0.5)


# Composed.


def compose(algorithm=PPO, action=CHOICES, **settings):
    torch.manual_seed(0)
    part = functools.partial(GuidedCost, demonstrations=data(action), layers=(8,))
    return Composed(
        specs.observation_spec(OBSERVATION), specs.action_spec(action), specs.reward_spec(), algorithm=algorithm,
        rewards=[part], extrinsic_coef=0.0, **settings,
    )  # fmt: skip


CASES = [(PPO, CHOICES), (PPO, BOX), (SAC, CHOICES), (SAC, BOX)]


@pytest.mark.parametrize(("algorithm", "action"), CASES)
@pytest.mark.parametrize("representation", [None, NormalizedObservation])
def test_probabilities_come_from_the_acting_policy(algorithm, action, representation):
    made, rows = compose(algorithm, action, representation=representation), steps(3, 4, action=action)
    if representation is not None:
        made.representation.normalizer._moments[0].shift.fill_(0.5)
    found = made._log_prob(rows.observation, rows.action)
    seen, inner = made._seen(TimeStep(None, None, None, rows.observation, None, None)), made.algorithm
    if algorithm is PPO:
        expected = inner.network.policy(seen, None)[0].log_prob(rows.action)
    else:
        policy = inner.policy(inner.actor_encoder(seen.observation), None)
        expected = policy[action is CHOICES].log_prob(rows.action)
    assert found.shape == (3, 4) and not found.requires_grad
    torch.testing.assert_close(found, expected)


def unroll(made, action, kinds):
    torch.manual_seed(1)
    shape = len(kinds), 2
    step_type = torch.tensor(kinds, dtype=torch.int32).unsqueeze(1).expand(shape)
    taken = specs.sample(specs.action_spec(action), math.prod(shape))
    taken = taken.view(*shape, *taken.shape[1:])
    env_id = torch.arange(2, dtype=torch.int32).expand(shape)
    step = TimeStep(step_type, torch.zeros(shape), torch.ones(shape), torch.randn(*shape, 2), taken, env_id)
    with torch.no_grad():
        info = made.rollout_step(nest.merge_leading(step), None).info
    info = nest.map(lambda leaf: leaf[0].view(*shape, *leaf.shape[2:]), info)
    return Experience(step, taken, info, None)


@pytest.mark.parametrize(("algorithm", "action"), CASES)
def test_rows_that_do_not_train_change_neither_cost_nor_reward(algorithm, action):
    kinds = [StepType.FIRST, StepType.MID, StepType.LAST, StepType.FIRST, StepType.MID, StepType.PAD]
    found = []
    for garbage in (0.0, 7.0):
        made = compose(algorithm, action)
        experience = unroll(made, action, kinds)
        experience.time_step.observation[-2:] += garbage  # row 4 has no step after it
        mask = trainable(experience.time_step.step_type)
        if made.on_policy:
            with torch.no_grad():
                experience = made.preprocess_experience(experience)
            experience = nest.map(lambda leaf: leaf[:5], experience)
        torch.manual_seed(2)
        updates = Updates(made, Adam, None)
        means, info = updates.means(Batch(experience, mask))
        own = [made.rewards["gcl"].cost_network, made.rewards["gcl"].density_head]
        parameters = [each for module in own for each in module.parameters()]
        gradients = torch.autograd.grad(means.losses["gcl"], parameters)
        reward = torch.where(mask, info.extra["gcl/reward"], 0)
        found.append((means.losses["gcl"].detach(), reward, *gradients))
    assert mask.sum() == 6
    for plain, other in zip(*found):
        torch.testing.assert_close(plain, other)
    assert found[0][1].sum().abs() < 1e-4 < found[0][1].abs().sum()


@pytest.mark.parametrize(("algorithm", "action"), CASES)
def test_the_cost_loss_does_not_train_the_policy(algorithm, action):
    made = compose(algorithm, action)
    updates = Updates(made, Adam, None)
    experience = unroll(made, action, [StepType.FIRST, StepType.MID, StepType.MID])
    mask = trainable(experience.time_step.step_type)
    if made.on_policy:
        with torch.no_grad():
            experience = nest.map(lambda leaf: leaf[:2], made.preprocess_experience(experience))
    loss = updates.means(Batch(experience, mask))[0].losses["gcl"]
    for name, group in updates.groups.items():
        gradients = torch.autograd.grad(loss, group.parameters, retain_graph=True, allow_unused=True)
        if name == "gcl":
            assert all(gradient is not None for gradient in gradients)
        else:
            assert gradients == (None,) * len(gradients)


def with_memory(*arguments):
    return PPO(*arguments, network=functools.partial(ActorCritic, actor_torso=functools.partial(Torso, memory=GRU)))


@pytest.mark.parametrize(
    ("algorithm", "action", "message"),
    [
        (DQN, CHOICES, "gcl needs the probability of actions at single time steps, but DQN has no log_prob; wrap an "),
        (TD3, BOX, "but TD3 has no log_prob; wrap an algorithm with a stochastic policy and without memory, such as"),
        (with_memory, CHOICES, "gcl needs the probability .* but PPO has a memory or other state; wrap an algorithm"),
        (functools.partial(Composed, algorithm=DQN), CHOICES, "but Composed has no log_prob"),
    ],
)
def test_algorithms_without_a_density_of_single_actions_are_refused(algorithm, action, message):
    with pytest.raises(UsageError, match=message):
        compose(algorithm, action)


def test_a_composition_inside_gives_the_probability_of_its_algorithm():
    made = compose(functools.partial(Composed, algorithm=PPO))
    rows = steps(3, 4)
    expected = made.algorithm.algorithm.log_prob(TimeStep(None, None, None, rows.observation, None, None), rows.action)
    assert torch.equal(made._log_prob(rows.observation, rows.action), expected)


def test_a_cost_limit_of_0_is_refused():
    with pytest.raises(UsageError, match="cost_limit"):
        make(cost_limit=0.0)
