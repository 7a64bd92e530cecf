"""Behavioural cloning against the likelihood's own maximum, which is known where a policy is a table."""

import functools

import numpy as np
import pytest
import torch
from gymnasium import spaces

from alfish import nest
from alfish.algorithms.bc import BC
from alfish.data import Batch, Experience, StepType, TimeStep, trainable
from alfish.learner.batches import Minibatches
from alfish.learner.learner import Learner
from alfish.networks import GRU, MLP, PolicyHead, Torso, burn_in_state

FIRST, MID, LAST = StepType.FIRST, StepType.MID, StepType.LAST
NUM_STATES = 3
OBSERVATION = spaces.Box(0, 1, (NUM_STATES,), np.float32)
REWARD = spaces.Box(-np.inf, np.inf, (), np.float32)
BOX = spaces.Box(-1, 1, (2,), np.float32)
ACTIONS = {
    "box": BOX,
    "unbounded": spaces.Box(-np.inf, np.inf, (1,), np.float32),
    "discrete": spaces.Discrete(4),
    "multi-discrete": spaces.MultiDiscrete([2, 3]),
    "multi-binary": spaces.MultiBinary(2),
    "nested": {"arm": BOX, "rest": (spaces.Discrete(4), spaces.MultiDiscrete([2, 3]), spaces.MultiBinary(2))},
}
TABLE = functools.partial(Torso, mlp=functools.partial(MLP, layers=()))  # linear in one-hot states


def make(action, seed=0, **settings):
    torch.manual_seed(seed)
    return BC(OBSERVATION, action, REWARD, **{"torso": TABLE, **settings})


def drawn(leaf, state):
    """Actions by a policy that differs between states."""
    share = torch.tensor([0.1, 0.5, 0.8])[state]
    if isinstance(leaf, spaces.Discrete):
        return torch.where(torch.rand(state.shape) < share, 1, torch.randint_like(state, int(leaf.n)))
    if isinstance(leaf, spaces.MultiDiscrete):
        parts = [torch.where(torch.rand(state.shape) < share, 1, torch.randint_like(state, int(n))) for n in leaf.nvec]
        return torch.stack(parts, -1)
    if isinstance(leaf, spaces.MultiBinary):
        return (torch.rand(*state.shape, leaf.n) < share[..., None]).to(torch.int8)
    mean = torch.stack([share, -share], -1)[..., : leaf.shape[0]]
    return (mean + 0.2 * torch.randn_like(mean)).clamp(-1 + 1e-5, 1 - 1e-5)


def data(action, num_windows=1000, seed=1):
    """Windows of two rows of one-hot states; row 1's actions are junk."""
    torch.manual_seed(seed)
    state = torch.randint(NUM_STATES, (2, num_windows))
    actions = nest.map(lambda leaf: drawn(leaf, state), action)
    for leaf in nest.leaves(actions):
        leaf[1] = 0
    kinds = torch.tensor([[FIRST], [MID]], dtype=torch.int32).expand(state.shape)
    observation = torch.eye(NUM_STATES)[state]
    step = TimeStep(kinds, torch.full(state.shape, 7.0), torch.ones(state.shape), observation, actions, kinds)
    return Experience(step, actions, None, None)


def learn(algorithm, experience, num_updates, learning_rate=0.05):
    size = experience.time_step.reward.shape[1]
    batch = Batch(experience, trainable(experience.time_step.step_type))
    learner = Learner(algorithm, learning_rate=learning_rate)
    return learner.train([Minibatches(batch, torch.arange(size)[None].expand(num_updates, -1))])


def policy_at(algorithm):
    """Of each state."""
    with torch.no_grad():
        row = TimeStep(torch.full((NUM_STATES,), MID), None, None, torch.eye(NUM_STATES), None, None)
        features, _ = algorithm.torso(row, None)
        return algorithm.policy_head(features)


def shares(values, state, num_choices):
    """How often each choice was made in each state, `[states, choices]`."""
    return torch.stack([values[state == s].long().bincount(minlength=num_choices) for s in range(NUM_STATES)]).float()


@pytest.mark.parametrize("name", ACTIONS)
def test_policy_learns_the_action_frequencies_of_each_state(name):
    experience, action = data(ACTIONS[name]), ACTIONS[name]
    algorithm = make(action)
    learn(algorithm, experience, 150)
    state = experience.time_step.observation[0].argmax(-1)
    policy = policy_at(algorithm)
    parts = [policy] if isinstance(action, spaces.Space) else policy._leaves()
    for leaf, part, taken in zip(nest.leaves(action), parts, nest.leaves(experience.action)):
        taken = taken[0]
        if isinstance(leaf, spaces.Box):
            mean = torch.stack([taken[state == s].mean(0) for s in range(NUM_STATES)])
            torch.testing.assert_close(part.mean, mean, atol=0.01, rtol=0)
            deviation = (taken - mean[state]).square().mean(0).sqrt()  # pooled: it does not depend on the state
            torch.testing.assert_close(part.log_std.exp(), deviation.expand(NUM_STATES, -1), atol=0.01, rtol=0)
            continue
        if isinstance(leaf, spaces.MultiBinary):
            found = [part.logits[:, bit].sigmoid() for bit in range(leaf.n)]
            expected = [shares(taken[:, bit], state, 2) for bit in range(leaf.n)]
            expected = [counts[:, 1] / counts.sum(1) for counts in expected]
        else:
            columns = taken[:, None] if isinstance(leaf, spaces.Discrete) else taken
            each = [part] if isinstance(leaf, spaces.Discrete) else part.parts
            found = [one.log_p.exp() for one in each]
            expected = [shares(column, state, one.log_p.shape[-1]) for column, one in zip(columns.unbind(-1), each)]
            expected = [counts / counts.sum(1, keepdim=True) for counts in expected]
        for p, frequency in zip(found, expected):
            torch.testing.assert_close(p, frequency, atol=0.01, rtol=0)


def test_it_samples_while_acting_and_evaluates_by_the_mode():
    algorithm = make(spaces.Discrete(4))
    learn(algorithm, data(spaces.Discrete(4)), 250)
    row = TimeStep(None, None, None, torch.eye(NUM_STATES)[[2]].expand(4000, -1), None, None)
    with torch.no_grad():
        sampled, best = algorithm.rollout_step(row, None).output, algorithm.predict_step(row, None).output
    frequency = sampled.bincount(minlength=4) / 4000
    torch.testing.assert_close(frequency, policy_at(algorithm).log_p[2].exp(), atol=0.03, rtol=0)
    assert (best == 1).all()


def test_loss_is_the_negative_log_likelihood_of_row_0():
    algorithm, experience = make(BOX), data(BOX, 5)
    rows = algorithm.calc_loss(experience, algorithm.train_step(experience, None).info)
    state = experience.time_step.observation[0].argmax(-1)
    policy = nest.at(policy_at(algorithm), state)
    expected = torch.distributions.Normal(policy.mean, policy.log_std.exp()).log_prob(experience.action[0]).sum(-1)
    torch.testing.assert_close(rows.loss.detach()[0], -expected)
    torch.testing.assert_close(rows.extra["log_prob"][0], expected)
    torch.testing.assert_close(rows.extra["squared_error"][0], (policy.mean - experience.action[0]).square().mean(-1))
    assert rows.loss.shape == rows.extra["entropy"].shape == (1, 5)
    discrete = make(spaces.Discrete(4))
    experience = data(spaces.Discrete(4), 5)
    assert "squared_error" not in discrete.calc_loss(experience, discrete.train_step(experience, None).info).extra


def test_deterministic_policies_are_learned_with_finite_likelihood():
    experience = data(BOX, 600)
    state = experience.time_step.observation[0].argmax(-1)
    certain = torch.tensor([[1.0, -1.0], [0.3, 0.2], [-1.0, 1.0]])  # at the bounds, where data often lie
    experience.action[0] = certain[state]
    fixed = {"policy_head": functools.partial(PolicyHead, learn_std=False)}
    for settings, lowest, highest in (({}, -5.0, -4.0), (fixed, 0.0, 0.0)):
        algorithm = make(BOX, **settings)
        values = learn(algorithm, experience, 400, learning_rate=0.03)
        policy = policy_at(algorithm)
        torch.testing.assert_close(policy.mean, certain, atol=0.02, rtol=0)
        assert values["nonfinite_updates"] == 0
        assert ((policy.log_std >= lowest) & (policy.log_std <= highest)).all()


def test_with_memory_it_learns_what_no_single_observation_tells():
    """The action is the state of the row before; windows begin with a state that is not the initial one."""
    torch.manual_seed(0)
    torso = functools.partial(Torso, mlp=functools.partial(MLP, layers=(16,)), memory=functools.partial(GRU, size=16))
    algorithm = make(spaces.Discrete(NUM_STATES), torso=torso)
    assert algorithm.replay_needs.recurrent_state and algorithm.has_state and not make(BOX).replay_needs.recurrent_state
    state = torch.randint(NUM_STATES, (8, 200))
    action = torch.cat([torch.zeros_like(state[:1]), state[:-1]])
    kinds = torch.full(state.shape, MID, dtype=torch.int32)
    step = TimeStep(
        kinds, torch.zeros(state.shape), torch.ones(state.shape), torch.eye(NUM_STATES)[state], action, kinds
    )
    burn_in, step = nest.split(step, 2)
    experience = Experience(step, action[2:], None, algorithm.initial_state(200), burn_in=burn_in)
    info = algorithm.train_step(experience, experience.state).info
    rows = algorithm.calc_loss(experience, info)
    assert rows.loss.shape == (5, 200)
    with torch.no_grad():
        warm = burn_in_state(algorithm.torso, burn_in, experience.state)
        expected = algorithm.policy_head(algorithm.torso(step, warm)[0]).log_prob(experience.action)[:-1]
    torch.testing.assert_close(rows.loss.detach(), -expected)
    learner = Learner(algorithm, learning_rate=0.02)
    batch = Batch(experience, trainable(step.step_type))
    for _ in range(60):
        values = learner.train([Minibatches(batch, None)])
    assert values["log_prob"] > -0.1
