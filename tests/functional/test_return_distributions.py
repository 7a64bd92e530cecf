"""Values that are distributions: projections, quantile losses, n-step targets, and the algorithms that take them."""

import functools

import numpy as np
import pytest
import torch
from gymnasium import spaces

from alfish import specs
from alfish.algorithms.dqn import DQN
from alfish.algorithms.munchausen import MunchausenDQN, SoftDQN
from alfish.algorithms.redq import REDQ
from alfish.algorithms.retrace import RetraceDQN
from alfish.algorithms.sac import SAC
from alfish.data import Experience, StepType, TimeStep
from alfish.errors import UsageError
from alfish.functional.return_distributions import Bins, ImplicitQuantiles, Quantiles
from alfish.functional.targets import NextValues
from alfish.functional.values import LowerBounded, Scalar
from alfish.networks import CriticEnsemble, ImplicitQNetwork, QNetwork, first_and_bootstrap_rows

OBSERVATION = spaces.Box(-1, 1, (3,), np.float32)
REWARD = spaces.Box(-np.inf, np.inf, (), np.float32)
CHOICE = spaces.Discrete(3)
BOX = spaces.Box(-1, 1, (2,), np.float32)


def logits(*probabilities):
    return torch.tensor(probabilities).clamp(min=1e-30).log()


def window(rewards, discounts=None, step_types=None, num_columns=1):
    """Rows `[L, N]` with these rewards, of an episode that goes on unless told."""
    length = len(rewards)
    types = torch.tensor(step_types or [StepType.MID] * length, dtype=torch.int32)
    columns = [torch.tensor(x, dtype=torch.float32) for x in (rewards, discounts or [1.0] * length)]
    reward, discount = (x[:, None].expand(length, num_columns) for x in columns)
    observation = torch.randn(length, num_columns, 3)
    step = TimeStep(types[:, None].expand(length, num_columns), reward, discount, observation, None, None)
    return Experience(step, torch.zeros(length, num_columns, dtype=torch.int64), None, None)


@pytest.mark.parametrize(
    "reward, discount, expected",
    [
        (0.25, 1.0, (0.0, 0.75, 0.25)),  # between two bins
        (5.0, 1.0, (0.0, 0.0, 1.0)),  # beyond the last
        (-5.0, 1.0, (1.0, 0.0, 0.0)),  # below the first
        (1.0, 1.0, (0.0, 0.0, 1.0)),  # exactly on a bin
        (-0.5, 0.0, (0.5, 0.5, 0.0)),  # terminated: the reward alone
    ],
)
def test_a_certain_return_is_divided_between_the_bins_beside_it(reward, discount, expected):
    values = Bins(1.0, num_bins=3, low=-1.0, high=1.0)
    target = values.shifted(logits(0.0, 1.0, 0.0), torch.tensor(reward), torch.tensor(discount))
    assert target.tolist() == pytest.approx(expected, abs=1e-6)


def test_projected_probabilities_sum_to_1_and_keep_the_mean():
    values = Bins(0.9, num_bins=51, low=-10.0, high=10.0)
    raw = torch.randn(7, 51)
    reward, discount = torch.randn(7), torch.rand(7) * 0.5
    target = values.shifted(raw, reward, discount)
    torch.testing.assert_close(target.sum(-1), torch.ones(7))
    torch.testing.assert_close((target * values.returns).sum(-1), reward + discount * values.scalarized(raw))


def test_a_bonus_shifts_all_returns_and_is_discounted():
    values = Bins(1.0, num_bins=5, low=-2.0, high=2.0)
    raw = values.with_bonus(values.with_bonus(logits(0.0, 0.0, 1.0, 0.0, 0.0), torch.tensor(1.5)), torch.tensor(0.5))
    assert values.scalarized(raw).item() == pytest.approx(2.0)
    target = values.shifted(raw, torch.tensor(0.0), torch.tensor(0.5))
    assert target.tolist() == pytest.approx([0, 0, 0, 1, 0], abs=1e-6)  # 0.5 (0 + 2)


@pytest.mark.parametrize(
    "value, expected",
    [
        # Intervals of width 1 around -1, 0 and 1, and a deviation of 0.5: from Phi(1) = 0.84134, Phi(3) = 0.99865.
        (0.0, (0.15731 / 0.99730, 0.68269 / 0.99730, 0.15731 / 0.99730)),
        (1.0, (0.00135 / 0.84134, 0.15731 / 0.84134, 0.68269 / 0.84134)),
        (7.0, (0.00135 / 0.84134, 0.15731 / 0.84134, 0.68269 / 0.84134)),  # cut off at 1
        (-7.0, (0.68269 / 0.84134, 0.15731 / 0.84134, 0.00135 / 0.84134)),
    ],
)
def test_a_smoothed_return_has_the_probabilities_of_a_normal_in_the_bins_intervals(value, expected):
    values = Bins(1.0, num_bins=3, low=-1.0, high=1.0, smoothing=0.5)
    assert values.certain(torch.tensor(value)).tolist() == pytest.approx(expected, abs=1e-4)
    shifted = values.shifted(logits(0.0, 1.0, 0.0), torch.tensor(value), torch.tensor(1.0))
    torch.testing.assert_close(shifted, values.certain(torch.tensor(value)))


def test_smoothed_probabilities_sum_to_1_and_keep_inner_means():
    values = Bins(0.9, num_bins=151, low=-5.0, high=5.0, smoothing=0.75)
    returns = torch.linspace(-5, 5, 1001)
    target = values.certain(returns)
    torch.testing.assert_close(target.sum(-1), torch.ones(1001))
    mean, inner = (target * values.returns).sum(-1), returns.abs() < 4.7
    torch.testing.assert_close(mean[inner], returns[inner], atol=1e-4, rtol=0)
    assert (mean - returns).abs().max() < 10 / 150, "less than the distance of two bins at the ends"
    assert values.clipped(torch.tensor([-5.1, -5.0, 0.0, 5.0, 5.1])).tolist() == [1, 0, 0, 0, 1]


def test_certain_returns_without_smoothing_are_divided_between_two_bins():
    values = Bins(1.0, num_bins=3, low=-1.0, high=1.0)
    assert values.certain(torch.tensor([0.25, 9.0])).tolist() == [[0, 0.75, 0.25], [0, 0, 1]]


def test_the_loss_of_bins_is_the_cross_entropy_and_least_where_they_agree():
    values = Bins(1.0, num_bins=3)
    target, raw = torch.tensor([0.0, 0.75, 0.25]), logits(0.5, 0.25, 0.25)
    loss, error = values.loss(raw, target)
    assert loss.item() == pytest.approx(-0.75 * np.log(0.25) - 0.25 * np.log(0.25)) and torch.equal(loss, error)
    assert values.loss(logits(0.0, 0.75, 0.25), target).loss < loss


def test_least_bins_come_from_the_critic_with_the_smaller_row_mean():
    values = Bins(1.0, num_bins=3, low=-1.0, high=1.0)
    high, low = logits(0.1, 0.1, 0.8), logits(0.8, 0.1, 0.1)
    q = torch.stack([torch.stack([high, low]), torch.stack([low, high])])  # [E, N, K]
    assert torch.equal(values.least(q), torch.stack([low, low]))


def test_the_average_of_critics_with_bins_is_their_mean_value():
    values = Bins(1.0, num_bins=3, low=-1.0, high=1.0)
    q = torch.stack([logits(0.0001, 0.0499, 0.95), logits(0.7, 0.2, 0.1)]) + torch.tensor([[2.0], [-3.0]])  # [E, K]
    assert values.scalarized(values.average(q)).item() == pytest.approx((0.9499 - 0.6) / 2, abs=1e-6)
    bonus = values.with_bonus(values.average(q), torch.tensor(0.5))
    assert values.scalarized(bonus).item() == pytest.approx((0.9499 - 0.6) / 2 + 0.5, abs=1e-6)


def test_actors_maximize_the_mean_value_of_binned_critics():
    sac = REDQ(OBSERVATION, BOX, REWARD, values=Bins, initial_alpha=1e-30, learn_alpha=False)
    with torch.no_grad():  # values that differ, and do not depend on the action
        last = sac.critic.body[-1]
        last.weight.zero_(), last.bias.normal_(std=3.0)
    experience = window([0.0, 1.0])._replace(action=torch.zeros(2, 1, 2))
    value = sac.train_step(experience, None).info.value
    means = sac.values.scalarized(sac.critic(torch.zeros(1, 3), torch.zeros(1, 2)))
    assert value.item() == pytest.approx(means.mean().item(), abs=1e-5)


def test_the_quantile_loss_of_an_example_by_hand():
    values = Quantiles(1.0, num_quantiles=2)
    loss, error = values.loss(torch.tensor([0.0, 1.0]), torch.tensor([0.0, 2.0]))
    assert loss.item() == pytest.approx(0.4375) and error.item() == pytest.approx(1.0)


def test_quantile_loss_is_minimal_at_target_quantiles():
    values = Quantiles(1.0, num_quantiles=4, huber_delta=1e-3)
    samples = torch.linspace(0, 8, 4001)
    best = torch.tensor([1.0, 3.0, 5.0, 7.0])
    at_best = values.loss(best, samples).loss
    for k in range(4):
        for step in (-0.5, 0.5):
            moved = best.clone()
            moved[k] += step
            assert values.loss(moved, samples).loss > at_best


def test_the_largest_quantiles_of_all_critics_together_are_left_out():
    q = torch.tensor([[0.0, 5.0, 9.0], [1.0, 2.0, 3.0]])  # [E, K]
    assert sorted(Quantiles(1.0, num_quantiles=3).least(q).tolist()) == [0, 1, 2, 3, 5, 9]
    assert Quantiles(1.0, num_quantiles=3, num_dropped=1).least(q).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("rewards", [[0.0, 1.0], [0.0, 1.0, 2.0, 4.0]])
def test_target_means_equal_targets_of_means(rewards):
    experience = window(rewards, num_columns=5)
    quantiles = torch.randn(len(rewards) - 1, 5, 4)
    expected = Scalar(0.9).target(experience, NextValues(quantiles.mean(-1)), 1.0)[:1]
    target = Quantiles(0.9, num_quantiles=4).target(experience, NextValues(quantiles[-1:]), 1.0)
    torch.testing.assert_close(target.mean(-1), expected)


@pytest.mark.parametrize("lambda_, reached, total, discount", [(1.0, 1, 1 + 0.5 * 2, 0.25), (0.0, 0, 1.0, 0.5)])
def test_n_step_targets_use_the_distribution_of_their_last_row(lambda_, reached, total, discount):
    types = [StepType.FIRST, StepType.MID, StepType.LAST, StepType.FIRST]
    experience = window([0.0, 1.0, 2.0, 4.0], step_types=types)  # the third row ends the episode, by its time limit
    following = torch.arange(6.0).reshape(3, 1, 2)
    action = torch.cat([torch.zeros(1, 1, 2), following])  # stands for the values of all rows
    end = first_and_bootstrap_rows(experience._replace(action=action), lambda_).action[1:]
    target = Quantiles(0.5, num_quantiles=2).target(experience, NextValues(end), lambda_)
    torch.testing.assert_close(target, total + discount * following[reached][None])


def test_one_median_quantile_with_large_delta_has_half_squared_error():
    q, target = torch.randn(6, 1), torch.randn(6, 1)
    found = Quantiles(0.9, num_quantiles=1, huber_delta=1e6).loss(q, target).loss
    torch.testing.assert_close(2 * found, Scalar(0.9).loss(q[..., 0], target[..., 0]).loss)


@pytest.mark.parametrize("values", [Bins, Quantiles])
def test_dqn_acts_by_the_mean_and_trains_every_value_of_the_taken_action(values):
    torch.manual_seed(0)
    dqn = DQN(OBSERVATION, CHOICE, REWARD, values=values)
    experience = window([0.0, 1.0, -1.0], num_columns=4)
    q, _ = dqn.q_network(experience.time_step, None)
    assert q.shape == (3, 4, 3, dqn.values.num_values)
    chosen = dqn.predict_step(experience.time_step, None).output
    assert torch.equal(chosen, dqn.values.scalarized(q).argmax(-1))
    info = dqn.train_step(experience, None).info
    assert torch.equal(info.q, q[:1, :, 0])
    loss = dqn.calc_loss(experience, info)
    assert loss.loss.shape == loss.priority.shape == (1, 4)
    loss.loss.sum().backward()
    assert dqn.q_network.advantage.weight.grad[: 3 * dqn.values.num_values].count_nonzero() > 0


@pytest.mark.parametrize("values", [Bins, Quantiles])
def test_the_distributions_of_sac_learn_the_value_of_the_only_action(values):
    """One state, reward 1, terminated: the mean of each critic goes to 1."""
    torch.manual_seed(0)
    sac = SAC(
        OBSERVATION,
        BOX,
        REWARD,
        critic=functools.partial(CriticEnsemble, layers=(32,)),
        values=lambda gamma: values(gamma, *([21, -2.0, 2.0] if values is Bins else [5])),
    )
    experience = window([0.0, 1.0], [1.0, 0.0], num_columns=8)._replace(action=torch.zeros(2, 8, 2))
    optimizer = torch.optim.Adam(sac.critic.parameters(), 1e-2)
    for _ in range(150):
        loss = sac.calc_loss(experience, sac.train_step(experience, None).info)
        optimizer.zero_grad()
        loss.loss["critic"].mean().backward()
        optimizer.step()
    info = sac.train_step(experience, None).info
    assert all(value.shape in ((1, 8), ()) for value in sac.calc_loss(experience, info).extra.values())
    q = sac.values.scalarized(info.q)
    torch.testing.assert_close(q, torch.ones_like(q), atol=0.05, rtol=0)


def test_soft_value_and_munchausen_bonus_equal_hand_computed_values():
    class Table(torch.nn.Module):
        """Values (0, 1) at each row."""

        def __init__(self, observation_spec, num_actions):
            super().__init__()
            self.q = torch.nn.Parameter(torch.tensor([0.0, 1.0]))

        def initial_state(self, batch_size):
            return None

        def forward(self, time_step, state):
            return self.q.expand(*time_step.step_type.shape, 2), state

    arguments = OBSERVATION, spaces.Discrete(2), REWARD
    experience = window([0.0, 3.0])  # the action is 0
    soft_value = 0.5 * np.log(np.exp(0) + np.exp(2))
    for munchausen, floor, bonus in [(0.0, -1.0, 0.0), (0.9, -9.0, 0.9 * -soft_value), (0.9, -1.0, -0.9)]:
        dqn = MunchausenDQN(
            *arguments,
            q_network=Table,
            gamma=0.9,
            entropy_temperature=0.5,
            munchausen=munchausen,
            log_policy_floor=floor,
        )
        info = dqn.train_step(experience, None).info
        target = dqn.values.target(experience, info.following, 1.0)
        assert target.item() == pytest.approx(3 + bonus + 0.9 * soft_value, abs=1e-5)


@pytest.mark.parametrize(
    "algorithm, action, arguments, words",
    [
        (RetraceDQN, CHOICE, {"values": Bins}, "RetraceDQN does not support retrace with Bins"),
        (DQN, CHOICE, {"values": Bins, "lambda_": 0.5}, "DQN.lambda_ is 0.5"),
        (SoftDQN, CHOICE, {"values": Quantiles}, "SoftDQN requires scalar values"),
        (MunchausenDQN, CHOICE, {"values": LowerBounded}, "MunchausenDQN cannot use @LowerBounded values"),
        (SAC, CHOICE, {"values": Bins}, "SAC does not support discrete actions with Bins"),
    ],
)
def test_what_distributions_cannot_do_is_refused(algorithm, action, arguments, words):
    with pytest.raises(UsageError, match=words):
        algorithm(OBSERVATION, action, REWARD, **arguments)


def test_a_vector_reward_has_no_distribution():
    with pytest.raises(UsageError, match="the environment's reward has 2 entries"):
        DQN(OBSERVATION, CHOICE, spaces.Box(-1, 1, (2,), np.float32), values=Bins)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"num_bins": 1}, "num_bins.* an integer of at least 2"),
        ({"low": 1.0, "high": 1.0}, "`low` must be below `high`"),
    ],
)
def test_bins_without_a_range_are_refused(arguments, words):
    with pytest.raises(UsageError, match=words):
        Bins(0.9, **arguments)


def test_quantiles_are_not_all_dropped():
    with pytest.raises(UsageError, match="num_dropped is 5; it must be less than num_quantiles, which is 5"):
        Quantiles(0.9, num_quantiles=5, num_dropped=5)


def test_one_network_has_no_quantiles_to_drop():
    values = functools.partial(Quantiles, num_dropped=2)
    space = spaces.Box(-1, 1, (3,), np.float32)
    with pytest.raises(UsageError, match="num_dropped is 2, but it requires several critics and DQN has one"):
        DQN(space, spaces.Discrete(2), specs.reward_spec(), values=values)


def test_implicit_quantiles_carry_their_probabilities():
    values = ImplicitQuantiles(1.0, num_samples=2)
    raw = torch.tensor([0.0, 1.0, 0.25, 0.75])  # returns, and then probabilities
    assert values.scalarized(raw).item() == 0.5
    assert values.loss(raw, torch.tensor([0.0, 2.0])).loss.item() == pytest.approx(0.4375)
    assert values.shifted(raw, torch.tensor(1.0), torch.tensor(0.5)).tolist() == [1.0, 1.5]


@pytest.mark.parametrize(
    "network, values, words",
    [
        (QNetwork, ImplicitQuantiles, "QNetwork takes no num_samples, so it cannot predict ImplicitQuantiles"),
        (ImplicitQNetwork, Quantiles, "ImplicitQNetwork takes no num_values, so it cannot predict Quantiles"),
        (ImplicitQNetwork, None, "ImplicitQNetwork predicts only @ImplicitQuantiles"),
        (lambda *specs: QNetwork(*specs), Quantiles, "DQN.q_network cannot be called .*'num_values'"),
    ],
)
def test_a_network_that_does_not_predict_the_values_is_refused(network, values, words):
    with pytest.raises(UsageError, match=words):
        DQN(OBSERVATION, CHOICE, REWARD, q_network=network, values=values)


def test_iqn_draws_probabilities_in_training_and_none_in_evaluation():
    torch.manual_seed(0)
    dqn = DQN(OBSERVATION, CHOICE, REWARD, q_network=ImplicitQNetwork, values=ImplicitQuantiles)
    step = window([0.0], num_columns=4).time_step
    first, second = (dqn.q_network(step, None)[0] for _ in range(2))
    assert first.shape == (1, 4, 3, 64) and not torch.equal(first, second)
    assert torch.equal(first[..., 0, 32:], first[..., 1, 32:]) and not torch.equal(
        first[0, 0, 0, 32:], first[0, 1, 0, 32:]
    )
    dqn.eval()
    first, second = (dqn.q_network(step, None)[0] for _ in range(2))
    assert torch.equal(first, second) and first[0, 0, 0, 32].item() == pytest.approx(1 / 64)


def test_iqn_learns_the_quantiles_of_a_reward():
    """One state, one action, terminated; the reward is 0 or 1, equally often."""
    torch.manual_seed(0)
    dqn = DQN(OBSERVATION, spaces.Discrete(1), REWARD, q_network=ImplicitQNetwork,
              values=lambda gamma: ImplicitQuantiles(gamma, huber_delta=0.01))  # fmt: skip
    experience = window([0.0, 0.0], [1.0, 0.0], num_columns=8)
    experience.time_step.observation.fill_(0.5)
    step = experience.time_step._replace(reward=(torch.arange(8) % 2).float().expand(2, 8))
    experience = experience._replace(time_step=step)
    optimizer = torch.optim.Adam(dqn.q_network.parameters(), 3e-3)
    for _ in range(200):
        optimizer.zero_grad()
        dqn.calc_loss(experience, dqn.train_step(experience, None).info).loss.mean().backward()
        optimizer.step()
    dqn.eval()
    quantiles = dqn.q_network(step, None)[0][0, 0, 0, :32]
    assert quantiles[:12].abs().max() < 0.2 and (quantiles[20:] - 1).abs().max() < 0.2
