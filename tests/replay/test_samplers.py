"""Samplers against slow, obvious ones, over rings whose every step type is remembered."""

import io
import itertools

import numpy as np
import pytest
import torch
from far_device import FarDevice

from alfish import nest
from alfish.data import Experience, StepType, TimeStep
from alfish.errors import UsageError
from alfish.offline import Arrays, Episode, OfflineBuffer, Spaces
from alfish.parameters.schedules import Linear
from alfish.replay import Epochs, Prioritized, RingBuffer, SequenceIndex, Uniform
from alfish.replay.prioritized import FAN_OUT, MAX_TOP_SIZE, SumTree
from alfish.replay.samplers import check_drawn

FIRST, MID, LAST, PAD = StepType.FIRST, StepType.MID, StepType.LAST, StepType.PAD


class Recording:
    """A ring, and every step type that was ever pushed to it: `history[column][position]`.

    Episodes have random lengths, none among them, and some break off without a LAST row.
    """

    def __init__(self, num_envs=1, length=40, num_ignored=0, seed=0, state_period=None):
        self.make = lambda: RingBuffer(num_envs * length, num_envs, "cpu", None, num_ignored, state_period)
        self.ring, self.length, self.num_ignored, self.state_period = self.make(), length, num_ignored, state_period
        self.states = [[] for _ in range(num_envs)]  # positions where one is kept, of each column
        self.history, self.cleared_at = [[] for _ in range(num_envs)], [0] * num_envs
        self.rng = np.random.default_rng(seed)

    def push(self, *counts):
        """So many rows of each column; one number stands for all columns."""
        counts = counts * len(self.history) if len(counts) == 1 else counts
        step_type = np.full((max(counts), len(counts)), PAD, np.int32)
        state = torch.tensor([len(rows) for rows in self.history]).float()
        for column, count in enumerate(counts):
            if self.state_period is not None and count:
                here, kept = len(self.history[column]), [p for p in self.states[column] if p >= self.cleared_at[column]]
                if not kept or kept[-1] // self.state_period != here // self.state_period:
                    self.states[column].append(here)
            for t in range(count):
                step_type[t, column] = self._next(self.history[column])
        self.ring.push(experience_of(torch.from_numpy(step_type))._replace(state=state))

    def clear(self):
        self.ring.clear()
        self.cleared_at = [len(rows) for rows in self.history]

    def starts(self, window_length, newest=None):
        """Every (column, position) that may start a window, worked out from what was pushed."""
        found = []
        for column, rows in enumerate(self.history):
            oldest = max(len(rows) - self.length, self.cleared_at[column])
            low = oldest + (self.num_ignored if oldest else 0)
            low = low if newest is None else max(low, len(rows) - newest)
            for position in range(low, len(rows) - window_length + 1):
                trains = rows[position] in (FIRST, MID) and rows[position + 1] in (MID, LAST)
                if trains if self.state_period is None else position in self.states[column]:
                    found.append((column, position))
        return found

    def _next(self, rows):
        if not rows or rows[-1] == LAST:
            rows.append(FIRST)
        elif rows[-1] == MID and self.rng.random() < 0.1:
            rows[-1] = LAST  # the ring mends what was broken off
            rows.append(FIRST)
        else:
            rows.append(LAST if self.rng.random() < 0.25 else MID)
        return rows[-1]


def experience_of(step_type):
    """Rows `[T, B]` of nothing else."""
    zeros, env_id = torch.zeros(step_type.shape), torch.arange(step_type.shape[1]).int().expand(step_type.shape)
    return Experience(TimeStep(step_type, zeros, zeros, zeros, zeros, env_id), zeros, None, None)


def bound(sampler, ring, window_length=2):
    sampler.bind(ring, window_length)
    return sampler


def pairs(window):
    return list(zip(window.column.tolist(), window.position.tolist()))


def saved(thing):
    file = io.BytesIO()
    torch.save(thing.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def reloaded(recording, sampler, fresh, window_length=2):
    """The ring and the sampler, each as a process that goes on would have them."""
    ring = recording.make()
    ring.load_state_dict(saved(recording.ring))
    bound(fresh, ring, window_length).load_state_dict(saved(sampler))
    recording.ring = ring
    return fresh


# What holds for every sampler.

SAMPLERS = {
    "uniform": Uniform,
    "uniform, some recent": lambda: Uniform(recent_fraction=0.3, recent_rows=36),
    "prioritized": Prioritized,
    "epochs": Epochs,
}


@pytest.fixture(params=SAMPLERS)
def make(request):
    return SAMPLERS[request.param]


def test_a_draw_is_of_starts_and_repeats_with_its_seed(make):
    recording = Recording(3)
    recording.push(33)
    drawn = []
    for _ in range(2):
        torch.manual_seed(4)
        drawn.append(bound(make(), recording.ring, 4).draw(50, 0.5))
    window = drawn[0]
    assert window.column.shape == window.position.shape == (50,)
    assert window.column.dtype == window.position.dtype == torch.int64
    assert set(pairs(window)) <= set(recording.starts(4))
    assert pairs(window) == pairs(drawn[1])
    assert recording.ring.windows(window, 4).mask.shape == (3, 50)


def test_a_draw_from_an_empty_ring_raises_and_later_draws_work(make):
    recording = Recording(2)
    sampler = bound(make(), recording.ring, 3)
    with pytest.raises(UsageError, match="no window of 3 rows yet; collect more"):
        sampler.draw(4, 0.0)
    recording.push(2)
    with pytest.raises(UsageError, match="no window of 3 rows yet; collect more"):
        sampler.draw(4, 0.0)
    recording.push(20)
    assert set(pairs(sampler.draw(4, 0.0))) <= set(recording.starts(3))
    recording.clear()
    with pytest.raises(UsageError, match="no window of 3 rows yet; collect more"):
        sampler.draw(4, 0.0)


def test_a_sampler_serves_one_ring(make):
    recording, other = Recording(2), Recording(2)
    sampler = bound(make(), recording.ring)
    with pytest.raises(UsageError, match="is already used by a replay; make another"):
        sampler.bind(other.ring, 2)


def test_only_samplers_that_use_priorities_take_them(make):
    recording = Recording()
    recording.push(30)
    sampler = bound(make(), recording.ring)
    window = sampler.draw(5, 0.0)
    if sampler.uses_priorities:
        sampler.update(window, torch.ones(5))
    else:
        with pytest.raises(TypeError, match="does not use priorities"):
            sampler.update(window, torch.ones(5))


@pytest.mark.parametrize(("num_ignored", "seed"), [(0, 0), (3, 1)])
def test_windows_start_where_a_state_is_stored(make, seed, num_ignored):
    torch.manual_seed(seed)
    recording = Recording(3, 60, num_ignored, seed, state_period=3)
    sampler = bound(make(), recording.ring, 5)
    for i in range(60):
        counts = recording.rng.integers(0, 6, 3)
        counts[i % 3] = 4
        recording.push(*counts.tolist())
        if i == 35:
            recording.clear()
        expected = set(recording.starts(5))
        if expected and i % 5 == 0:
            window = sampler.draw(200, 0.0)
            assert set(pairs(window)) <= expected
            if sampler.uses_priorities:
                sampler.update(window, torch.ones(200))
            recording.ring.windows(window, 5)
            recording.ring.check_valid()
            sampler.check_valid()
    assert set(pairs(sampler.draw(1000, 0.0))) == set(recording.starts(5))


@pytest.mark.parametrize(("num_ignored", "seed"), [(0, 0), (3, 1)])
def test_draws_continue_bit_for_bit_after_a_reload(make, seed, num_ignored):
    recording = Recording(3, 17, num_ignored, seed)
    sampler = bound(make(), recording.ring, 3)
    for count in (12, 9, 4):
        recording.push(count, count - 1, count)
        window = sampler.draw(31, 0.0)
        if sampler.uses_priorities:
            sampler.update(window, 3 * torch.rand(31))  # some above 1, the least that new rows get
    recording.push(2)  # the sampler has not seen these
    ring, other = recording.ring, reloaded(recording, sampler, make(), 3)
    rows = experience_of(torch.tensor([[MID, MID, MID], [LAST, MID, LAST], [FIRST, MID, FIRST]], dtype=torch.int32))
    drawn = []
    for one, ring_of_one in ((sampler, ring), (other, recording.ring)):
        torch.manual_seed(8)
        drawn.append([one.draw(20, 0.2)])
        if one.uses_priorities:
            one.update(drawn[-1][0], torch.arange(20.0))
        ring_of_one.push(rows)
        drawn[-1].append(one.draw(20, 0.2))
        one.check_valid()
    for a, b in zip(*drawn):
        assert pairs(a) == pairs(b)
        assert a.weight is b.weight is None or torch.equal(a.weight, b.weight)


def test_a_state_is_not_changed_by_what_happens_afterwards(make):
    recording = Recording()
    recording.push(30)
    sampler = bound(make(), recording.ring)
    window = sampler.draw(10, 0.0)
    state, before = sampler.state_dict(), saved(sampler)
    if sampler.uses_priorities:
        sampler.update(window, torch.full((10,), 5.0))
    recording.push(7)
    sampler.draw(13, 0.0)
    assert all(torch.equal(one, before[name]) for name, one in state.items())


@pytest.mark.parametrize("kind", ["prioritized", "epochs"])
def test_a_state_with_missing_rows_is_refused(kind):
    make, recording = SAMPLERS[kind], Recording(2)
    sampler = bound(make(), recording.ring)
    recording.push(30)
    sampler.draw(4, 0.0)
    with pytest.raises(UsageError, match="rows that this replay does not hold; first load the rows"):
        bound(make(), recording.make()).load_state_dict(sampler.state_dict())


def test_weights_are_passed_to_the_batch():
    recording = Recording(2)
    recording.push(30)
    start = bound(Prioritized(), recording.ring).draw(9, 0.0)
    batch = recording.ring.windows(start, 2)
    assert batch.weight is start.weight and torch.equal(batch.position, start.position)
    assert recording.ring.windows(SequenceIndex(start.column, start.position), 2).weight is None


# Prioritized


class Reference:
    """What `Prioritized` says of itself, with a dict."""

    def __init__(self, epsilon=1e-6):
        self.priority, self.largest, self.epsilon = {}, 1.0, epsilon

    def draw(self, starts):
        self.priority = {start: self.priority.get(start, self.largest) for start in starts}

    def update(self, starts, priority):
        for start, one in zip(starts, priority.tolist()):
            self.largest = max(self.largest, one + self.epsilon)
            if start in self.priority:
                self.priority[start] = one + self.epsilon

    def weights(self, alpha, beta):
        """Of each start, w / max w being the caller's."""
        total = sum(p**alpha for p in self.priority.values())
        return {start: (len(self.priority) * p**alpha / total) ** -beta for start, p in self.priority.items()}


SETTINGS = [  # num_envs, rows a column, rows ignored, window length, seed
    (1, 9, 0, 2, 0),
    (3, 14, 0, 2, 1),
    (2, 30, 3, 2, 2),
    (3, 25, 0, 4, 0),
    (2, 19, 2, 5, 1),
]
ALPHA, BETA = 0.7, 0.9
CHANCES = {"aligned": 6, "uneven": 5, "ring": 1, "clear": 1, "update": 5, "stale": 1, "reload": 1}


@pytest.mark.parametrize(("num_envs", "length", "num_ignored", "window_length", "seed"), SETTINGS)
def test_prioritized_equals_its_reference_after_any_operations(num_envs, length, num_ignored, window_length, seed):
    recording = Recording(num_envs, length, num_ignored, seed)
    rng, reference = recording.rng, Reference()
    torch.manual_seed(seed)

    def make():
        return Prioritized(ALPHA, BETA, normalize=False)

    sampler, drawn = bound(make(), recording.ring, window_length), []
    num_checked = num_refused = 0
    for _ in range(200):
        operation = rng.choice(list(CHANCES), p=np.array(list(CHANCES.values())) / sum(CHANCES.values()))
        if operation == "aligned":
            recording.push(int(rng.integers(1, length + 1)))
        elif operation == "uneven":
            counts = rng.integers(0, 1 + rng.integers(1, length + 1), num_envs)
            counts[rng.integers(num_envs)] += counts.max() == 0
            recording.push(*counts.tolist())
        elif operation == "ring":
            for _ in range(rng.integers(1, 4)):
                recording.push(length)
        elif operation == "clear":
            recording.clear()
        elif operation in ("update", "stale") and drawn:
            window = drawn[-1] if operation == "update" else drawn[rng.integers(len(drawn))]
            some = torch.from_numpy(rng.integers(0, len(window.column), 30))  # with duplicates
            window = SequenceIndex(window.column[some], window.position[some])
            priority = torch.from_numpy(rng.random(30) * 3)
            sampler.update(window, priority)
            reference.update(pairs(window), priority)
        elif operation == "reload":
            sampler = reloaded(recording, sampler, make(), window_length)
        sampler.check_valid()
        if rng.random() < 0.3:
            continue  # several things between two draws
        starts = recording.starts(window_length)
        if not starts:
            with pytest.raises(UsageError, match="no window"):
                sampler.draw(3, 0.0)
            num_refused += 1
            reference.draw([])
            continue
        reference.draw(starts)
        drawn.append(sampler.draw(10 * len(starts), 0.0))
        sampler.check_valid()
        # A row's weight tells its share of the whole, so each of these checks all priorities.
        expected = reference.weights(ALPHA, BETA)
        assert set(pairs(drawn[-1])) <= set(starts)
        np.testing.assert_allclose(drawn[-1].weight, [expected[start] for start in pairs(drawn[-1])], rtol=1e-5)
        num_checked += len(starts)
    assert num_checked > 500 and num_refused > 0
    assert min(len(rows) for rows in recording.history) > 20 * length  # it did wrap


def with_priorities(recording, window_length=2, **settings):
    """A sampler whose rows have priorities from 0.1 to 10, and what these are."""
    sampler = bound(Prioritized(**settings), recording.ring, window_length)
    starts = recording.starts(window_length)
    sampler.draw(1, 0.0)
    column, position = torch.tensor(starts).T
    priority = 10 ** (2 * torch.rand(len(starts), dtype=torch.float64) - 1)
    sampler.update(SequenceIndex(column, position), priority)
    return sampler, starts, (priority + 1e-6).numpy()


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_frequencies_of_rows_are_proportional_to_priorities(alpha):
    """Pearson's chi-square: k - 1 degrees of freedom, so about k - 1 +- sqrt(2 (k - 1)); with strata it is far less."""
    torch.manual_seed(0)
    recording = Recording(3, 60)
    recording.push(60)
    recording.push(17)
    sampler, starts, p = with_priorities(recording, alpha=alpha)
    counts = dict.fromkeys(starts, 0)
    for _ in range(400):
        for start in pairs(sampler.draw(256, 0.0)):
            counts[start] += 1
    expected = 400 * 256 * p**alpha / (p**alpha).sum()
    statistic = ((np.array(list(counts.values())) - expected) ** 2 / expected).sum()
    freedom = len(starts) - 1
    assert abs(statistic - freedom) < 4 * (2 * freedom) ** 0.5


def test_with_beta_1_the_weighted_mean_equals_the_mean_of_all_rows():
    torch.manual_seed(0)
    recording = Recording(2, 60)
    recording.push(60)
    sampler, starts, p = with_priorities(recording, alpha=1.0, beta=1.0, normalize=False)
    value = dict(zip(starts, np.log(p)))  # far from independent of the priority
    window = sampler.draw(200_000, 0.0)
    drawn = np.array([value[start] for start in pairs(window)])
    plain, weighted = drawn.mean(), (drawn * window.weight.numpy()).mean()
    error = (drawn * window.weight.numpy()).std() / len(drawn) ** 0.5
    expected = np.log(p).mean()
    assert abs(weighted - expected) < 4 * error and abs(plain - expected) > 50 * error
    assert window.weight.mean() == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("num_batches", [1, 4, 20])
def test_normalized_weights_are_divided_by_the_largest_of_their_minibatch(num_batches):
    torch.manual_seed(0)
    recording = Recording(2)
    recording.push(40)
    sampler, starts, p = with_priorities(recording, beta=0.5)
    window = sampler.draw(20, 0.0, num_batches)
    p = dict(zip(starts, p))
    share = np.array([p[start] for start in pairs(window)]).reshape(num_batches, -1) ** 0.6
    expected = (share / share.min(1, keepdims=True)) ** -0.5
    assert window.weight.dtype == torch.float32
    np.testing.assert_allclose(window.weight.reshape(num_batches, -1), expected, rtol=1e-5)


def test_a_new_row_has_the_largest_priority_so_far_and_1_at_first():
    torch.manual_seed(0)
    recording = Recording(length=1000)
    sampler = bound(Prioritized(alpha=1.0, beta=1.0, normalize=False), recording.ring)
    recording.push(200)
    assert (sampler.draw(50, 0.0).weight - 1).abs().max() < 1e-6  # all alike
    old = recording.starts(2)
    column, position = torch.tensor(old).T
    sampler.update(SequenceIndex(column, position), torch.full((len(old),), 0.5))
    sampler.update(SequenceIndex(column[:1], position[:1]), torch.tensor([7.0]))
    sampler.update(SequenceIndex(column[:1], position[:1]), torch.tensor([0.5]))  # 7 was seen all the same
    recording.push(20)
    new = set(recording.starts(2)) - set(old)
    window = sampler.draw(5000, 0.0)
    is_new = torch.tensor([start in new for start in pairs(window)])
    ratio = window.weight[~is_new].mean() / window.weight[is_new].mean()
    assert ratio == pytest.approx(7 / 0.5, rel=1e-4)
    assert int(is_new.sum()) == pytest.approx(5000 * 14 * len(new) / (14 * len(new) + len(old)), rel=0.1)


def test_the_last_priority_of_a_repeated_window_counts():
    recording = Recording()
    recording.push(40)
    sampler = bound(Prioritized(alpha=1.0, beta=1.0), recording.ring)
    (column, position), *_ = recording.starts(2)
    sampler.draw(1, 0.0)
    rare = SequenceIndex(torch.tensor([column] * 3), torch.tensor([position] * 3))
    sampler.update(rare, torch.tensor([5.0, 9.0, 0.0]))
    assert (column, position) not in pairs(sampler.draw(2000, 0.0))
    sampler.update(rare, torch.tensor([0.0, 0.0, 1e9]))
    assert set(pairs(sampler.draw(2000, 0.0))) == {(column, position)}


def test_priority_updates_of_overwritten_rows_are_ignored():
    """The rows in their places would show a priority of a million."""
    torch.manual_seed(0)
    for num_rows, clears, draws_between in itertools.product((1, 20, 40, 100), (False, True), (False, True)):
        check_update_of_rows_that_are_gone(num_rows, clears, draws_between)


def check_update_of_rows_that_are_gone(num_rows, clears, draws_between):
    recording = Recording(2, 20)
    recording.push(20)
    sampler = bound(Prioritized(alpha=1.0, beta=1.0, normalize=False), recording.ring)
    window = sampler.draw(500, 0.0)
    if clears:
        recording.clear()
    for start in range(0, num_rows, 20):
        recording.push(min(num_rows - start, 20))
    starts = recording.starts(2)
    gone = torch.tensor([start not in starts for start in pairs(window)])
    assert gone.any()
    if draws_between and starts:
        sampler.draw(1, 0.0)
    sampler._largest = np.float32(1)
    sampler.update(SequenceIndex(window.column[gone], window.position[gone]), torch.full((int(gone.sum()),), 1e6))
    sampler._largest = np.float32(1)  # new rows should not hide what is asked here
    if starts:
        assert (sampler.draw(50, 0.0).weight - 1).abs().max() < 1e-5
        sampler.check_valid()


def test_rows_count_from_the_first_row_regardless_of_older_content():
    """Where the storage of a column that is empty yet looks like a row within an episode."""
    recording = Recording(2, 20, num_ignored=3)
    recording.push(5, 0)
    recording.ring._store.rows.step_type.view(20, 2)[0, 1] = MID
    sampler = bound(Prioritized(), recording.ring)
    sampler.draw(1, 0.0)
    recording.push(1, 9)
    assert set(pairs(sampler.draw(1000, 0.0))) == set(recording.starts(2))
    sampler.check_valid()


def test_a_priority_update_of_unwritten_rows_changes_no_other_row():
    recording = Recording(2, 20)
    recording.push(20)
    recording.push(5)
    sampler = bound(Prioritized(beta=1.0, normalize=False), recording.ring)
    window = sampler.draw(50, 0.0)
    sampler.update(SequenceIndex(window.column, window.position + 20), torch.full((50,), 1e6))
    assert (sampler.draw(50, 0.0).weight - 1).abs().max() < 1e-5


def test_only_rows_that_can_start_windows_have_priorities():
    recording = Recording(length=60)
    recording.push(60)
    sampler = bound(Prioritized(), recording.ring, 3)
    sampler.draw(1, 0.0)
    others = sorted({(0, position) for position in range(60)} - set(recording.starts(3)))
    assert (0, 58) in others and (0, 59) in others
    column, position = torch.tensor(others).T
    sampler.update(SequenceIndex(column, position), torch.full((len(others),), 1e9))
    sampler.check_valid()
    assert set(pairs(sampler.draw(2000, 0.0))) <= set(recording.starts(3))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -0.1, 1e39])
def test_an_invalid_priority_is_refused_and_nothing_is_written(bad):
    recording = Recording()
    recording.push(40)
    sampler = bound(Prioritized(), recording.ring)
    window = sampler.draw(4, 0.0)
    before = saved(sampler)
    with pytest.raises(UsageError, match="LossInfo.priority is .* for one of 4 windows; it must be finite"):
        sampler.update(window, torch.tensor([5.0, 6.0, bad, 7.0], dtype=torch.float64))
    with pytest.raises(UsageError, match=r"LossInfo.priority has shape \(4, 1\); it must be one number for each of 4"):
        sampler.update(window, torch.ones(4, 1))
    assert all(torch.equal(one, before[name]) for name, one in sampler.state_dict().items())
    sampler.check_valid()


def test_a_row_with_priority_0_can_still_be_drawn():
    recording = Recording()
    recording.push(40)
    sampler = bound(Prioritized(epsilon=0.1), recording.ring)
    starts = recording.starts(2)
    sampler.draw(1, 0.0)
    column, position = torch.tensor(starts).T
    sampler.update(SequenceIndex(column, position), torch.zeros(len(starts), requires_grad=True))
    assert set(pairs(sampler.draw(100 * len(starts), 0.0))) == set(starts)


def test_alpha_and_beta_may_be_schedules():
    torch.manual_seed(0)
    recording = Recording(2)
    recording.push(40)
    settings = {"alpha": Linear(1.0, 0.5), "beta": Linear(0.2, 1.0), "normalize": False}
    sampler, starts, p = with_priorities(recording, **settings)

    def check(progress, alpha, beta, sampler=sampler):
        window = sampler.draw(100, progress)
        sampler.check_valid()
        expected = dict(zip(starts, (len(p) * p**alpha / (p**alpha).sum()) ** -beta))
        np.testing.assert_allclose(window.weight, [expected[start] for start in pairs(window)], rtol=1e-5)

    check(0.0, 1.0, 0.2)
    check(0.016, 1.0, 0.2128)  # alpha has moved by 0.008, and all weights stay
    check(0.024, 0.988, 0.2192)
    check(0.036, 0.988, 0.2288)  # 0.006 since then
    check(1.0, 0.5, 1.0)
    check(0.99, 0.5, 0.992)
    check(0.99, 0.5, 0.992, reloaded(recording, sampler, Prioritized(**settings)))  # a reload does not move it either


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"alpha": 1.5}, "Prioritized.alpha is 1.5; it must be a number in"),
        ({"alpha": Linear(0.5, -0.5)}, "Prioritized.alpha is Linear.0.5 -> -0.5.; at progress 1 it is -0.5"),
        (
            {"beta": Linear(0.5, 2.0)},
            "Prioritized.beta is Linear.0.5 -> 2.0.; at progress 1 it is 2.0, but it must be",
        ),
        ({"epsilon": 0.0}, "Prioritized.epsilon is 0.0; it must be a positive number"),
        ({"epsilon": -1.0}, "Prioritized.epsilon is -1.0; it must be a positive number"),
    ],
)
def test_settings_outside_their_ranges_are_refused(settings, message):
    recording = Recording()
    recording.push(40)
    with pytest.raises(UsageError, match=message):
        bound(Prioritized(**settings), recording.ring).draw(4, 1.0)


def test_priorities_with_another_number_of_columns_are_refused():
    one, other = Recording(2), Recording(3)
    for recording in (one, other):
        recording.push(30)
    sampler = bound(Prioritized(), one.ring)
    with pytest.raises(UsageError, match="for 2 environments, but this replay has 3; keep the number of environments"):
        bound(Prioritized(), other.ring).load_state_dict(sampler.state_dict())


@pytest.mark.parametrize("length", [6, 25, 33, 40, 57, 90])
@pytest.mark.parametrize("late", [0, 5])
def test_priorities_move_with_rows_to_another_capacity(length, late):
    """Rows that came after the last draw get the largest priority there, too."""
    torch.manual_seed(0)
    recording = Recording(2)
    recording.push(40, 33)
    recording.push(13, 20)
    sampler = bound(Prioritized(alpha=1.0), recording.ring)
    column, position = sampler.draw(400, 0.0)[:2]
    sampler.update(SequenceIndex(column, position), (10 * position + column).float())
    if late:
        recording.push(late)
    largest = float(sampler._largest)
    seen = set(pairs(SequenceIndex(column, position)))
    recording.make, recording.length = (lambda: RingBuffer(2 * length, 2)), length
    before = recording.starts(2)
    recording.length = min(length, 40)  # what was overwritten is not there
    held = recording.starts(2)
    assert set(held) <= set(before)
    other = reloaded(recording, sampler, Prioritized(alpha=1.0))
    other.draw(4, 0.0)
    other.check_valid()
    found = {pair: float(other._priority[other._leaf(*np.array(pair))]) for pair in held}
    expected = {(c, p): 10 * p + c + 1e-6 if (c, p) in seen else largest for c, p in held}
    assert len(held) > 2 and found == pytest.approx(expected)
    assert np.count_nonzero(other._priority) == len(held)


@pytest.mark.parametrize("break_it", [
    lambda sampler: sampler._priority.__setitem__(0, 9.0),
    lambda sampler: sampler._priority.__setitem__(sampler._priority.nonzero()[0][0], 0.0),
    lambda sampler: setattr(sampler, "_count", 1),
    lambda sampler: setattr(sampler, "_largest", np.float32(0.5)),
    lambda sampler: setattr(sampler, "_high", sampler._high - 1),
    lambda sampler: setattr(sampler, "_low", sampler._low + 30),
])  # fmt: skip
def test_check_valid_finds_priorities_that_do_not_agree(break_it):
    recording = Recording(2)
    recording.push(40)
    sampler = bound(Prioritized(), recording.ring)
    sampler.draw(4, 0.0)
    sampler.check_valid()
    break_it(sampler)
    with pytest.raises(AssertionError):
        sampler.check_valid()


@pytest.fixture
def recorded():
    """Episodes of 3, 1, 5 and 2 transitions in two columns."""
    episodes = []
    for id, length in enumerate((3, 1, 5, 2)):
        ends = np.arange(length) == length - 1
        observations = np.zeros((length + 1, 2), np.float32)
        episodes.append(Episode(str(id), observations, np.zeros(length, np.int64), np.ones(length), ends, ends & False))
    return episodes


@pytest.mark.parametrize("make", [Prioritized, Epochs])
@pytest.mark.parametrize("window_length", [2, 4])
def test_all_recorded_transitions_are_returned(make, window_length, recorded):
    """The last ones of a column too, which no later row completes."""
    from gymnasium import spaces

    torch.manual_seed(0)
    shapes = Spaces(spaces.Box(-1, 1, (2,)), spaces.Discrete(2))
    buffer = OfflineBuffer([Arrays(recorded, shapes)], num_columns=2)
    sampler = bound(make(), buffer, window_length)
    window = sampler.draw(11 if make is Epochs else 500, 0.0)
    expected = {(e.column, e.position + t) for e in buffer.episodes for t in range(e.length)}
    assert set(pairs(window)) == expected and len(expected) == 11
    sampler.check_valid()
    assert buffer.windows(window, window_length).mask[0].all()
    other = bound(make(), buffer, window_length)
    other.load_state_dict(saved(sampler))
    for one in (sampler, other):
        torch.manual_seed(1)
        window = one.draw(40, 0.0)
        if one.uses_priorities:
            one.update(window, torch.arange(40.0))
    assert all(torch.equal(leaf, saved(other)[name]) for name, leaf in saved(sampler).items())


# Uniform


def test_uniform_draws_the_windows_of_the_ring():
    recording = Recording(3)
    recording.push(25)
    torch.manual_seed(3)
    window, after = bound(Uniform(), recording.ring, 3).draw(100, 0.7), torch.get_rng_state()
    torch.manual_seed(3)
    assert pairs(window) == pairs(recording.ring.draw(100, 3)) and window.weight is None
    assert torch.equal(torch.get_rng_state(), after)


def test_a_seed_gives_the_same_windows_as_in_earlier_versions():
    """Tickets of the rows of all columns, an eighth more of them than windows and four; again for what is missing."""
    recording = Recording(2)
    recording.push(30)
    starts, expected = set(recording.starts(2)), []
    torch.manual_seed(3)
    while len(expected) < 100:
        missing = 100 - len(expected)
        tickets = torch.randint(2 * 29, (missing + missing // 8 + 4,)).tolist()
        expected += [start for start in (divmod(ticket, 29) for ticket in tickets) if start in starts][:missing]
    after = torch.get_rng_state()
    torch.manual_seed(3)
    assert pairs(recording.ring.draw(100)) == expected and torch.equal(torch.get_rng_state(), after)


@pytest.mark.parametrize("share", [0.25, 1 / 3, 0.1, 1.0])
def test_the_recent_share_holds_over_a_run_and_in_every_minibatch(share):
    torch.manual_seed(0)
    recording = Recording(2, 500)
    recording.push(500)
    sampler = bound(Uniform(share, recent_rows=60), recording.ring, 3)
    recent, num_starts = set(recording.starts(3, newest=30)), len(recording.starts(3))
    is_recent = []
    for count in [1, 2, 3, 7, 64, 1, 1, 500] * 20:
        is_recent += [start in recent for start in pairs(sampler.draw(count, 0.0))]
    # Some of the other windows start there too.
    chance, num_others = len(recent) / num_starts, len(is_recent) * (1 - share)
    spread = (num_others * chance * (1 - chance)) ** 0.5
    assert abs(sum(is_recent) - len(is_recent) * share - num_others * chance) <= 5 * spread
    # Where they never do, the count is exact in any part of a run.
    sampler = bound(Uniform(share, recent_rows=60), recording.ring, 3)
    sampler.buffer = OnlyAsked(recording.ring)
    marks = []
    for count in [1, 2, 3, 7, 64, 1, 1, 500]:
        marks += sampler.draw(count, 0.0).position.tolist()
    for begin in range(0, len(marks), 10):
        for end in range(begin, len(marks), 7):
            assert abs(sum(marks[begin:end]) - share * (end - begin)) < 1 + 1e-6
    assert sum(marks) == int(share * len(marks) + 1e-9)


class OnlyAsked:
    """Draws 1 where the newest rows are asked for, and 0 elsewhere."""

    def __init__(self, ring):
        self.device = ring.device

    def draw(self, num_windows, window_length, newest=None):
        assert num_windows > 0 and newest in (None, 30)
        column = torch.zeros(num_windows, dtype=torch.int64)
        return SequenceIndex(column, column + (newest is not None))


@pytest.mark.parametrize("window_length", [2, 4])
def test_recent_windows_are_uniform_over_the_newest_rows_of_each_column(window_length):
    torch.manual_seed(0)
    recording = Recording(3, 50)
    recording.push(50, 20, 44)
    recording.push(9, 30, 0)
    sampler = bound(Uniform(1.0, recent_rows=3 * 12), recording.ring, window_length)
    expected = recording.starts(window_length, newest=12)
    starts, counts = np.unique(pairs(sampler.draw(2000 * len(expected), 0.0)), axis=0, return_counts=True)
    assert [tuple(start) for start in starts.tolist()] == sorted(expected)
    assert abs(counts - 2000).max() < 5 * 2000**0.5


def test_without_valid_recent_starts_all_rows_are_used():
    ring = RingBuffer(40, 1)
    step_type = [FIRST, MID, MID, LAST] + [FIRST, MID, MID, LAST]
    ring.push(experience_of(torch.tensor(step_type, dtype=torch.int32)[:, None]))
    ring.push(experience_of(torch.tensor([[FIRST]], dtype=torch.int32)))  # behind LAST: neither starts a window
    sampler = bound(Uniform(1.0, recent_rows=2), ring)
    assert set(sampler.draw(200, 0.0).position.tolist()) == {0, 1, 2, 4, 5, 6}
    ring.push(experience_of(torch.tensor([[MID]], dtype=torch.int32)))
    assert set(sampler.draw(200, 0.0).position.tolist()) == {8}


def test_a_single_valid_recent_start_is_found():
    torch.manual_seed(0)
    ring = RingBuffer(200, 1)
    step_type = [FIRST, MID, MID, LAST] * 10 + [FIRST] * 30 + [MID]
    ring.push(experience_of(torch.tensor(step_type, dtype=torch.int32)[:, None]))
    sampler = bound(Uniform(1.0, recent_rows=30), ring)
    assert [sampler.draw(1, 0.0).position.item() for _ in range(20)] == [69] * 20


def test_recent_windows_start_where_a_state_is_stored():
    torch.manual_seed(0)
    recording = Recording(2, 100, state_period=4)
    for _ in range(30):
        recording.push(3)
    sampler = bound(Uniform(1.0, recent_rows=2 * 20), recording.ring, 5)
    stored = {position for position in range(0, 90, 3) if position // 4 != (position - 3) // 4}
    window = sampler.draw(300, 0.0)
    assert set(window.position.tolist()) == {position for position in stored if 70 <= position <= 85}
    assert torch.equal(recording.ring.windows(window, 5).experience.state, window.position.float())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"recent_fraction": 1.1}, "Uniform.recent_fraction is 1.1; it must be a number in"),
        ({"recent_fraction": -0.1}, "Uniform.recent_fraction is -0.1; it must be a number in"),
        ({"recent_fraction": 0.5}, "set Uniform.recent_rows"),
        (
            {"recent_fraction": 0.5, "recent_rows": 8},
            "recent_rows is 8, which means 2 rows of each of 3 .* need 3 rows; raise recent_rows to 9",
        ),
    ],
)
def test_settings_without_recent_windows_are_refused(settings, message):
    with pytest.raises(UsageError, match=message):
        bound(Uniform(**settings), Recording(3).ring, 3)


# Epochs


@pytest.mark.parametrize("count", [1, 7, 64, 1000])
def test_each_pass_returns_all_windows_in_a_new_order(count):
    torch.manual_seed(0)
    recording = Recording(3, 50)
    recording.push(50)
    recording.push(7, 0, 20)
    sampler, starts = bound(Epochs(), recording.ring, 3), recording.starts(3)
    drawn = []
    while len(drawn) < 3 * len(starts):
        drawn += pairs(sampler.draw(count, 0.0))
        sampler.check_valid()
    passes = [drawn[k * len(starts) : (k + 1) * len(starts)] for k in range(3)]
    assert all(sorted(one) == starts for one in passes)
    assert passes[0] != passes[1] != starts


def test_a_pass_skips_overwritten_rows_and_does_not_add_new_rows():
    torch.manual_seed(0)
    recording = Recording(2, 50)
    recording.push(50)
    sampler, before = bound(Epochs(), recording.ring), recording.starts(2)
    drawn = pairs(sampler.draw(20, 0.0))
    recording.push(15, 8)
    after = recording.starts(2)
    left = [start for start in before if start in after and start not in drawn]
    assert 0 < len(left) < len(before) - 20
    assert sorted(pairs(sampler.draw(len(left), 0.0))) == left
    assert sorted(pairs(sampler.draw(len(after), 0.0))) == after
    recording.clear()
    recording.push(30)
    assert sorted(pairs(sampler.draw(len(recording.starts(2)), 0.0))) == recording.starts(2)


def test_a_pass_whose_rows_are_all_gone_ends_the_pass():
    recording = Recording(1, 20)
    recording.push(20)
    sampler = bound(Epochs(), recording.ring)
    sampler.draw(2, 0.0)
    for _ in range(3):
        recording.push(20)
    starts = recording.starts(2)
    assert sorted(pairs(sampler.draw(len(starts), 0.0))) == starts


def test_a_saved_pass_continues_at_its_position():
    torch.manual_seed(0)
    recording = Recording(2)
    recording.push(40)
    sampler = bound(Epochs(), recording.ring)
    drawn = pairs(sampler.draw(30, 0.0))
    other = reloaded(recording, sampler, Epochs())
    starts = recording.starts(2)
    assert sorted(drawn + pairs(other.draw(len(starts) - 30, 0.0))) == starts


@pytest.mark.parametrize("state_period", [None, 4])
@pytest.mark.parametrize(
    "make", [Uniform, lambda: Uniform(0.5, 60), Epochs, Prioritized], ids=["uniform", "recent", "epochs", "prioritized"]
)
def test_device_ring_windows_equal_cpu_windows_without_synchronization(make, state_period):
    with FarDevice() as far:
        found = []
        for device in ("cpu", far.device):
            recording = Recording(3, 40, seed=4, state_period=state_period)
            recording.ring = ring = RingBuffer(120, 3, device, state_period=state_period)
            for _ in range(12):
                recording.push(7)
            sampler = bound(make(), ring, 3)
            torch.manual_seed(2)
            far.clear()
            windows = [ring.windows(sampler.draw(16, 0.5), 3) for _ in range(3)]
            assert not far.waits and not far.unpinned
            assert all(leaf.device.type == torch.device(device).type for leaf in nest.leaves(windows))
            found.append([leaf.cpu() for leaf in nest.leaves(windows)])
        for on_cpu, on_far in zip(*found, strict=True):
            assert torch.equal(on_cpu, on_far)


SIZES = [1, FAN_OUT - 1, FAN_OUT, 300, MAX_TOP_SIZE, MAX_TOP_SIZE + 1, 70_001, FAN_OUT**2 * MAX_TOP_SIZE + 5]


def tree_of(weight):
    tree = SumTree(len(weight))
    tree.set(np.arange(len(weight)), weight)
    return tree


@pytest.mark.parametrize("size", SIZES)
def test_the_tree_finds_the_same_index_as_the_running_sum(size):
    """Whole numbers, whose sums are exact in any order."""
    rng = np.random.default_rng(size)
    weight = rng.integers(0, 4, size).astype(np.float64)
    weight[rng.integers(size)] = 5
    tree, reached = tree_of(weight), weight.cumsum()
    assert tree.total == reached[-1]
    point = np.concatenate([rng.integers(0, int(reached[-1]), 400), [0, reached[-1] - 1]]) + 0.5
    expected = np.searchsorted(reached, point, side="right")
    assert (tree.find(point / reached[-1]) == expected).all()
    for one in point[:5]:
        assert tree.find(np.array([one / reached[-1]])) == np.searchsorted(reached, one, side="right")


@pytest.mark.parametrize("size", SIZES)
def test_weights_are_the_last_set_values_and_sums_are_exact(size):
    rng = np.random.default_rng(size)
    tree, weight = SumTree(size), np.zeros(size)
    for count in (1, 7, 300, 2 * size if size < 10_000 else 5000):
        index = rng.integers(0, size, count)
        value = rng.exponential(size=count) * 10.0 ** rng.integers(-9, 9, count)
        value[rng.random(count) < 0.2] = 0
        tree.set(index, value)
        for i, one in zip(index, value):  # the last of several wins
            weight[i] = one
        assert np.array_equal(tree.weights(np.arange(size)), weight)
        tree.check_valid()
        assert tree.total == tree_of(weight).total == pytest.approx(weight.sum())


def test_sums_do_not_drift():
    rng = np.random.default_rng(0)
    weight = rng.random(5000)
    tree, index = tree_of(weight), np.arange(5000)
    for _ in range(50):
        some = rng.integers(0, 5000, 100)
        tree.set(some, rng.random(100) * 1e15)
        tree.set(some, np.zeros(100))
    tree.set(index, weight)
    assert tree.total == tree_of(weight).total
    tree.set(index, np.zeros(5000))
    assert tree.total == 0


@pytest.mark.parametrize("size", [40, 5000, 70_001])
def test_rows_with_weight_0_are_never_drawn(size):
    rng = np.random.default_rng(size)
    ends = np.array([0, 5e-324, 0.5, np.nextafter(1, 0)])
    for _ in range(20):
        weight = rng.random(size) ** 3 * 10.0 ** rng.integers(-18, 18, size)
        weight[rng.random(size) < 0.7] = 0
        weight[rng.integers(size)] = 1e-3
        tree = tree_of(weight)
        # Fractions at, and just beside, the seams between weights.
        seams = (weight.cumsum() / weight.sum())[rng.integers(0, size, 500)]
        fraction = np.concatenate([rng.random(500), ends, seams, np.nextafter(seams, 0), np.nextafter(seams, 1)])
        found = tree.find(np.minimum(fraction, ends[-1]))
        assert found.min() >= 0 and found.max() < size and (weight[found] > 0).all()


def test_a_search_that_ends_at_a_parents_sum_finds_a_child_with_weight():
    """Where the sum that the parent has, made in another order, is more than the running sum comes to."""
    rng, num_more = np.random.default_rng(0), 0
    for _ in range(200):
        weight = np.zeros(MAX_TOP_SIZE + 1)
        weight[33:48] = rng.random(15)  # of the third family all but the first
        tree = tree_of(weight)
        assert weight[tree.find(np.array([np.nextafter(1, 0)]))] > 0
        num_more += np.nextafter(tree.total, 0) >= weight.cumsum()[-1]
    assert num_more > 10


def test_a_single_weight_is_found_at_any_fraction():
    for size in (1, 17, 5000):
        for at in {0, size // 2, size - 1}:
            tree = SumTree(size)
            tree.set(np.array([at]), np.array([1e-30]))
            assert (tree.find(np.linspace(0, np.nextafter(1, 0), 50)) == at).all()


@pytest.mark.parametrize("size", [50, 4500])
def test_frequencies_of_indices_are_proportional_to_weights(size):
    """Pearson's chi-square: k - 1 degrees of freedom, so about k - 1 +- sqrt(2 (k - 1)); with strata it is far less."""
    rng = np.random.default_rng(1)
    weight = rng.random(size) + 0.1
    weight[::7] = 0
    tree = tree_of(weight)
    drawn = np.concatenate([tree.find(rng.random(10 * size)) for _ in range(20)])
    possible = weight > 0
    expected = len(drawn) * weight[possible] / weight.sum()
    statistic = ((np.bincount(drawn, minlength=size)[possible] - expected) ** 2 / expected).sum()
    freedom = possible.sum() - 1
    assert abs(statistic - freedom) < 4 * (2 * freedom) ** 0.5


def test_check_valid_sees_a_sum_that_is_out_of_date():
    tree = tree_of(np.ones(5000))
    tree._levels[0][77] = 1.5
    with pytest.raises(AssertionError, match="outdated"):
        tree.check_valid()


DRAWN = torch.tensor([0, 1])


@pytest.mark.parametrize(
    "drawn, words",
    [
        ((DRAWN, DRAWN), "My.draw returned a tuple; it must return a SequenceIndex"),
        (SequenceIndex(DRAWN, DRAWN[:1]), r"returned \(\(1,\), torch.int64\) as position; .* of shape \(2,\)"),
        (SequenceIndex(DRAWN, DRAWN.float()), "torch.float32.* as position; .* dtype torch.int64"),
        (SequenceIndex(DRAWN.numpy(), DRAWN), "returned ndarray as column"),
        (SequenceIndex(DRAWN, DRAWN, DRAWN.double()), "torch.float64.* as weight"),
        (SequenceIndex(DRAWN + 9, DRAWN), "returned position 0 of column 9, where no window of 2 rows may start"),
        (SequenceIndex(DRAWN, 2 - DRAWN), "returned position 2 of column 0, where no window of 2 rows may start"),
        (SequenceIndex(DRAWN, DRAWN * 3), "returned position 3 of column 1, where no window of 2 rows may start"),
        (SequenceIndex(DRAWN, DRAWN), None),
    ],
)
def test_what_a_users_sampler_draws_is_checked(drawn, words):
    """Row 2 of column 0 is LAST, and row 3 of column 1 is the newest."""
    ring = RingBuffer(20, 2)
    kinds = torch.tensor([[FIRST, FIRST], [MID, MID], [LAST, MID], [FIRST, MID]], dtype=torch.int32)
    numbers = torch.zeros(4, 2)
    time_step = TimeStep(kinds, numbers, numbers + 1, numbers, numbers, torch.tensor([[0, 1]] * 4, dtype=torch.int32))
    ring.push(Experience(time_step, numbers, None, None, None))
    if words is None:
        check_drawn(drawn, 2, ring, 2, "My.draw")
        return
    with pytest.raises(UsageError, match=words):
        check_drawn(drawn, 2, ring, 2, "My.draw")
