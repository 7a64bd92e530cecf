"""Returns against a plain loop that follows one environment at a time, and against tables worked by hand."""

import itertools
import math

import pytest
import torch

from alfish import returns
from alfish.data import StepType, trainable

FIRST, MID, LAST, PAD = StepType.FIRST, StepType.MID, StepType.LAST, StepType.PAD
FUNCTIONS = {
    "discounted_return": returns.discounted_return,
    "lambda_return": lambda *rows: returns.lambda_return(*rows, 0.7),
    "gae": lambda *rows: returns.gae(*rows, 0.7),
}


def _column(*kinds):
    return torch.tensor(kinds, dtype=torch.int32)[:, None]


def _stream(num_rows, num_envs, num_rewards=None, seed=0, ragged=True):
    """Random columns of the grammar: episodes that terminate or are truncated, lost lives, PAD at the end."""
    generator = torch.Generator().manual_seed(seed)

    def chance():
        return torch.rand((), generator=generator).item()

    step_type = torch.zeros(num_rows, num_envs, dtype=torch.int32)
    discount = torch.ones(num_rows, num_envs)
    for b in range(num_envs):
        length = num_rows - (int(chance() * num_rows / 2) if ragged and b else 0)
        previous = LAST if chance() < 0.5 else MID
        for t in range(num_rows):
            if t >= length:
                kind = PAD
            elif previous == LAST:
                kind = FIRST
            else:
                kind = LAST if chance() < 0.3 else MID
            ends = kind == LAST and chance() < 0.5
            discount[t, b] = 0 if ends or (kind == MID and chance() < 0.1) else 1
            step_type[t, b] = previous = kind
    shape = (num_rows, num_envs) if num_rewards is None else (num_rows, num_envs, num_rewards)
    reward, value = torch.randn(2, *shape, generator=generator).unbind()
    return reward, 0.9 * discount, value, step_type


def _plain_gae(reward, discount, value, step_type, lambda_):
    """The definition, one number at a time. `discount` `[T, B]` or `[T, B, R]`, all else as in `gae`."""
    num_rows = len(reward)
    result = torch.zeros_like(reward[1:])
    entries = [range(n) for n in reward.shape[1:]]
    for b, *r in itertools.product(*entries):
        at = (b, *r)
        advantage = 0.0
        for t in reversed(range(num_rows - 1)):
            if step_type[t, b] in (LAST, PAD) or step_type[t + 1, b] in (FIRST, PAD):
                advantage = 0.0
                continue
            g = float(discount[(t + 1, *at)] if discount.ndim == reward.ndim else discount[t + 1, b])
            delta = float(reward[(t + 1, *at)]) + g * float(value[(t + 1, *at)]) - float(value[(t, *at)])
            advantage = delta + g * lambda_ * advantage
            result[(t, *at)] = advantage
    return result


def _plain_lambda_return(reward, discount, value, step_type, lambda_):
    num_rows, shape = len(reward), reward.shape[1:]
    result = torch.zeros_like(reward[1:])
    for b, *r in itertools.product(*[range(n) for n in shape]):
        at = (b, *r)
        following = float(value[(num_rows - 1, *at)])
        for t in reversed(range(num_rows - 1)):
            if step_type[t, b] in (LAST, PAD) or step_type[t + 1, b] in (FIRST, PAD):
                following = float(value[(t, *at)])
                continue
            g = float(discount[(t + 1, *at)] if discount.ndim == reward.ndim else discount[t + 1, b])
            arrival = float(value[(t + 1, *at)])
            following = float(reward[(t + 1, *at)]) + g * ((1 - lambda_) * arrival + lambda_ * following)
            result[(t, *at)] = following
    return result


@pytest.mark.parametrize("lambda_", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("num_rewards", [None, 1, 3, 4])  # 4 is also the number of environments
@pytest.mark.parametrize("seed", [0, 1])
def test_gae_is_the_plain_loop_on_random_streams(lambda_, num_rewards, seed):
    rows = _stream(37, 4, num_rewards, seed)
    torch.testing.assert_close(returns.gae(*rows, lambda_), _plain_gae(*rows, lambda_), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("lambda_", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("num_rewards", [None, 3, 4])
def test_lambda_return_is_the_plain_loop_on_random_streams(lambda_, num_rewards):
    rows = _stream(37, 4, num_rewards, seed=2)
    expected = _plain_lambda_return(*rows, lambda_)
    torch.testing.assert_close(returns.lambda_return(*rows, lambda_), expected, atol=1e-5, rtol=1e-5)
    if lambda_ == 1:
        torch.testing.assert_close(returns.discounted_return(*rows), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("num_rewards", [3, 4])
def test_each_reward_may_have_its_own_discount(num_rewards):
    reward, discount, value, step_type = _stream(20, 4, num_rewards, seed=3)
    own = discount[..., None] * torch.linspace(0.5, 1, num_rewards)
    expected = _plain_gae(reward, own, value, step_type, 0.8)
    torch.testing.assert_close(returns.gae(reward, own, value, step_type, 0.8), expected, atol=1e-5, rtol=1e-5)
    for r in range(num_rewards):
        alone = returns.gae(reward[..., r], own[..., r], value[..., r], step_type, 0.8)
        torch.testing.assert_close(expected[..., r], alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_batch_is_its_columns_computed_apart(function):
    rows = _stream(25, 5, seed=4)
    together = FUNCTIONS[function](*rows)
    apart = [FUNCTIONS[function](*(leaf[:, b : b + 1] for leaf in rows)) for b in range(5)]
    torch.testing.assert_close(together, torch.cat(apart, 1))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_an_episode_does_not_depend_on_its_neighbours_in_time(function):
    generator = torch.Generator().manual_seed(0)
    step_type = _column(FIRST, MID, LAST, FIRST, MID, MID, LAST)
    reward, value = torch.randn(2, 7, 1, generator=generator).unbind()
    discount = torch.full((7, 1), 0.9)
    both = FUNCTIONS[function](reward, discount, value, step_type)
    ahead = FUNCTIONS[function](reward[:3], discount[:3], value[:3], step_type[:3])
    behind = FUNCTIONS[function](reward[3:], discount[3:], value[3:], step_type[3:])
    torch.testing.assert_close(both, torch.cat([ahead, torch.zeros(1, 1), behind]))


@pytest.mark.parametrize("garbage", [1e6, math.inf, math.nan])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_reward_and_discount_of_first_rows_are_never_read(function, garbage):
    reward, discount, value, step_type = _stream(30, 6, seed=5)
    expected = FUNCTIONS[function](reward, discount, value, step_type)
    unread = (step_type == FIRST) | (step_type == PAD)
    unread[0] = True  # whatever row 0 is, its reward belongs to the action before it
    dirty = reward.masked_fill(unread, garbage), discount.masked_fill(unread, garbage)
    assert torch.equal(FUNCTIONS[function](*dirty, value, step_type), expected)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_nothing_is_read_of_padding(function):
    reward, discount, value, step_type = _stream(30, 6, seed=6)
    assert (step_type == PAD).any()
    expected = FUNCTIONS[function](reward, discount, value, step_type)
    dirty = [leaf.masked_fill(step_type == PAD, math.nan) for leaf in (reward, discount, value)]
    assert torch.equal(FUNCTIONS[function](*dirty, step_type), expected)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_rows_that_do_not_train_are_zero(function):
    rows = _stream(30, 6, seed=7)
    result = FUNCTIONS[function](*rows)
    assert (result[~trainable(rows[-1])] == 0).all()


class TestEndOfAnEpisode:
    """One step from value 5 to value 7, reward 1, gamma 0.9."""

    def _one_step(self, kind, environment_discount, function=returns.discounted_return):
        reward, value = torch.tensor([[50.0], [1.0]]), torch.tensor([[5.0], [7.0]])
        discount = 0.9 * torch.tensor([[1.0], [environment_discount]])
        return function(reward, discount, value, _column(FIRST, kind)).item()

    def test_a_truncated_one_bootstraps_from_its_final_observation(self):
        assert self._one_step(LAST, 1) == pytest.approx(1 + 0.9 * 7)

    def test_a_terminated_one_does_not(self):
        assert self._one_step(LAST, 0) == pytest.approx(1)

    def test_the_advantage_of_the_one_and_of_the_other(self):
        assert self._one_step(LAST, 1, FUNCTIONS["gae"]) == pytest.approx(1 + 0.9 * 7 - 5)
        assert self._one_step(LAST, 0, FUNCTIONS["gae"]) == pytest.approx(1 - 5)

    def test_one_still_under_way_bootstraps_from_the_last_row(self):
        assert self._one_step(MID, 1) == pytest.approx(1 + 0.9 * 7)

    def test_a_lost_life_stops_the_value_and_not_the_episode(self):
        step_type = _column(FIRST, MID, MID)
        reward, value = torch.ones(3, 1), torch.full((3, 1), 5.0)
        discount = 0.9 * torch.tensor([[1.0], [0.0], [1.0]])
        result = returns.discounted_return(reward, discount, value, step_type)
        assert result[:, 0].tolist() == pytest.approx([1, 1 + 0.9 * 5])


class TestGoldenNumbers:
    def _rows(self, reward, value, middle, discount):
        step_type = _column(MID, MID, middle, FIRST if middle == LAST else MID, MID)
        # The row after LAST is FIRST; the published table has MID there, which trains the same rows.
        discounts = torch.full((5, 1), 0.9)
        discounts[2] = discount
        return torch.full((5, 1), reward), discounts, torch.full((5, 1), value), step_type

    def test_returns_of_an_episode_under_way(self):
        result = returns.discounted_return(*self._rows(2.0, 1.0, MID, 0.9))[:, 0].tolist()
        expected = [2.9]
        for _ in range(3):
            expected.insert(0, 0.9 * expected[0] + 2)
        assert result == pytest.approx(expected)

    @pytest.mark.parametrize(("discount", "expected"), [(0.9, [4.61, 2.9, 0, 2.9]), (0.0, [3.8, 2, 0, 2.9])])
    def test_returns_of_a_time_out_and_of_a_termination(self, discount, expected):
        result = returns.discounted_return(*self._rows(2.0, 1.0, LAST, discount))
        assert result[:, 0].tolist() == pytest.approx(expected)

    def test_advantages_of_an_episode_under_way(self):
        result = returns.gae(*self._rows(3.0, 2.0, MID, 0.9), 0.6 / 0.9)[:, 0].tolist()
        expected = [2.8]
        for _ in range(3):
            expected.insert(0, 2.8 + 0.6 * expected[0])
        assert result == pytest.approx(expected)

    @pytest.mark.parametrize(("discount", "expected"), [(0.9, [4.48, 2.8, 0, 2.8]), (0.0, [3.4, 1, 0, 2.8])])
    def test_advantages_of_a_time_out_and_of_a_termination(self, discount, expected):
        result = returns.gae(*self._rows(3.0, 2.0, LAST, discount), 0.6 / 0.9)
        assert result[:, 0].tolist() == pytest.approx(expected)


def test_all_rows_but_the_last_train_and_the_last_one_bootstraps():
    step_type = _column(MID, MID, MID)
    reward, discount, value = torch.ones(3, 1), torch.full((3, 1), 0.5), torch.tensor([[0.0], [0.0], [8.0]])
    assert returns.gae(reward, discount, value, step_type, 0.0)[:, 0].tolist() == [1, 5]
    assert returns.discounted_return(reward, discount, value, step_type)[:, 0].tolist() == [3.5, 5]


def test_lambda_zero_is_one_step_and_lambda_one_is_the_whole_return():
    reward, discount, value, step_type = _stream(20, 3, seed=8)
    mask = trainable(step_type)
    one_step = torch.where(mask, reward[1:] + discount[1:] * value[1:], 0)
    torch.testing.assert_close(returns.lambda_return(reward, discount, value, step_type, 0.0), one_step)
    whole = returns.discounted_return(reward, discount, value, step_type)
    advantage = returns.gae(reward, discount, value, step_type, 1.0)
    torch.testing.assert_close(torch.where(mask, advantage + value[:-1], 0), whole)


@pytest.mark.parametrize("num_rows", [1, 2, 3, 7, 8, 9, 130])
@pytest.mark.parametrize("shape", [(), (3,), (3, 2)])
def test_reverse_scan_is_the_recursion(num_rows, shape):
    generator = torch.Generator().manual_seed(num_rows)
    decay = torch.rand(num_rows, *shape, generator=generator, dtype=torch.float64) * 1.1
    increment = torch.randn(num_rows, *shape, generator=generator, dtype=torch.float64)
    expected, x = [], torch.zeros(shape, dtype=torch.float64)
    for t in reversed(range(num_rows)):
        x = increment[t] + decay[t] * x
        expected.insert(0, x)
    torch.testing.assert_close(returns.reverse_scan(decay, increment), torch.stack(expected))


def test_reverse_scan_leaves_its_arguments_and_spreads_a_narrow_decay():
    decay, increment = torch.full((5, 2, 1), 0.5), torch.ones(5, 2, 3)
    result = returns.reverse_scan(decay, increment)
    assert result.shape == (5, 2, 3)
    assert result[0, 0, 0].item() == pytest.approx(1 + 0.5 + 0.25 + 0.125 + 0.0625)
    assert (increment == 1).all()
    assert (decay == 0.5).all()


def test_standardize_uses_masked_rows_for_nothing():
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(6, 4, generator=generator) * 3 + 10
    mask = torch.rand(6, 4, generator=generator) < 0.6
    expected = values[mask]
    expected = (expected - expected.mean()) / expected.std(correction=0)
    for filler in (0.0, 1e4, math.nan):
        result = returns.standardize(torch.where(mask, values, filler), mask)[mask]
        torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)


def test_standardize_of_equal_values_is_finite():
    assert returns.standardize(torch.full((2, 2), 3.0), torch.ones(2, 2, dtype=torch.bool)).abs().max() < 1e-3


@pytest.mark.parametrize(
    "change",
    [
        {"value": (5, 4)},
        {"value": (4, 3)},
        {"value": (5, 3, 1)},
        {"discount": (4, 3)},
        {"discount": (5, 1)},
        {"discount": (5, 3, 2)},
        {"discount": (5, 3, 3)},  # would broadcast, silently wrong, because B is 3
        {"step_type": (5, 4)},
        {"step_type": (5,)},
        {"reward": (5, 3, 2)},
        {"reward": (5, 3, 2), "value": (5, 3, 2), "discount": (5, 3, 3)},
    ],
    ids=str,
)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_wrong_shapes_are_refused(function, change):
    shapes = dict.fromkeys(("reward", "discount", "value", "step_type"), (5, 3)) | change
    *rows, step_type = (torch.zeros(shape) for shape in shapes.values())
    with pytest.raises(ValueError, match="shapes differ"):
        FUNCTIONS[function](*rows, step_type.int())


@pytest.mark.parametrize("function", FUNCTIONS)
def test_one_row_is_refused(function):
    with pytest.raises(ValueError, match="at least 2 rows"):
        FUNCTIONS[function](*[torch.zeros(1, 3)] * 3, torch.zeros(1, 3, dtype=torch.int32))
