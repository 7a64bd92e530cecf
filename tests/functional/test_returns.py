"""Returns against a plain loop that follows one environment at a time, and against tables worked by hand."""

import itertools
import math

import pytest
import torch

from alfish.data import StepType, trainable
from alfish.errors import UsageError
from alfish.functional import returns, targets

FIRST, MID, LAST, PAD = StepType.FIRST, StepType.MID, StepType.LAST, StepType.PAD


# Of the values, action values and traces of all rows; the functions themselves take those of rows 1 to T-1.


def _discounted_return(reward, discount, value, step_type):
    return returns.discounted_return(reward, discount, value[1:], step_type)


def _lambda_return(reward, discount, value, step_type, lambda_):
    return returns.lambda_return(reward, discount, value[1:], step_type, lambda_)


def _retrace(reward, discount, q, value, step_type, trace, lambda_):
    return targets.retrace(reward, discount, q[1:], value[1:], step_type, trace[1:], lambda_)


FUNCTIONS = {
    "discounted_return": _discounted_return,
    "lambda_return": lambda *rows: _lambda_return(*rows, 0.7),
    "gae": lambda *rows: returns.gae(*rows, 0.7),
    # A ratio that each row brings along, however rows are cut apart: about half of them are clipped.
    "vtrace targets": lambda *rows: targets.vtrace(*rows, rows[2].exp(), 0.7).target,
    "vtrace advantages": lambda *rows: targets.vtrace(*rows, rows[2].exp(), 0.7).advantage,
    # Action values and traces that each row brings along, likewise.
    "retrace": lambda reward, discount, value, step_type: _retrace(
        reward, discount, value.cos(), value, step_type, value.sigmoid(), 0.7
    ),
}


def _column(*kinds):
    return torch.tensor(kinds, dtype=torch.int32)[:, None]


def _stream(num_rows, num_envs, num_rewards=None, seed=0, uneven=True):
    """Random columns of the grammar: episodes that terminate or are truncated, lost lives, PAD at the end."""
    generator = torch.Generator().manual_seed(seed)

    def chance():
        return torch.rand((), generator=generator).item()

    step_type = torch.zeros(num_rows, num_envs, dtype=torch.int32)
    discount = torch.ones(num_rows, num_envs)
    for b in range(num_envs):
        length = num_rows - (int(chance() * num_rows / 2) if uneven and b else 0)
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


def _plain_vtrace(reward, discount, value, step_type, ratio, lambda_, rho_bar, c_bar):
    """Espeholt et al.'s eq. 1, its sum and its products written out for every row, and q from the next row's target."""
    num_rows, shape = len(reward), reward.shape[1:]
    target, advantage = torch.zeros_like(reward[1:]), torch.zeros_like(reward[1:])
    for b, *r in itertools.product(*[range(n) for n in shape]):
        at = (b, *r)

        def trains(t, b=b):
            kinds = step_type[t : t + 2, b].tolist()
            return len(kinds) == 2 and kinds[0] in (FIRST, MID) and kinds[1] in (MID, LAST)

        def gamma(t, at=at, b=b):
            return float(discount[(t + 1, *at)] if discount.ndim == reward.ndim else discount[t + 1, b])

        def error(t, at=at, gamma=gamma):
            return float(reward[(t + 1, *at)]) + gamma(t) * float(value[(t + 1, *at)]) - float(value[(t, *at)])

        for start in range(num_rows - 1):
            total, weight, t = 0.0, 1.0, start
            while t < num_rows - 1 and trains(t):
                rho, c = min(rho_bar, float(ratio[t, b])), min(c_bar, float(ratio[t, b]))
                total += weight * rho * error(t)
                weight *= gamma(t) * lambda_ * c
                t += 1
            target[(start, *at)] = float(value[(start, *at)]) + total if trains(start) else 0.0
        for t in filter(trains, range(num_rows - 1)):
            following = float(value[(t + 1, *at)])
            if trains(t + 1):
                following += lambda_ * (float(target[(t + 1, *at)]) - following)
            q = float(reward[(t + 1, *at)]) + gamma(t) * following
            advantage[(t, *at)] = q - float(value[(t, *at)])
    return target, advantage


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
    torch.testing.assert_close(_lambda_return(*rows, lambda_), expected, atol=1e-5, rtol=1e-5)
    if lambda_ == 1:
        torch.testing.assert_close(_discounted_return(*rows), expected, atol=1e-5, rtol=1e-5)


def _ratio(num_rows, num_envs, seed=0):
    """Between 1 / 7 and 7."""
    generator = torch.Generator().manual_seed(seed)
    return torch.empty(num_rows, num_envs).uniform_(-2, 2, generator=generator).exp()


@pytest.mark.parametrize(("rho_bar", "c_bar"), [(1.0, 1.0), (2.0, 0.5), (math.inf, math.inf)])
@pytest.mark.parametrize("lambda_", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("num_rewards", [None, 3, 4])
def test_vtrace_is_the_plain_sum_on_random_streams(num_rewards, lambda_, rho_bar, c_bar):
    rows, ratio = _stream(21, 4, num_rewards, seed=9), _ratio(21, 4)
    expected = _plain_vtrace(*rows, ratio, lambda_, rho_bar, c_bar)
    result = targets.vtrace(*rows, ratio, lambda_, rho_bar, c_bar)
    torch.testing.assert_close(tuple(result), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("lambda_", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("num_rewards", [None, 4])
def test_on_policy_vtrace_equals_gae_and_lambda_returns(num_rewards, lambda_):
    rows = _stream(37, 4, num_rewards, seed=10)
    result = targets.vtrace(*rows, torch.ones(37, 4), lambda_)
    torch.testing.assert_close(result.advantage, returns.gae(*rows, lambda_), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(result.target, _lambda_return(*rows, lambda_), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("garbage", [1e6, math.inf, math.nan])
def test_the_ratio_is_read_where_rows_train_and_nowhere_else(garbage):
    rows, ratio = _stream(30, 6, seed=11), _ratio(30, 6)
    unread = torch.ones(30, 6, dtype=torch.bool)
    unread[:-1] = ~trainable(rows[-1])  # LAST, PAD, what stands before FIRST, and the last row
    expected = targets.vtrace(*rows, ratio, 0.7)
    result = targets.vtrace(*rows, ratio.masked_fill(unread, garbage), 0.7)
    assert all(torch.equal(a, b) for a, b in zip(result, expected))
    other = targets.vtrace(*rows, torch.where(unread, ratio, ratio / 8), 0.7)
    assert not any(torch.equal(a, b) for a, b in zip(other, expected))


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
def test_columns_of_a_batch_are_computed_independently(function):
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

    def _one_step(self, kind, environment_discount, function=_discounted_return):
        reward, value = torch.tensor([[50.0], [1.0]]), torch.tensor([[5.0], [7.0]])
        discount = 0.9 * torch.tensor([[1.0], [environment_discount]])
        return function(reward, discount, value, _column(FIRST, kind)).item()

    def test_a_truncated_episode_bootstraps_from_its_final_observation(self):
        assert self._one_step(LAST, 1) == pytest.approx(1 + 0.9 * 7)

    def test_a_terminated_episode_does_not_bootstrap(self):
        assert self._one_step(LAST, 0) == pytest.approx(1)

    def test_advantages_bootstrap_at_truncation_and_not_at_termination(self):
        assert self._one_step(LAST, 1, FUNCTIONS["gae"]) == pytest.approx(1 + 0.9 * 7 - 5)
        assert self._one_step(LAST, 0, FUNCTIONS["gae"]) == pytest.approx(1 - 5)

    def test_an_unfinished_episode_bootstraps_from_the_last_row(self):
        assert self._one_step(MID, 1) == pytest.approx(1 + 0.9 * 7)

    def test_a_lost_life_stops_the_value_and_not_the_episode(self):
        step_type = _column(FIRST, MID, MID)
        reward, value = torch.ones(3, 1), torch.full((3, 1), 5.0)
        discount = 0.9 * torch.tensor([[1.0], [0.0], [1.0]])
        result = _discounted_return(reward, discount, value, step_type)
        assert result[:, 0].tolist() == pytest.approx([1, 1 + 0.9 * 5])


class TestGoldenNumbers:
    def _rows(self, reward, value, middle, discount):
        step_type = _column(MID, MID, middle, FIRST if middle == LAST else MID, MID)
        # The row after LAST is FIRST; the published table has MID there, which trains the same rows.
        discounts = torch.full((5, 1), 0.9)
        discounts[2] = discount
        return torch.full((5, 1), reward), discounts, torch.full((5, 1), value), step_type

    def test_returns_of_an_unfinished_episode(self):
        result = _discounted_return(*self._rows(2.0, 1.0, MID, 0.9))[:, 0].tolist()
        expected = [2.9]
        for _ in range(3):
            expected.insert(0, 0.9 * expected[0] + 2)
        assert result == pytest.approx(expected)

    @pytest.mark.parametrize(("discount", "expected"), [(0.9, [4.61, 2.9, 0, 2.9]), (0.0, [3.8, 2, 0, 2.9])])
    def test_returns_of_a_time_out_and_of_a_termination(self, discount, expected):
        result = _discounted_return(*self._rows(2.0, 1.0, LAST, discount))
        assert result[:, 0].tolist() == pytest.approx(expected)

    def test_advantages_of_an_unfinished_episode(self):
        result = returns.gae(*self._rows(3.0, 2.0, MID, 0.9), 0.6 / 0.9)[:, 0].tolist()
        expected = [2.8]
        for _ in range(3):
            expected.insert(0, 2.8 + 0.6 * expected[0])
        assert result == pytest.approx(expected)

    @pytest.mark.parametrize(("discount", "expected"), [(0.9, [4.48, 2.8, 0, 2.8]), (0.0, [3.4, 1, 0, 2.8])])
    def test_advantages_of_a_time_out_and_of_a_termination(self, discount, expected):
        result = returns.gae(*self._rows(3.0, 2.0, LAST, discount), 0.6 / 0.9)
        assert result[:, 0].tolist() == pytest.approx(expected)


class TestVTraceByHand:
    """Two steps, rewards 1 and 2, values 10, 20 and 30, gamma 0.5; the first action is 4 times as likely now."""

    def _rows(self, end=MID, environment_discount=1.0):
        reward, value = torch.tensor([[9.0], [1.0], [2.0]]), torch.tensor([[10.0], [20.0], [30.0]])
        discount = 0.5 * torch.tensor([[1.0], [1.0], [environment_discount]])
        return reward, discount, value, _column(FIRST, MID, end)

    def _vtrace(self, *settings, ratio=(4.0, 0.5, 9.0), **end):
        result = targets.vtrace(*self._rows(**end), torch.tensor(ratio)[:, None], *settings)
        return [column[:, 0].tolist() for column in result]

    # Errors of a step: 1 + 0.5 20 - 10 = 1, and 2 + 0.5 30 - 20 = -3, or 2 - 20 = -18 where the episode terminates.

    def test_rho_and_c_are_clipped_at_limits_of_their_own(self):
        # vs_1 = 20 - 3 0.5; vs_0 = 10 + 3 1 + 0.5 0.8 2 (-1.5), and in q_0 - V_0 neither 3 nor 2.
        target, advantage = self._vtrace(0.8, 3.0, 2.0)
        assert target == pytest.approx([11.8, 18.5])
        assert advantage == pytest.approx([1 + 0.5 * 0.8 * -1.5, -3])

    def test_rho_and_c_are_clipped_at_one_by_default(self):
        target, advantage = self._vtrace(0.8)
        assert target == pytest.approx([10 + 1 + 0.5 * 0.8 * -1.5, 18.5])
        assert advantage == pytest.approx([1 + 0.5 * 0.8 * -1.5, -3])

    def test_ratios_have_no_lower_limit(self):
        target, advantage = self._vtrace(1.0, ratio=(0.25, 0.0, 9.0))
        assert target == pytest.approx([10.25, 20])
        assert advantage == pytest.approx([1, -3])

    def test_a_truncated_episode_is_bootstrapped_and_a_terminated_one_is_not(self):
        assert self._vtrace(1.0, end=LAST) == self._vtrace(1.0)
        target, advantage = self._vtrace(1.0, end=LAST, environment_discount=0.0)
        assert target == pytest.approx([10 + 1 + 0.5 * -9, 20 - 9])
        assert advantage == pytest.approx([1 + 0.5 * -9, -18])


class TestVTraceOfAnotherPolicy:
    """The mean over everything that one policy may do, and what the rows are worth under another.

    Two states, two actions, and the action is the next state. So rows that start in either state and follow all 2^T
    ways, each with its probability, hold the expectation itself.
    """

    REWARD = torch.tensor([[0.0, 1.0], [1.0, 3.0]], dtype=torch.float64)  # [state, action]
    OLD = torch.tensor([[0.5, 0.5], [0.7, 0.3]], dtype=torch.float64)  # what acted
    NEW = torch.tensor([[0.1, 0.9], [0.4, 0.6]], dtype=torch.float64)  # what is asked about
    GAMMA = 0.9

    def _value(self, policy):
        """`[2]`, by the Bellman equation."""
        return torch.linalg.solve(torch.eye(2) - self.GAMMA * policy, (policy * self.REWARD).sum(1))

    def _expectations(self, function, value, length=4):
        """`[2]` of the state at row 0: the mean of `function` of these rows; `value` `[2]` goes in."""
        state = torch.tensor(list(itertools.product(range(2), repeat=length + 1))).T  # [length + 1, 32]
        probability = self.OLD[state[:-1], state[1:]]
        ratio = torch.ones(state.shape, dtype=torch.float64)
        ratio[:-1] = self.NEW[state[:-1], state[1:]] / probability
        reward = torch.zeros_like(ratio)
        reward[1:] = self.REWARD[state[:-1], state[1:]]
        step_type = torch.full(state.shape, MID, dtype=torch.int32)
        rows = reward, torch.full_like(reward, self.GAMMA), value[state], step_type
        result = function(rows, ratio)[0] * probability.prod(0)
        return torch.stack([result[state[0] == s].sum() for s in range(2)])

    @pytest.mark.parametrize("c_bar", [0.5, 1.0, math.inf])
    @pytest.mark.parametrize("lambda_", [0.0, 0.8, 1.0])
    def test_only_unclipped_corrected_targets_use_the_new_policy(self, lambda_, c_bar):
        value = self._value(self.NEW)
        corrected = self._expectations(
            lambda rows, ratio: targets.vtrace(*rows, ratio, lambda_, math.inf, c_bar)[0], value
        )
        torch.testing.assert_close(corrected, value)
        uncorrected = self._expectations(lambda rows, ratio: _lambda_return(*rows, lambda_), value)
        assert (uncorrected < value - 0.5).all(), "as the old one's, which gains less"

    def test_clipped_targets_are_values_of_a_policy_between_the_two(self):
        between = torch.minimum(self.OLD, self.NEW)
        value = self._value(between / between.sum(1, keepdim=True))
        clipped = self._expectations(lambda rows, ratio: targets.vtrace(*rows, ratio, 0.9)[0], value)
        torch.testing.assert_close(clipped, value)
        old, new = self._value(self.OLD), self._value(self.NEW)
        assert ((old < value) & (value < new)).all()

    def test_advantages_times_the_ratio_give_the_policy_gradient(self):
        """sum_a mu(a) ratio(a) E[q - V | a] is what the new policy gains by its actions: nothing, of its own value."""
        value = self._value(self.NEW)
        gain = self._expectations(lambda rows, ratio: ratio[0] * targets.vtrace(*rows, ratio, 0.9, math.inf)[1], value)
        torch.testing.assert_close(gain, torch.zeros(2, dtype=torch.float64), atol=1e-6, rtol=0)


def _plain_retrace(reward, discount, q, value, step_type, trace, lambda_):
    """Munos et al.'s eq. 4, its sum and its products written out for every row."""
    num_rows, shape = len(reward), reward.shape[1:]
    result = torch.zeros_like(reward[1:])
    for b, *r in itertools.product(*[range(n) for n in shape]):
        at = (b, *r)

        def trains(t, b=b):
            kinds = step_type[t : t + 2, b].tolist()
            return len(kinds) == 2 and kinds[0] in (FIRST, MID) and kinds[1] in (MID, LAST)

        def one_step(t, at=at, b=b):
            return float(reward[(t + 1, *at)]) + float(discount[t + 1, b]) * float(value[(t + 1, *at)])

        for start in filter(trains, range(num_rows - 1)):
            total, weight, t = one_step(start), 1.0, start
            while trains(t + 1):
                t += 1
                weight *= float(discount[t, b]) * lambda_ * float(trace[t, b])
                total += weight * (one_step(t) - float(q[(t, *at)]))
            result[(start, *at)] = total
    return result


class TestRetrace:
    def _rows(self, num_rewards=None, num_rows=21, seed=12):
        reward, discount, value, step_type = _stream(num_rows, 4, num_rewards, seed)
        generator = torch.Generator().manual_seed(seed)
        q = torch.randn(reward.shape, generator=generator)
        return reward, discount, q, value, step_type, torch.rand(num_rows, 4, generator=generator)

    @pytest.mark.parametrize("lambda_", [0.0, 0.6, 1.0])
    @pytest.mark.parametrize("num_rewards", [None, 3, 4])
    def test_retrace_is_the_plain_sum_on_random_streams(self, num_rewards, lambda_):
        rows = self._rows(num_rewards)
        torch.testing.assert_close(_retrace(*rows, lambda_), _plain_retrace(*rows, lambda_), atol=1e-5, rtol=1e-5)

    @pytest.mark.parametrize("num_rewards", [None, 4])
    def test_retrace_without_a_trace_is_the_one_step_return(self, num_rewards):
        reward, discount, q, value, step_type, trace = self._rows(num_rewards)
        one_step = _lambda_return(reward, discount, value, step_type, 0.0)
        result = _retrace(reward, discount, q, value, step_type, torch.zeros_like(trace), 0.9)
        torch.testing.assert_close(result, one_step)

    @pytest.mark.parametrize("num_rewards", [None, 4])
    def test_retrace_with_a_full_trace_and_on_policy_values_is_the_lambda_return(self, num_rewards):
        reward, discount, _, value, step_type, trace = self._rows(num_rewards)
        result = _retrace(reward, discount, value, value, step_type, torch.ones_like(trace), 0.9)
        expected = _lambda_return(reward, discount, value, step_type, 0.9)
        torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)

    @pytest.mark.parametrize("garbage", [1e6, math.inf, math.nan])
    def test_traces_and_action_values_of_row_0_are_not_read(self, garbage):
        reward, discount, q, value, step_type, trace = self._rows()
        unread = torch.ones_like(step_type, dtype=torch.bool)
        unread[:-1] = ~trainable(step_type)
        unread[0] = True
        expected = _retrace(reward, discount, q, value, step_type, trace, 0.7)
        dirty = q.masked_fill(unread, garbage), value, step_type, trace.masked_fill(unread, garbage)
        assert torch.equal(_retrace(reward, discount, *dirty, 0.7), expected)
        first = torch.arange(len(value))[:, None] == 0
        dirty = q, value.masked_fill(first, garbage), step_type, trace
        assert torch.equal(_retrace(reward, discount, *dirty, 0.7), expected)
        for other in ((torch.where(unread, q, q + 1), trace), (q, torch.where(unread, trace, trace / 2))):
            assert not torch.equal(_retrace(reward, discount, other[0], value, step_type, other[1], 0.7), expected)

    # Three steps, rewards 1, 2 and 4, gamma 0.5, lambda 0.8.
    @pytest.mark.parametrize(("kinds", "discount", "expected"), [
        # 4 + 0.5 12; 2 + 0.5 (8 + 0.8 1 (10 - 5)); 1 + 0.5 (4 + 0.8 0.5 (8 - 6))
        ((FIRST, MID, MID, MID), 1.0, [3.4, 8.0, 10.0]),
        # 2 + 0.5 8, for the value is that of the true final observation; 1 + 0.5 (4 + 0.4 (6 - 6))
        ((FIRST, MID, LAST, FIRST), 1.0, [3.0, 6.0, 0.0]),
        # 2; 1 + 0.5 (4 + 0.4 (2 - 6))
        ((FIRST, MID, LAST, FIRST), 0.0, [2.2, 2.0, 0.0]),
        # A life lost: nothing of what follows, and the row after it trains.
        ((FIRST, MID, MID, MID), 0.0, [2.2, 2.0, 10.0]),
    ])  # fmt: skip
    def test_retrace_of_a_table_worked_by_hand(self, kinds, discount, expected):
        reward, q, value = (torch.tensor(row)[:, None] for row in ([9.0, 1, 2, 4], [7.0, 6, 5, 7], [7.0, 4, 8, 12]))
        discounts, trace = (torch.tensor(row)[:, None] for row in ([0.5, 0.5, 0.5 * discount, 0.5], [7.0, 0.5, 1, 7]))
        result = _retrace(reward, discounts, q, value, _column(*kinds), trace, 0.8)
        assert result[:, 0].tolist() == pytest.approx(expected)

    @pytest.mark.parametrize(
        "change", [{"q": (5, 4)}, {"q": (5, 3, 1)}, {"trace": (4, 3)}, {"trace": (5, 3, 1)}], ids=str
    )
    def test_wrong_shapes_are_refused(self, change):
        shapes = dict.fromkeys(("reward", "discount", "q", "value", "step_type", "trace"), (5, 3)) | change
        rows = {name: torch.zeros(shape) for name, shape in shapes.items()}
        with pytest.raises(ValueError, match="shapes differ: next_q"):
            _retrace(**rows | {"step_type": rows["step_type"].int()}, lambda_=1.0)

    def test_repeated_retrace_converges_to_the_new_policys_action_values(self):
        """On the two states of `TestVTraceOfAnotherPolicy`: expectations over all that the old policy may do."""
        old, new = TestVTraceOfAnotherPolicy.OLD, TestVTraceOfAnotherPolicy.NEW
        reward_of, gamma = TestVTraceOfAnotherPolicy.REWARD, TestVTraceOfAnotherPolicy.GAMMA
        state = torch.tensor(list(itertools.product(range(2), repeat=5))).T  # [5, 32]
        action = torch.cat([state[1:], state[:1]])  # the action is the next state; that of the last row is not read
        reward = torch.zeros(5, 32, dtype=torch.float64)
        reward[1:] = reward_of[state[:-1], state[1:]]
        probability = old[state[1:-1], state[2:]].prod(0)  # of what follows the first action
        rows = reward, torch.full_like(reward, gamma)
        step_type = torch.full(state.shape, MID, dtype=torch.int32)

        def fixed_point(function):
            q = torch.zeros(2, 2, dtype=torch.float64)
            for _ in range(150):
                value = (new * q).sum(1)
                target = function(q[state, action], value[state])[0] * probability
                q = torch.zeros(4, dtype=q.dtype).index_add_(0, 2 * state[0] + state[1], target).view(2, 2)
            return q

        value = torch.linalg.solve(torch.eye(2) - gamma * new, (new * reward_of).sum(1))
        expected = reward_of + gamma * value  # [state, action], for the action is the next state
        trace = (new / old)[state, action].clamp(max=1)
        corrected = fixed_point(lambda q, value: _retrace(*rows, q, value, step_type, trace, 1.0))
        torch.testing.assert_close(corrected, expected, atol=1e-4, rtol=1e-4)
        uncorrected = fixed_point(lambda q, value: _lambda_return(*rows, value, step_type, 1.0))
        assert (uncorrected < expected - 0.5).all(), "as the old one's, which gains less"


def test_a_target_is_at_least_the_known_return():
    target = torch.tensor([[1.0, 1.0, 1.0, -2.0]])
    known = torch.tensor([[3.0, 0.5, math.nan, -1.0], [9.0, 9.0, 9.0, 9.0]])
    assert targets.bounded_below(target, known).tolist() == [[3, 1, 1, -1]]


def test_without_returns_there_is_no_bound():
    with pytest.raises(UsageError, match="leave out `values`"):
        targets.bounded_below(torch.zeros(1, 4), None)


def test_the_last_row_bootstraps_and_all_others_train():
    step_type = _column(MID, MID, MID)
    reward, discount, value = torch.ones(3, 1), torch.full((3, 1), 0.5), torch.tensor([[0.0], [0.0], [8.0]])
    assert returns.gae(reward, discount, value, step_type, 0.0)[:, 0].tolist() == [1, 5]
    assert _discounted_return(reward, discount, value, step_type)[:, 0].tolist() == [3.5, 5]


def test_lambda_zero_is_one_step_and_lambda_one_is_the_whole_return():
    reward, discount, value, step_type = _stream(20, 3, seed=8)
    mask = trainable(step_type)
    one_step = torch.where(mask, reward[1:] + discount[1:] * value[1:], 0)
    torch.testing.assert_close(_lambda_return(reward, discount, value, step_type, 0.0), one_step)
    whole = _discounted_return(reward, discount, value, step_type)
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


def test_standardize_ignores_masked_rows():
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


@pytest.mark.parametrize("shape", [(4, 3), (5, 1), (5,), (5, 3, 1)])
def test_a_ratio_of_another_shape_is_refused(shape):
    rows = [torch.zeros(5, 3)] * 3
    with pytest.raises(ValueError, match="shapes differ: ratio"):
        targets.vtrace(*rows, torch.zeros(5, 3, dtype=torch.int32), torch.ones(shape), 0.9)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_one_row_is_refused(function):
    with pytest.raises(ValueError, match="at least 2 rows"):
        FUNCTIONS[function](*[torch.zeros(1, 3)] * 3, torch.zeros(1, 3, dtype=torch.int32))
