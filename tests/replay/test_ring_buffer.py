"""The ring against a copy of every row that was ever pushed: rows of Stamped, which tell where they belong."""

import errno
import io
from typing import NamedTuple

import numpy as np
import pytest
import torch
from toys import Stamped

from alfish import nest
from alfish.data import Experience, StepType, TimeStep, trainable
from alfish.errors import UsageError
from alfish.replay import RingBuffer
from alfish.replay.ring_buffer import SequenceIndex
from alfish.replay.row_store import RowStore
from alfish.runs.checkpoints import Checkpoints
from alfish.runs.files import DiskError

FIRST, MID, LAST, PAD = StepType.FIRST, StepType.MID, StepType.LAST, StepType.PAD


class Columns:
    """Steps Stamped environments, each column as far as asked, and remembers all rows: `history[column][position]`."""

    def __init__(self, num_envs, truncates=False):
        lengths = (3, 5, 1, 8, 2)
        self.envs = [Stamped(lengths[b:] + lengths[:b], truncates and b % 2 == 0) for b in range(num_envs)]
        self.history = [[] for _ in self.envs]

    def _next_row(self, column):
        env, rows = self.envs[column], self.history[column]
        if not rows or rows[-1][0] == LAST:
            observation, _ = env.reset(seed=column)
            row = (FIRST, 0.0, 1.0, *observation)
        else:
            observation, reward, terminated, truncated, _ = env.step(0)
            row = (LAST if terminated or truncated else MID, reward, float(not terminated), *observation)
        rows.append(row)
        return row

    def unroll(self, counts):
        """`counts[b]` new rows of column b, the shorter columns filled up with PAD rows of junk."""
        num_rows = max(counts)
        table = np.full((num_rows, len(counts), 6), -9.0)
        table[..., 0] = PAD
        for column, count in enumerate(counts):
            for t in range(count):
                table[t, column] = self._next_row(column)
        return experience_of(table, len(self.envs))


def experience_of(table, num_envs):
    values = torch.from_numpy(table)
    step_type, reward, discount, stamp = values[..., 0], values[..., 1], values[..., 2], values[..., 3:]
    observation = {"stamp": stamp.float(), "image": image_of(stamp)}
    time_step = TimeStep(
        step_type.int(), reward.float(), discount.float(), observation, stamp[..., 2].long() + 5,
        torch.arange(10, 10 + num_envs, dtype=torch.int32).expand(len(table), -1),
    )  # fmt: skip
    return Experience(time_step, (stamp[..., 1].long(),), {"log_prob": stamp[..., :1].double()}, None)


def image_of(stamp):
    return (stamp[..., 1] * 16 + stamp[..., 2]).remainder(251).to(torch.uint8)[..., None, None].expand(*stamp.shape, 2)


def is_trainable(rows, position):
    return rows[position][0] in (FIRST, MID) and rows[position + 1][0] in (MID, LAST)


def valid_starts(history, length, window_length, num_ignored=0, cleared_at=None):
    """Every (column, position) that may start a window, worked out from the rows themselves."""
    starts = []
    for column, rows in enumerate(history):
        oldest = max(len(rows) - length, cleared_at[column] if cleared_at else 0)
        low = oldest + (num_ignored if oldest else 0)
        starts += [(column, p) for p in range(low, len(rows) - window_length + 1) if is_trainable(rows, p)]
    return starts


def check_windows(batch, window_length, history, allowed):
    """Each leaf of each row is that of the window's column at its position, and starts where it may."""
    column, position = (batch.env_id - 10).tolist(), batch.position.tolist()
    assert set(zip(column, position)) <= set(allowed)
    rows = [[history[c][p + k] for c, p in zip(column, position)] for k in range(window_length)]
    expected = experience_of(np.array(rows, np.float64), 1)._replace(policy_version=None)
    step = batch.experience.time_step
    expected = expected._replace(time_step=expected.time_step._replace(env_id=batch.env_id.expand(window_length, -1)))
    assert nest.paths(batch.experience) == nest.paths(expected)
    for path, leaf, other in zip(nest.paths(expected), nest.leaves(batch.experience), nest.leaves(expected)):
        assert leaf.dtype == other.dtype and torch.equal(leaf, other), path
    # The same, told by the stamps alone: one environment, and steps one by one up to each LAST.
    stamp, here = step.observation["stamp"], step.step_type[:-1]
    assert (stamp[..., 0] == stamp[:1, :, 0]).all()
    ended = here == LAST
    assert torch.equal(stamp[1:, :, 1], stamp[:-1, :, 1] + ended)
    assert torch.equal(stamp[1:, :, 2], torch.where(ended, 0, stamp[:-1, :, 2] + 1))
    assert batch.mask.shape == (window_length - 1, len(column)) and batch.mask[0].all()
    assert (here[0] != LAST).all()


def check_in_place(buffer, window_length):
    """What gathers from the rows where they lie gets what the ring hands out."""
    start = buffer.draw(20, window_length)
    handed, gathered = buffer.windows(start, window_length), buffer.in_place(window_length).windows(start)
    assert nest.paths(handed) == nest.paths(gathered)
    torch.testing.assert_close(nest.leaves(handed), nest.leaves(gathered), rtol=0, atol=0)


def reloaded(buffer, fresh):
    file = io.BytesIO()
    torch.save(buffer.state_dict(), file)
    file.seek(0)
    fresh.load_state_dict(torch.load(file, weights_only=True))
    return fresh


def assert_same_state(one, other):
    """The books, and every row that is there; what else the storage holds means nothing."""
    for a, b in zip(books_and_rows(one), books_and_rows(other), strict=True):
        assert torch.equal(a, b) and a.dtype == b.dtype


def books_and_rows(buffer):
    state = buffer.state_dict()
    leaves = [state[name].clone() for name in ("pos", "start", "env_id", "startable")]
    for column in range(buffer.num_envs):
        end = int(state["pos"][column])
        oldest = int(buffer.oldest_position(torch.tensor([column])))
        rows = buffer.read(torch.tensor([column]), torch.arange(oldest, end).unsqueeze(1))
        leaves += nest.leaves(rows)
    return leaves


def resized(rng, history, cleared_at, length, num_ignored):
    """Another length for two of three reloads, and the first positions that the ring before it can have held."""
    if rng.random() < 1 / 3:
        return cleared_at, length
    held_from = [max(at, len(rows) - length) for rows, at in zip(history, cleared_at)]
    return held_from, int(rng.integers(2 + num_ignored, 31))


SETTINGS = [  # num_envs, rows a column, rows ignored, mapped to files
    (1, 9, 0, False),
    (3, 14, 0, False),
    (2, 30, 3, False),
    (5, 21, 1, True),
]
NUM_OPERATIONS, NUM_DRAWS = 60, 400  # x 4 settings: 96 000 draws


@pytest.mark.parametrize(("num_envs", "length", "num_ignored", "mapped"), SETTINGS)
def test_windows_always_have_consecutive_rows_of_one_environment(tmp_path, num_envs, length, num_ignored, mapped):
    rng = np.random.default_rng(num_envs)
    torch.manual_seed(num_envs)
    columns, cleared_at = Columns(num_envs, truncates=True), [0] * num_envs
    num_made = num_drawn = 0

    def make():
        nonlocal num_made
        num_made += 1
        directory = tmp_path / str(num_made) if mapped else None
        return RingBuffer(length * num_envs + num_envs - 1, num_envs, "cpu", directory, num_ignored)

    def unroll(counts):
        """Of tensors, or of arrays, as acting makes them."""
        experience = columns.unroll(counts)
        return nest.map(torch.Tensor.numpy, experience) if rng.random() < 0.5 else experience

    buffer = make()
    buffer.check_valid()
    for _ in range(NUM_OPERATIONS):
        operation = rng.choice(["aligned", "uneven", "reload", "clear"], p=[0.41, 0.42, 0.09, 0.08])
        if operation == "aligned":
            buffer.push(unroll([int(rng.integers(1, length + 1))] * num_envs))
        elif operation == "uneven":
            counts = rng.integers(0, 1 + rng.integers(1, length + 1), num_envs)
            counts[rng.integers(num_envs)] += counts.max() == 0
            if rng.random() < 0.3:  # all columns level again
                sizes = np.array([len(rows) for rows in columns.history])
                counts = np.minimum(sizes.max() - sizes + 1, length)
            buffer.push(unroll(counts.tolist()))
        elif operation == "reload":
            cleared_at, length = resized(rng, columns.history, cleared_at, length, num_ignored)
            buffer = reloaded(buffer, make())
        else:
            buffer.clear()
            cleared_at = [len(rows) for rows in columns.history]
        buffer.check_valid()
        sizes = [min(len(rows) - at, length) for rows, at in zip(columns.history, cleared_at)]
        assert buffer.num_rows == sum(sizes) and buffer.num_pushed == sum(map(len, columns.history))
        assert buffer.num_starts() == len(valid_starts(columns.history, length, 2, 0, cleared_at))
        while True:
            window_length = int(rng.integers(2, 7))
            allowed = valid_starts(columns.history, length, window_length, num_ignored, cleared_at)
            if allowed:
                batch = buffer.sample(NUM_DRAWS, window_length)
                check_windows(batch, window_length, columns.history, allowed)
                check_in_place(buffer, window_length)
                num_drawn += NUM_DRAWS
                break
            with pytest.raises(UsageError):
                buffer.sample(1, window_length)
            buffer.push(columns.unroll([1] * num_envs))
            buffer.check_valid()
    assert num_drawn == NUM_OPERATIONS * NUM_DRAWS and buffer.num_pushed > 5 * 31  # it did wrap


class States:
    """What the ring should know of states, worked out position by position; each state is (column, position)."""

    def __init__(self, num_envs, period):
        self.kept, self._period = [[] for _ in range(num_envs)], period

    def of_next_rows(self, columns, counts):
        """The states of a push's row 0, which belong to the rows that `columns.unroll(counts)` will make."""
        positions = [len(rows) for rows in columns.history]
        for column, (position, count) in enumerate(zip(positions, counts)):
            if count and all(position // self._period != kept // self._period for kept in self.kept[column]):
                self.kept[column].append(position)
        stamp = torch.tensor(list(enumerate(positions)), dtype=torch.float32)
        return stamp[:, :1], {"cell": stamp}

    def forget(self):
        self.kept = [[] for _ in self.kept]

    def starts(self, history, length, window_length, num_ignored=0, cleared_at=None):
        for column, rows in enumerate(history):
            oldest = max(len(rows) - length, cleared_at[column] if cleared_at else 0)
            low = oldest + (num_ignored if oldest else 0)
            yield from ((column, p) for p in self.kept[column] if low <= p <= len(rows) - window_length)


def push_with_states(buffer, states, columns, counts):
    state = states.of_next_rows(columns, counts)
    buffer.push(columns.unroll(counts)._replace(state=state))


@pytest.mark.parametrize(
    ("num_envs", "length", "num_ignored", "mapped", "period"),
    [(1, 9, 0, False, 4), (3, 14, 0, False, 1), (2, 30, 3, False, 7), (3, 21, 1, True, 4)],
)
def test_windows_start_at_rows_with_states_and_include_them(tmp_path, num_envs, length, num_ignored, mapped, period):
    rng = np.random.default_rng(num_envs + period)
    torch.manual_seed(num_envs)
    columns, states, cleared_at = Columns(num_envs), States(num_envs, period), [0] * num_envs
    num_made, num_checked, at_last = 0, 0, 0

    def make():
        nonlocal num_made
        num_made += 1
        directory = tmp_path / str(num_made) if mapped else None
        return RingBuffer(length * num_envs, num_envs, "cpu", directory, num_ignored, period)

    buffer = make()
    for _ in range(100):
        operation = rng.choice(["aligned", "uneven", "reload", "clear"], p=[0.5, 0.38, 0.08, 0.04])
        if operation == "aligned":
            push_with_states(buffer, states, columns, [int(rng.integers(1, period + 1))] * num_envs)
        elif operation == "uneven":
            counts = rng.integers(0, 1 + min(period + 1, length), num_envs)
            counts[rng.integers(num_envs)] += counts.max() == 0
            push_with_states(buffer, states, columns, counts.tolist())
        elif operation == "reload":
            cleared_at, length = resized(rng, columns.history, cleared_at, length, num_ignored)
            buffer = reloaded(buffer, make())
        else:
            buffer.clear()
            states.forget()
            cleared_at = [len(rows) for rows in columns.history]
        if not any(columns.history):
            continue
        buffer.check_valid()
        window_length = int(rng.integers(2, 6))
        allowed = list(states.starts(columns.history, length, window_length, num_ignored, cleared_at))
        if not allowed:
            with pytest.raises(UsageError):
                buffer.sample(1, window_length)
            continue
        batch = buffer.sample(25 * len(allowed), window_length)  # so that none is left out but by a fault
        starts = torch.stack([batch.env_id - 10, batch.position], -1)
        assert {tuple(start) for start in starts.tolist()} == set(allowed)
        hidden, cell = batch.experience.state[0], batch.experience.state[1]["cell"]
        assert torch.equal(cell, starts.float()) and torch.equal(hidden, cell[:, :1])
        rows = [[columns.history[c][p + k] for c, p in starts.tolist()] for k in range(window_length)]
        observation = batch.experience.time_step.observation["stamp"]
        assert torch.equal(observation, torch.tensor(np.array(rows)[..., 3:], dtype=torch.float32))
        assert torch.equal(batch.mask, trainable(batch.experience.time_step.step_type))
        num_checked += len(starts)
        at_last += int((batch.experience.time_step.step_type[0] == LAST).sum())
    assert num_checked > 1000 and at_last > 0 and buffer.num_pushed > 4 * 31


def test_states_are_drawn_uniformly():
    torch.manual_seed(0)
    columns, states, buffer = Columns(4), States(4, 5), RingBuffer(4 * 40, 4, state_period=5)
    for counts in ([5, 2, 1, 5], [3, 4, 0, 5], [5, 5, 5, 5], [1, 2, 3, 4], *[[5, 4, 3, 5]] * 9):
        push_with_states(buffer, states, columns, counts)
    expected = list(states.starts(columns.history, 40, 6))
    batch = buffer.sample(2000 * len(expected), 6)
    starts, counts = torch.stack([batch.env_id.long() - 10, batch.position]).unique(dim=1, return_counts=True)
    assert [tuple(start) for start in starts.T.tolist()] == sorted(expected) and len(expected) > 15
    assert (counts - 2000).abs().max() < 5 * 2000**0.5


@pytest.mark.parametrize("options", [{"state_period": 4}, {"return_gamma": 0.9}, {"keeps_episodes": True}, {}])
def test_windows_include_stored_states_and_returns(options):
    columns, states, buffer = Columns(1), States(1, 4), RingBuffer(20, 1, **options)
    assert buffer.in_place(2) is None  # there are no rows yet
    push_with_states(buffer, states, columns, [3])
    assert (buffer.in_place(2) is None) == any(name in options for name in ("state_period", "return_gamma"))


def test_a_ring_with_states_is_not_a_ring_without_them():
    columns, states, buffer = Columns(1), States(1, 4), RingBuffer(20, 1, state_period=4)
    push_with_states(buffer, states, columns, [3])
    for period in (None, 5):
        with pytest.raises(UsageError, match=f"state_period = 4, but this replay has state_period = {period}"):
            RingBuffer(20, 1, state_period=period).load_state_dict(buffer.state_dict())


@pytest.mark.parametrize("window_length", [2, 4, 6])
def test_starts_are_uniform_over_the_rows_that_may_start_a_window(window_length):
    torch.manual_seed(0)
    columns = Columns(4)
    buffer = RingBuffer(4 * 17, 4)
    buffer.push(columns.unroll([17, 9, 2, 11]))
    buffer.push(columns.unroll([12, 4, 0, 3]))
    expected = valid_starts(columns.history, 17, window_length)
    num_draws = 2000 * len(expected)
    batch = buffer.sample(num_draws, window_length)
    starts, counts = torch.stack([batch.env_id.long() - 10, batch.position]).unique(dim=1, return_counts=True)
    assert [tuple(start) for start in starts.T.tolist()] == sorted(expected)
    assert (counts - 2000).abs().max() < 5 * 2000**0.5


def test_last_rows_and_the_newest_row_never_start_windows():
    columns = Columns(2)
    buffer = RingBuffer(200, 2)
    buffer.push(columns.unroll([50, 50]))
    batch = buffer.sample(5000, 2)
    assert not (batch.experience.time_step.step_type[0] == LAST).any()
    # FIRST never arrives: no pair goes across LAST -> FIRST.
    assert not (batch.experience.time_step.step_type[1] == FIRST).any()
    assert batch.position.max() < 49


def test_no_window_starts_in_a_gap_that_ends_in_last():
    columns = Columns(2)
    unroll = columns.unroll([20, 20])
    step_type = unroll.time_step.step_type
    at = [int((step_type[:, column] == MID).nonzero()[3]) for column in range(2)]
    for column, t in enumerate(at):
        assert step_type[t + 1, column] in (MID, LAST)
        step_type[t, column] = LAST
    buffer = RingBuffer(40, 2)
    buffer.push(unroll)
    buffer.check_valid()
    batch = buffer.sample(5000)
    for column, t in enumerate(at):
        starts = batch.position[batch.env_id == 10 + column]
        assert not (starts == t).any() and (starts == t - 1).any()


def test_no_window_joins_the_newest_and_the_oldest_row():
    torch.manual_seed(0)
    columns = Columns(2)
    buffer = RingBuffer(2 * 10, 2)
    for count in (10, 3, 4):
        buffer.push(columns.unroll([count, count]))
    for window_length in (2, 3, 6):
        batch = buffer.sample(2000, window_length)
        assert batch.position.min() >= 7 and batch.position.max() <= 17 - window_length


def test_rows_whose_frame_stack_was_overwritten_start_no_window():
    torch.manual_seed(0)
    columns = Columns(1)
    buffer = RingBuffer(12, 1, num_ignored=3)
    buffer.push(columns.unroll([12]))
    assert buffer.sample(1000, 2).position.min() == 0  # nothing is missing before the first row
    buffer.push(columns.unroll([1]))
    expected = valid_starts(columns.history, 12, 2, 3)
    assert buffer.sample(1000, 2).position.unique().tolist() == [p for _, p in expected]
    assert expected[0][1] >= 1 + 3


def test_a_saved_replay_whose_positions_have_no_rows_is_refused():
    store = RowStore(4, 2, "cpu", None)
    state = store.state_dict()
    store.check_fits(state)
    with pytest.raises(ValueError, match="positions"):
        store.check_fits(state | {"pos": state["pos"] + 4})


def test_clear_removes_all_rows_but_positions_continue():
    columns = Columns(2)
    buffer = RingBuffer(40, 2)
    buffer.push(columns.unroll([15, 13]))
    buffer.clear()
    assert (buffer.num_rows, buffer.num_starts(), buffer.num_pushed) == (0, 0, 28)
    with pytest.raises(UsageError, match="no window of 2 rows yet"):
        buffer.sample(1)
    buffer.push(columns.unroll([6, 6]))
    allowed = valid_starts(columns.history, 20, 2, 0, [15, 13])
    batch = buffer.sample(500)
    check_windows(batch, 2, columns.history, allowed)
    assert batch.position[batch.env_id == 10].min() >= 15


def test_rows_before_clear_cannot_start_windows():
    """Column 0 fills up to where column 1 stands; column 1 has had no row since the clear."""
    columns = Columns(2)
    buffer = RingBuffer(60, 2)
    buffer.push(columns.unroll([4, 5]))
    buffer.clear()
    buffer.push(columns.unroll([1, 0]))
    buffer.push(columns.unroll([2, 2]))
    buffer.check_valid()
    assert buffer.num_starts() == len(valid_starts(columns.history, 30, 2, 0, [4, 5]))


@pytest.mark.parametrize("counts", [[7, 7, 7], [9, 2, 5], [30, 30, 30], [30, 0, 17]])
def test_a_restored_ring_continues_bit_for_bit(counts):
    columns = Columns(3)
    buffer = RingBuffer(60, 3)
    for _ in range(2):
        for start in range(0, max(counts), 15):
            buffer.push(columns.unroll([min(max(count - start, 0), 15) for count in counts]))
    other = reloaded(buffer, RingBuffer(60, 3))
    other.check_valid()
    assert_same_state(buffer, other)
    more = columns.unroll([4, 1, 8])
    for one in (buffer, other):
        one.push(more)
        one.check_valid()
    assert_same_state(buffer, other)
    drawn = []
    for one in (buffer, other):
        torch.manual_seed(3)
        drawn.append(nest.leaves(one.sample(50, 3)))
    assert all(torch.equal(a, b) for a, b in zip(*drawn))


def test_an_empty_ring_can_be_saved():
    other = reloaded(RingBuffer(60, 3), RingBuffer(60, 3))
    other.push(Columns(3).unroll([5, 5, 5]))
    other.check_valid()


def test_a_saved_ring_holds_only_existing_rows():
    buffer = RingBuffer(30_000, 1)
    buffer.push(Columns(1).unroll([20]))
    file = io.BytesIO()
    torch.save(buffer.state_dict()["rows"], file)
    assert file.tell() < 20_000


@pytest.mark.parametrize("num_rows", [6, 10, 14])
def test_saving_a_state_does_not_copy_rows_or_save_empty_capacity(num_rows):
    columns, buffer = Columns(2), RingBuffer(20, 2)
    for _ in range(2):
        buffer.push(columns.unroll([num_rows // 2, num_rows // 2]))
    for saved, kept in zip(nest.leaves(buffer.state_dict()["rows"]), nest.leaves(buffer._store.rows)):
        assert saved.data_ptr() == kept.data_ptr()
        assert saved.untyped_storage().nbytes() == saved.numel() * saved.element_size()
        assert len(saved) == min(2 * num_rows, 20)


def test_an_initially_empty_column_gets_its_env_id_later():
    columns = Columns(3)
    buffer = RingBuffer(30, 3)
    unroll = columns.unroll([4, 0, 4])
    junk = torch.where(unroll.time_step.step_type == PAD, 9, unroll.time_step.env_id)
    buffer.push(unroll._replace(time_step=unroll.time_step._replace(env_id=junk)))
    buffer.push(columns.unroll([4, 4, 4]))
    assert buffer.sample(100).env_id.unique().tolist() == [10, 11, 12]


def test_loading_an_empty_ring_allows_new_leaf_names():
    buffer = RingBuffer(30, 3)
    buffer.push(Columns(3).unroll([4, 4, 4]))
    buffer.load_state_dict(RingBuffer(30, 3).state_dict())
    unroll = Columns(3).unroll([4, 4, 4])
    buffer.push(unroll._replace(time_step=unroll.time_step._replace(env_id=unroll.time_step.env_id + 10)))
    assert buffer.sample(100).env_id.unique().tolist() == [20, 21, 22]


@pytest.mark.parametrize("length", [4, 8, 9, 13, 14, 20, 27, 60])
@pytest.mark.parametrize("counts", [[33, 33, 33], [33, 31, 7], [6, 0, 6]])
def test_a_ring_of_another_capacity_loads_the_newest_rows(length, counts):
    columns = Columns(3)
    buffer, other = RingBuffer(42, 3), RingBuffer(3 * length, 3, keeps_episodes=True)
    for start in range(0, max(counts), 11):
        buffer.push(columns.unroll([min(max(count - start, 0), 11) for count in counts]))
    reloaded(buffer, other).check_valid()
    for column, count in enumerate(counts):
        size = min(count, 14, length)
        if size:
            position = torch.arange(count - size, count).unsqueeze(1)
            rows = (ring.read(torch.tensor([column]), position) for ring in (buffer, other))
            assert all(torch.equal(*pair) for pair in zip(*map(nest.leaves, rows)))
    assert other.num_rows == sum(min(count, 14, length) for count in counts)
    other.push(columns.unroll([2, 2, 2]))
    other.check_valid()


def test_another_number_of_environments_is_refused_by_both_numbers():
    buffer = RingBuffer(60, 3)
    buffer.push(Columns(3).unroll([5, 5, 5]))
    with pytest.raises(
        UsageError, match="for 3 environments, but this replay is for 2; keep the number of environments"
    ):
        RingBuffer(60, 2).load_state_dict(buffer.state_dict())


def test_rows_in_files_are_the_rows_in_memory(tmp_path):
    columns = Columns(3)
    rings = RingBuffer(30, 3), RingBuffer(30, 3, directory=tmp_path / "replay")
    for counts in ([10, 10, 10], [4, 4, 4], [3, 0, 5]):
        rows = columns.unroll(counts)
        for ring in rings:
            ring.push(rows)
            ring.check_valid()
    assert_same_state(*rings)
    start = SequenceIndex(torch.tensor([0, 1, 2]), torch.tensor([8, 6, 12]))
    in_memory, in_files = (nest.leaves(ring.windows(start, 3)) for ring in rings)
    assert all(torch.equal(a, b) for a, b in zip(in_memory, in_files))
    num_bytes = sum(leaf.nbytes for leaf in nest.leaves(rings[0]._store.rows))
    assert sum(path.stat().st_size for path in (tmp_path / "replay").iterdir()) == num_bytes


def test_disk_space_for_row_files_is_reserved_at_the_start(tmp_path, monkeypatch):
    ring, columns = RingBuffer(30_000, 3, directory=tmp_path / "a"), Columns(3)
    rows = columns.unroll([2, 2, 2])
    ring.push(rows)
    for path in (tmp_path / "a").iterdir():
        assert path.stat().st_blocks * 512 >= path.stat().st_size >= 30_000, "a sparse file would fail at a write"

    def full(descriptor, offset, size):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(DiskError, match=r"b cannot be written to: No space left on device \(leaf-000.bin\)"):
        RingBuffer(30, 3, directory=tmp_path / "b").push(rows)


@pytest.mark.parametrize(("capacity", "num_envs", "num_ignored"), [(1, 1, 0), (7, 4, 0), (11, 4, 1), (4, 1, 3)])
def test_a_ring_too_small_for_a_window_is_refused(capacity, num_envs, num_ignored):
    with pytest.raises(UsageError, match=f"a replay of {capacity} rows .* raise its capacity"):
        RingBuffer(capacity, num_envs, num_ignored=num_ignored)


def test_an_unroll_longer_than_a_column_is_refused():
    buffer = RingBuffer(20, 2)
    with pytest.raises(UsageError, match="11 rows does not fit into a replay of 10"):
        buffer.push(Columns(2).unroll([11, 11]))


def test_a_million_atari_frames_take_less_than_seven_and_a_half_gigabytes():
    num_rows, num_envs, capacity = 3, 8, 800
    rows = (num_rows, num_envs)
    zeros = torch.zeros(rows)
    frame = torch.zeros(*rows, 84, 84, dtype=torch.uint8)
    action = torch.zeros(rows, dtype=torch.int64)
    step_type = torch.full(rows, MID, dtype=torch.int32)
    buffer = RingBuffer(capacity, num_envs, num_ignored=3)
    buffer.push(Experience(TimeStep(step_type, zeros, zeros, frame, action, step_type), action, None, None))
    store = buffer._store
    storage = [torch.from_numpy(x) for x in (buffer._starts._trains, store.env_id)] + nest.leaves(store.rows)
    assert len(storage) == 2 + 6 and len(store.rows.step_type) == capacity
    num_bytes = sum(leaf.untyped_storage().nbytes() for leaf in storage)
    assert 1_000_000 / capacity * num_bytes < 7.5e9


# Drawn, read and written in arrays, or in tensors where numpy does not know the dtype.


def with_low(unroll):
    """The same, with a leaf that is kept as a tensor."""
    stamp = unroll.time_step.observation["stamp"]
    return unroll._replace(info={**unroll.info, "low": stamp.bfloat16(), "flag": stamp[..., 2] > 1})


def check_low(batch):
    stamp, info = batch.experience.time_step.observation["stamp"], batch.experience.info
    assert info["low"].dtype == torch.bfloat16 and torch.equal(info["low"], stamp.bfloat16())
    assert info["flag"].dtype == torch.bool and torch.equal(info["flag"], stamp[..., 2] > 1)


PUSHES = {
    "aligned": [[5, 5, 5], [7, 7, 7], [4, 4, 4]],  # the last one goes round the ring's end
    "uneven": [[5, 2, 5], [1, 6, 4], [7, 3, 0], [4, 8, 9]],
    "uneven, then aligned": [[5, 2, 5], [0, 3, 0], [6, 6, 6], [6, 6, 6]],
}


@pytest.mark.parametrize("kind", PUSHES)
def test_rows_of_dtypes_without_numpy_are_stored_with_the_others(kind):
    columns, buffer = Columns(3), RingBuffer(3 * 12, 3)
    for counts in PUSHES[kind]:
        buffer.push(with_low(columns.unroll(counts)))
        buffer.check_valid()
    for ring in (buffer, reloaded(buffer, RingBuffer(3 * 12, 3))):
        batch = ring.sample(300, 3)
        check_low(batch)
        kept = {"log_prob": batch.experience.info["log_prob"]}
        batch = batch._replace(experience=batch.experience._replace(info=kept))
        check_windows(batch, 3, columns.history, valid_starts(columns.history, 12, 3))
    more = with_low(columns.unroll([2, 1, 0]))
    buffer.push(more)
    check_low(buffer.sample(200))


@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("window_length", [2, 4])
def test_a_sample_is_the_windows_of_a_draw(num_envs, window_length):
    columns, buffer = Columns(num_envs), RingBuffer(12 * num_envs, num_envs)
    for count in (7, 8):
        buffer.push(with_low(columns.unroll([count] * num_envs)))
    torch.manual_seed(5)
    sampled, after = buffer.sample(50, window_length), torch.get_rng_state()
    torch.manual_seed(5)
    start = buffer.draw(50, window_length)
    assert torch.equal(torch.get_rng_state(), after)
    assert start.column.dtype == start.position.dtype == torch.int64 and start.column.shape == (50,)
    drawn = buffer.windows(start, window_length)
    assert nest.paths(sampled) == nest.paths(drawn)
    for a, b in zip(nest.leaves(sampled), nest.leaves(drawn)):
        assert a.dtype == b.dtype and torch.equal(a, b)
    read = buffer.read(start.column, start.position + torch.arange(window_length)[:, None])
    assert all(torch.equal(a, b) for a, b in zip(nest.leaves(read), nest.leaves(drawn.experience)))
    assert torch.equal(drawn.position, start.position) and torch.equal(drawn.env_id, 10 + start.column.int())


@pytest.mark.parametrize("as_arrays", [False, True])
def test_an_episode_that_was_interrupted_ends_with_its_last_row(as_arrays):
    """In the middle of what is pushed, and where it begins; column 1 goes on."""
    columns, buffer = Columns(2), RingBuffer(40, 2)
    kinds = [(FIRST, MID, MID), (FIRST, MID, FIRST, MID, MID)]
    for broken in kinds:
        unroll = columns.unroll([len(broken)] * 2)
        going_on = [MID] * len(broken)
        step_type = torch.tensor([broken, going_on], dtype=torch.int32).T.contiguous()
        unroll = unroll._replace(time_step=unroll.time_step._replace(step_type=step_type))
        buffer.push(nest.map(torch.Tensor.numpy, unroll) if as_arrays else unroll)
        buffer.check_valid()
        assert step_type[:, 0].tolist() == [*broken], "the caller's rows were written"
    stored = buffer.read(torch.arange(2), torch.arange(8)[:, None].expand(-1, 2)).time_step
    assert stored.step_type[:, 0].tolist() == [FIRST, MID, LAST, FIRST, LAST, FIRST, MID, MID]
    assert stored.step_type[:, 1].tolist() == [MID] * 8


def test_windows_are_copies_of_the_rows():
    columns, buffer = Columns(2), RingBuffer(40, 2)
    buffer.push(with_low(columns.unroll([15, 15])))
    start = buffer.draw(20)
    before = nest.map(torch.clone, buffer.windows(start, 2))
    experience = buffer.windows(start, 2).experience
    *step, _ = experience.time_step  # env_id's rows are one row, which cannot be written
    nest.map(torch.Tensor.zero_, (tuple(step), experience.action, experience.info))
    after = buffer.windows(start, 2)
    assert all(torch.equal(a, b) for a, b in zip(nest.leaves(before), nest.leaves(after)))


def test_rows_may_be_overwritten_after_they_were_pushed():
    columns, buffer = Columns(2), RingBuffer(40, 2)
    unroll = with_low(columns.unroll([15, 15]))
    buffer.push(unroll)
    start = buffer.draw(20)
    before = nest.map(torch.clone, buffer.windows(start, 2))
    for leaf in (unroll.action[0], unroll.info["low"], unroll.time_step.reward, unroll.time_step.step_type):
        leaf.zero_()
    after = buffer.windows(start, 2)
    assert all(torch.equal(a, b) for a, b in zip(nest.leaves(before), nest.leaves(after)))


def test_a_directory_belongs_to_one_ring_until_it_is_closed(tmp_path):
    columns, rings = Columns(2), [RingBuffer(40, 2, directory=tmp_path) for _ in range(3)]
    rings[0].push(columns.unroll([4, 4]))
    with pytest.raises(UsageError, match="another replay stores its rows in"):
        rings[1].push(columns.unroll([4, 4]))
    rings[0].close()
    rings[1].push(columns.unroll([4, 4]))
    del rings[1]
    rings[1].push(columns.unroll([4, 4]))


class Memory(NamedTuple):
    kept: torch.Tensor


def test_named_tuples_are_saved_as_tuples_and_restored_by_a_push(tmp_path):
    def named(experience):
        state = Memory(torch.arange(2.0))
        return experience._replace(info=Memory(experience.info["log_prob"]), state=state)

    columns, ring, fresh = Columns(2), *(RingBuffer(40, 2, state_period=4) for _ in range(2))
    ring.push(named(columns.unroll([4, 4])))
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, ring.state_dict())
    fresh.load_state_dict(checkpoints.load(1)[1])
    more = named(columns.unroll([4, 4]))
    for each in (ring, fresh):
        each.push(more)
    torch.manual_seed(0)
    one = ring.sample(8)
    torch.manual_seed(0)
    other = fresh.sample(8)
    assert isinstance(other.experience.info, Memory) and isinstance(other.experience.state, Memory)
    assert nest.paths(one) == nest.paths(other)
    assert all(torch.equal(a, b) for a, b in zip(nest.leaves(one), nest.leaves(other)))


def test_rows_of_another_shape_are_refused_in_words():
    ring = RingBuffer(60, 3)
    rows = Experience(
        TimeStep(
            torch.ones(2, 3, dtype=torch.int32),
            *[torch.zeros(2, 3) for _ in range(2)],
            torch.zeros(2, 3, 4),
            torch.zeros(2, 3),
            torch.zeros(2, 3, dtype=torch.int32),
        ),
        torch.zeros(2, 3),
        None,
        None,
        None,
    )
    ring.push(rows)
    with pytest.raises(UsageError, match=r"shape \(2, 2\), but the replay is for 3 environments; their shape must be"):
        ring.push(nest.map(lambda leaf: leaf[:, :2], rows))
    other = rows._replace(time_step=rows.time_step._replace(observation=torch.zeros(2, 3, 5)))
    with pytest.raises(UsageError, match=r"do not fit: time_step.observation|do not fit: observation is \[4\]"):
        ring.push(other)
    for arguments in ((0, 2), (-1, 2), (4, 1)):
        with pytest.raises(UsageError, match="it needs at least 1 window of at least 2 rows"):
            ring.sample(*arguments)
