"""DQN on tables: values, targets and gradients worked by hand."""

import functools

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from alfish import nest
from alfish.algorithms.dqn import DQN
from alfish.algorithms.retrace import RetraceDQN
from alfish.data import Batch, Experience, StepType, TimeStep, trainable
from alfish.errors import UsageError
from alfish.functional.values import LowerBounded
from alfish.learner.batches import Minibatches
from alfish.learner.learner import Learner
from alfish.networks import MLP, QNetwork, Torso
from alfish.parameters.schedules import Linear

FIRST, MID, LAST = StepType.FIRST, StepType.MID, StepType.LAST
NUM_STATES, NUM_ACTIONS = 4, 3
OBSERVATION = spaces.Box(0, 1, (NUM_STATES,), np.float32)
REWARD = spaces.Box(-np.inf, np.inf, (), np.float32)


class Table(nn.Module):
    """Q of one-hot states."""

    def __init__(self, observation_spec, num_actions):
        super().__init__()
        self.q = nn.Parameter(torch.zeros(observation_spec.shape[0], num_actions))

    def initial_state(self, batch_size):
        return None

    def forward(self, time_step, state):
        return time_step.observation @ self.q, state


def make(online=None, target=None, kind=DQN, **settings):
    dqn = kind(OBSERVATION, spaces.Discrete(NUM_ACTIONS), REWARD, **{"q_network": Table, "gamma": 0.5, **settings})
    with torch.no_grad():
        if online is not None:
            dqn.q_network.q.copy_(torch.tensor(online))
        if target is not None:
            dqn.target.network.q.copy_(torch.tensor(target))
    return dqn


def window(states, step_type, reward, discount=None, action=0):
    """One window of consecutive rows; the action is that of row 0, others are junk that must not matter."""
    num_rows = len(states)
    observation = torch.eye(NUM_STATES)[torch.tensor(states)][:, None]
    step_type = torch.tensor(step_type, dtype=torch.int32)[:, None]
    discount = torch.tensor(discount or [1.0] * num_rows)[:, None]
    actions = torch.full((num_rows, 1), NUM_ACTIONS - 1)
    actions[0] = action
    junk = torch.full((num_rows, 1), 2)
    time_step = TimeStep(step_type, torch.tensor(reward)[:, None], discount, observation, junk, step_type)
    return Experience(time_step, actions, None, None)


def learn(dqn, experience):
    return dqn.calc_loss(experience, dqn.train_step(experience, None).info)


def one_step_target(dqn, experience):
    """With every online value of row 0 at zero, the error is the target."""
    return float(learn(dqn, experience).priority.detach())


# Targets.

ONLINE = [[0.0, 0.0, 0.0], [1.0, 5.0, 2.0], [3.0, 1.0, 0.0], [0.0, 0.0, 9.0]]
TARGET = [[0.0, 0.0, 0.0], [7.0, 4.0, 6.0], [2.0, 8.0, 0.0], [1.0, 1.0, 3.0]]
JUNK = 1e6


def test_double_dqn_selects_online_and_evaluates_with_the_target():
    rows = window([0, 1], [FIRST, MID], [JUNK, 10.0])
    assert one_step_target(make(ONLINE, TARGET), rows) == 10 + 0.5 * 4
    assert one_step_target(make(ONLINE, TARGET, double=False), rows) == 10 + 0.5 * 7


def test_n_step_returns_reach_to_the_end_of_the_window():
    rows = window([0, 1, 2, 3], [MID, MID, MID, MID], [JUNK, 8.0, 4.0, 2.0])
    assert one_step_target(make(ONLINE, TARGET), rows) == 8 + 0.5 * 4 + 0.25 * 2 + 0.125 * 3


def test_n_step_returns_are_cut_and_bootstrapped_where_an_episode_was_truncated():
    rows = window([0, 1, 2, 3], [FIRST, MID, LAST, FIRST], [JUNK, 8.0, 4.0, JUNK])
    assert one_step_target(make(ONLINE, TARGET), rows) == 8 + 0.5 * 4 + 0.25 * 2
    rows = window([0, 1, 2, 3], [FIRST, LAST, FIRST, LAST], [JUNK, 8.0, JUNK, JUNK])
    assert one_step_target(make(ONLINE, TARGET), rows) == 8 + 0.5 * 4


def test_n_step_returns_end_where_an_episode_terminated():
    rows = window([0, 1, 2, 3], [FIRST, MID, LAST, FIRST], [JUNK, 8.0, 4.0, JUNK], [0.0, 1.0, 0.0, 1.0])
    assert one_step_target(make(ONLINE, TARGET), rows) == 8 + 0.5 * 4
    # A life lost in mid-episode: discount 0 at a MID row.
    rows = window([0, 1, 2, 3], [FIRST, MID, MID, MID], [JUNK, 8.0, 4.0, 2.0], [1.0, 1.0, 0.0, 1.0])
    assert one_step_target(make(ONLINE, TARGET), rows) == 8 + 0.5 * 4


def test_an_end_in_the_last_row_of_a_window_counts():
    rows = window([0, 1, 2], [MID, MID, LAST], [JUNK, 8.0, 4.0], [1.0, 1.0, 0.0])
    assert one_step_target(make(ONLINE, TARGET), rows) == 8 + 0.5 * 4
    rows = window([0, 1, 2], [MID, MID, LAST], [JUNK, 8.0, 4.0])
    assert one_step_target(make(ONLINE, TARGET), rows) == 8 + 0.5 * 4 + 0.25 * 2


def test_a_window_equals_its_columns_computed_separately():
    torch.manual_seed(0)
    ends = [[FIRST, MID, MID, MID], [MID, LAST, FIRST, MID], [FIRST, MID, LAST, FIRST], [MID, MID, MID, LAST]]
    columns = [window([0, 1, 2, 3], kind, torch.randn(4).tolist(), [1.0, 1.0, 1.0, 0.0]) for kind in ends]
    together = Experience(
        TimeStep(*(torch.cat([getattr(c.time_step, name) for c in columns], 1) for name in TimeStep._fields)),
        torch.cat([c.action for c in columns], 1), None, None,
    )  # fmt: skip
    dqn = make(ONLINE, TARGET)
    torch.testing.assert_close(learn(dqn, together).loss[0], torch.cat([learn(dqn, c).loss[0] for c in columns]))


# Retrace and lower bounds.

ROWS = [0, 1, 2, 3], [MID, MID, MID, MID], [JUNK, 8.0, 4.0, 2.0]


def with_actions(rows, *later):
    """The actions of row 1 and on; the last row's is never read."""
    rows.action[1:, 0] = torch.tensor(later)
    return rows


@pytest.mark.parametrize("last", [0, 1, 2])
def test_retrace_of_greedy_actions_is_the_n_step_return(last):
    rows = with_actions(window(*ROWS), 1, 0, last)  # as the online network chooses
    assert one_step_target(make(ONLINE, TARGET, kind=RetraceDQN), rows) == 8 + 0.5 * 4 + 0.25 * 2 + 0.125 * 3
    rows = with_actions(window(*ROWS), 0, 1, last)  # as the target network does
    assert (
        one_step_target(make(ONLINE, TARGET, kind=RetraceDQN, double=False), rows) == 8 + 0.5 * 4 + 0.25 * 2 + 0.125 * 3
    )


def test_retrace_ends_where_an_action_is_not_greedy():
    greedy_first = with_actions(window(*ROWS), 1, 1, 2)
    assert one_step_target(make(ONLINE, TARGET, kind=RetraceDQN), greedy_first) == 8 + 0.5 * 4 + 0.25 * 2
    at_once = with_actions(window(*ROWS), 0, 0, 2)
    assert one_step_target(make(ONLINE, TARGET, kind=RetraceDQN), at_once) == 8 + 0.5 * 4
    assert one_step_target(make(ONLINE, TARGET), at_once) == 8 + 0.5 * 4 + 0.25 * 2 + 0.125 * 3


def test_retrace_weighs_what_follows_by_lambda():
    rows = with_actions(window(*ROWS), 1, 0, 2)
    # G_2 = 2 + 0.5 3; G_1 = 4 + 0.5 (2 + 0.5 (3.5 - 2)); G_0 = 8 + 0.5 (4 + 0.5 (5.375 - 4))
    assert one_step_target(make(ONLINE, TARGET, kind=RetraceDQN, lambda_=0.5), rows) == 8 + 0.5 * (4 + 0.5 * 1.375)


def test_retrace_ends_with_the_episode():
    rows = with_actions(window([0, 1, 2, 3], [FIRST, MID, LAST, FIRST], [JUNK, 8.0, 4.0, JUNK]), 1, 0, 2)
    assert one_step_target(make(ONLINE, TARGET, kind=RetraceDQN), rows) == 8 + 0.5 * 4 + 0.25 * 2


def test_what_retrace_asks_of_later_rows_carries_no_gradient():
    dqn = make(ONLINE, TARGET, kind=RetraceDQN)
    info = dqn.train_step(with_actions(window(*ROWS), 1, 0, 2), None).info
    assert not any(leaf.requires_grad for leaf in nest.leaves(info.following))
    dqn.calc_loss(window(*ROWS), info).loss.sum().backward()
    assert dqn.q_network.q.grad.count_nonzero() == 1 and dqn.target.network.q.grad is None


@pytest.mark.parametrize(("known", "expected"), [(50.0, 50.0), (10.0, 12.0), (float("nan"), 12.0), (-50.0, 12.0)])
def test_a_target_is_at_least_the_observed_return(known, expected):
    rows = window([0, 1], [FIRST, MID], [JUNK, 10.0])._replace(return_to_go=torch.tensor([[known], [JUNK]]))
    dqn = make(ONLINE, TARGET, values=LowerBounded)
    assert dqn.replay_needs.return_gamma == 0.5
    assert one_step_target(dqn, rows) == expected
    assert one_step_target(make(ONLINE, TARGET), rows) == 12


def test_a_lower_bound_without_returns_is_refused():
    assert make().replay_needs.return_gamma is None
    with pytest.raises(UsageError, match="LowerBounded needs the returns of whole episodes"):
        learn(make(values=LowerBounded), window([0, 1], [FIRST, MID], [JUNK, 10.0]))


# Loss and gradient.


def test_only_the_taken_action_of_row_0_trains():
    dqn = make(ONLINE, TARGET, huber_delta=None)
    rows = window([1, 2, 3], [FIRST, MID, MID], [JUNK, 1.0, 1.0], action=2)
    info = learn(dqn, rows)
    assert info.loss.shape == (1, 1) and info.priority.shape == (1, 1)
    error = (1 + 0.5 * 1 + 0.25 * 3) - 2.0
    assert float(info.loss.detach()) == 0.5 * error**2
    info.loss.sum().backward()
    expected = torch.zeros(NUM_STATES, NUM_ACTIONS)
    expected[1, 2] = -error
    assert torch.equal(dqn.q_network.q.grad, expected)


def test_the_target_takes_no_gradient_and_carries_none():
    dqn = make(ONLINE, TARGET)
    learn(dqn, window([1, 1], [FIRST, MID], [0.0, 1.0])).loss.sum().backward()
    assert dqn.target.network.q.grad is None
    # State 1 is also the next state: only the taken action's entry moves, not that of the greedy one.
    assert dqn.q_network.q.grad[1].count_nonzero() == 1


def test_the_huber_loss_is_linear_beyond_its_delta():
    rows = window([0, 0], [FIRST, LAST], [0.0, 10.0], [1.0, 0.0])
    for delta, expected in ((1.0, 10 - 0.5), (4.0, 4 * (10 - 2.0)), (20.0, 50.0), (None, 50.0)):
        dqn = make(huber_delta=delta)
        info = learn(dqn, rows)
        assert float(info.loss.detach()) == expected
        assert float(info.priority.detach()) == 10


def test_importance_weights_multiply_the_loss():
    rows = window([0, 0], [FIRST, LAST], [0.0, 10.0], [1.0, 0.0])
    moved = []
    for weight in (1.0, 0.25):
        dqn = make()
        learner = Learner(dqn, max_grad_norm=None)
        batch = Batch(rows, trainable(rows.time_step.step_type), weight=torch.tensor([weight]))
        values = learner.train([Minibatches(batch, torch.tensor([[0]]))])
        moved.append((values["loss"], values["grad_norm"]))
    assert moved == [(9.5, 1.0), (9.5 / 4, 0.25)]


@pytest.mark.parametrize(("settings", "expected"), [
    ({"target_period": 3}, [0, 0, 3, 3, 3, 6]),
    ({"target_period": 1, "target_rate": 0.5}, [0.5, 1.25, 2.125, 3.0625, 4.03125, 5.015625]),
])  # fmt: skip
def test_the_target_follows_by_period_or_by_rate(settings, expected):
    dqn = make(**settings)
    seen = []
    for update in range(1, 7):
        with torch.no_grad():
            dqn.q_network.q.fill_(update)
        dqn.after_update()
        seen.append(float(dqn.target.network.q[0, 0]))
    assert seen == expected


def test_dueling_is_a_setting_of_its_network():
    torch.manual_seed(0)
    torso = functools.partial(Torso, mlp=functools.partial(MLP, layers=(8,)))
    dqn = make(q_network=functools.partial(QNetwork, torso=torso, dueling=True))
    info = learn(dqn, window([0, 1], [FIRST, MID], [0.0, 1.0]))
    info.loss.sum().backward()
    # An advantage network of which the mean is taken off: the taken action's gradient is shared out.
    assert torch.allclose(dqn.q_network.advantage.bias.grad.sum(), torch.zeros(()), atol=1e-6)
    assert dqn.q_network.value.bias.grad != 0


# Acting.

GREEDY = [[0.0, 9.0, 0.0]] * NUM_STATES


def act(dqn, batch_size, step="rollout_step"):
    observation = torch.eye(NUM_STATES)[torch.arange(batch_size) % NUM_STATES]
    return getattr(dqn, step)(TimeStep(None, None, None, observation, None, None), None).output


def test_epsilon_is_tossed_for_each_environment():
    torch.manual_seed(0)
    dqn = make(GREEDY, epsilon=0.5)
    actions = torch.stack([act(dqn, 8) for _ in range(1000)])
    explored = actions != 1
    assert abs(explored.float().mean() - 0.5 * 2 / 3) < 0.02
    # With one coin for the batch, a step would explore in about 5 environments or in none.
    per_step = explored.sum(1).float()
    assert abs(per_step.var() - 8 * (1 / 3) * (2 / 3)) < 0.3
    pairs = (explored[:, 0] & explored[:, 1]).float().mean()
    assert abs(pairs - 1 / 9) < 0.03


def test_exploring_actions_are_uniform():
    torch.manual_seed(0)
    counts = act(make(GREEDY, epsilon=1.0), 9000).bincount()
    assert len(counts) == NUM_ACTIONS and (counts - 3000).abs().max() < 250


def test_without_epsilon_and_in_evaluation_it_is_greedy():
    assert act(make(GREEDY, epsilon=0.0), 100).eq(1).all()
    assert act(make(GREEDY, epsilon=1.0), 100, "predict_step").eq(1).all()


def test_epsilon_runs_on_progress_and_not_on_calls():
    torch.manual_seed(0)
    dqn = make(GREEDY, epsilon=Linear(1.0, 0.0, finish=0.5))
    for progress, share in ((0.0, 2 / 3), (0.25, 1 / 3), (0.5, 0.0), (0.9, 0.0), (0.0, 2 / 3)):
        dqn.progress.fill_(progress)
        assert abs(act(dqn, 4000).ne(1).float().mean() - share) < 0.04


# Specs.


@pytest.mark.parametrize("action", [
    spaces.Box(-1, 1, (2,)), spaces.MultiDiscrete([3, 3]), spaces.MultiBinary(2),
    {"a": spaces.Discrete(3), "b": spaces.Discrete(3)},
])  # fmt: skip
def test_only_discrete_actions_are_accepted(action):
    with pytest.raises(UsageError, match="DQN requires one Discrete action leaf, not"):
        DQN(OBSERVATION, action, REWARD)


def test_a_nest_with_one_discrete_leaf_is_accepted():
    bare, nested = (make_random(action) for action in (spaces.Discrete(3), {"a": (spaces.Discrete(3),)}))
    row = TimeStep(None, None, None, torch.randn(5, NUM_STATES), None, None)
    for hook in ("rollout_step", "predict_step"):
        outputs = []
        for algorithm in (bare, nested):
            torch.manual_seed(1)
            outputs.append(getattr(algorithm, hook)(row, None).output)
        assert torch.equal(outputs[0], outputs[1]["a"][0])
    kinds = torch.tensor([[FIRST], [MID]]).expand(2, 5)
    step = TimeStep(kinds, torch.randn(2, 5), torch.ones(2, 5), torch.randn(2, 5, NUM_STATES), None, None)
    action = torch.randint(3, (2, 5))
    losses = [
        algorithm.calc_loss(experience, algorithm.train_step(experience, None).info).loss
        for algorithm, experience in (
            (bare, Experience(step, action, None, None)),
            (nested, Experience(step, {"a": (action,)}, None, None)),
        )
    ]
    assert torch.equal(*losses)


def make_random(action):
    torch.manual_seed(0)
    return DQN(OBSERVATION, action, REWARD)


def test_a_lower_bound_of_a_vector_reward_is_refused():
    with pytest.raises(UsageError, match="DQN.values is set, but such values require a scalar reward, and"):
        DQN(OBSERVATION, spaces.Discrete(2), spaces.Box(-1, 1, (2,)), values=LowerBounded)
