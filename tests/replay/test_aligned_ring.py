"""The ring of environments that reset in the same step has the windows of a `RingBuffer`, whatever ends when."""

import copy

import numpy as np
import pytest
import torch

from alfish import nest
from alfish.data import Ends, Experience, StepType, TimeStep, in_line
from alfish.errors import UsageError
from alfish.replay import AlignedRingBuffer, Epochs, Prioritized, RingBuffer, SequenceIndex, Uniform

FIRST, MID, LAST, PAD = StepType.FIRST, StepType.MID, StepType.LAST, StepType.PAD


class Stream:
    """Makes unrolls of B environments whose episodes end with a probability, some of them without a LAST row.

    The observation of each row is a number that no other row has.
    """

    def __init__(self, num_envs, end=0.3, lost=0.0, seed=0):
        self._random = np.random.default_rng(seed)
        self._num_envs, self._end, self._lost = num_envs, end, lost
        self._count = 0
        self._kind = np.full(num_envs, FIRST)

    def rows(self, kind, discount):
        size = self._num_envs
        number = np.arange(self._count, self._count + size, dtype=np.float32)
        self._count += size
        reward = np.where(kind == FIRST, 0, number)
        numbers = [torch.from_numpy(np.asarray(x, np.float32)) for x in (reward, discount, number[:, None], number)]
        return TimeStep(torch.from_numpy(kind.astype(np.int32)), *numbers, torch.arange(size, dtype=torch.int32) + 10)

    def unroll(self, length):
        rows, ends, last_rows = [], [], []
        for _ in range(length):
            rows.append(self.rows(self._kind, np.ones(self._num_envs)))
            ended = self._random.random(self._num_envs) < self._end
            is_lost = ended & (self._random.random(self._num_envs) < self._lost)
            terminated = ended & (self._random.random(self._num_envs) < 0.5)
            last_rows.append(self.rows(np.where(ended, LAST, MID), np.where(terminated, 0, 1)))
            ends.append(torch.from_numpy(ended & ~is_lost))
            self._kind = np.where(ended, FIRST, MID)
        time_step, last = (nest.map(lambda *leaves: torch.stack(leaves), *each) for each in (rows, last_rows))
        action = time_step.observation[..., 0] + 0.5
        state = torch.full((self._num_envs, 2), float(self._count))
        return Experience(time_step, action, {"info": action + 0.25}, state, None, ends=Ends(torch.stack(ends), last))


def aligned_ring(length=12, num_envs=3, end_fraction=1.0, **settings):
    return AlignedRingBuffer(length * num_envs, num_envs, end_fraction=end_fraction, **settings)


class Places:
    """Where the rows of an aligned ring are in the stream of a `RingBuffer`."""

    def __init__(self, num_envs):
        self._by_position, self._ends = [], np.zeros(num_envs, np.int64)

    def push(self, experience):
        acted = in_line(experience).acted.numpy()
        self._by_position += list(acted + self._ends)
        self._ends += len(acted) + experience.ends.ended.sum(0).numpy()

    def __call__(self, column, position):
        return np.array([self._by_position[p][c] for p, c in zip(position.tolist(), column.tolist())])


def assert_equal_windows(found, expected):
    for path, a, b in zip(nest.paths(found), nest.leaves(found), nest.leaves(expected), strict=True):
        assert torch.equal(a, b), path


@pytest.mark.parametrize("window_length", [2, 3, 6])
@pytest.mark.parametrize(("end", "lost"), [(0.0, 0.0), (0.1, 0.0), (0.5, 0.0), (1.0, 0.0), (0.4, 0.5)])
def test_windows_equal_those_of_the_stream(end, lost, window_length):
    num_envs = 3
    stream, places = Stream(num_envs, end, lost), Places(num_envs)
    aligned = aligned_ring(12, num_envs)
    ring = RingBuffer(1000 * num_envs, num_envs)
    random, num_compared = np.random.default_rng(1), 0
    for _ in range(25):
        experience = stream.unroll(int(random.integers(1, 6)))
        places.push(experience)
        aligned.push(experience)
        ring.push(in_line(experience).experience)
        aligned.check_valid()
        low, count = aligned.start_range(window_length)
        if count[0] == 0:
            continue
        position = torch.arange(int(low[0]), int(low[0] + count[0])).repeat_interleave(num_envs)
        column = torch.arange(num_envs).repeat(int(count[0]))
        found = aligned.windows(SequenceIndex(column, position), window_length)
        at = torch.from_numpy(places(column, position))
        expected = ring.windows(SequenceIndex(column, at), window_length)
        assert_equal_windows((found.experience, found.mask), (expected.experience, expected.mask))
        assert torch.equal(found.env_id, expected.env_id) and torch.equal(found.position, position)
        num_compared += len(position)
    assert num_compared > 200


def test_lost_last_rows_are_reported_once(caplog):
    aligned = AlignedRingBuffer(3 * 64, 3)
    stream = Stream(3, 0.05)
    for _ in range(30):
        aligned.push(stream.unroll(4))
    assert not caplog.records
    stream = Stream(3, 0.5)
    for _ in range(30):
        aligned.push(stream.unroll(4))
    (record,) = caplog.records
    assert "but AlignedRingBuffer stores 12 LAST rows; rows before lost LAST rows do not train" in record.getMessage()


def test_last_rows_that_were_overwritten_are_pad():
    """There is room for one LAST row of each environment, and all episodes end in every step."""
    aligned = AlignedRingBuffer(2 * 8, 2)
    aligned.push(Stream(2, end=1.0).unroll(6))
    batch = aligned.windows(SequenceIndex(torch.zeros(4, dtype=torch.int64), torch.arange(4)), 2)
    assert batch.experience.time_step.step_type[1].tolist() == [PAD, PAD, PAD, PAD]
    assert not batch.mask.any()
    newest = aligned.windows(SequenceIndex(torch.tensor([0, 1]), torch.tensor([4, 4])), 2)
    assert newest.experience.time_step.step_type[1].tolist() == [PAD, PAD]  # only the LAST rows after row 5 are left
    assert aligned.stream(0).time_step.step_type[-2:, 0].tolist() == [FIRST, LAST]


def test_draws_are_uniform_and_depend_on_torchs_generator_only():
    aligned = AlignedRingBuffer(2 * 8, 2)
    stream = Stream(2)
    for length in (5, 6):
        aligned.push(stream.unroll(length))
    torch.manual_seed(0)
    first = aligned.draw(9000, 3)
    torch.manual_seed(0)
    again = aligned.draw(9000, 3)
    assert torch.equal(first.column, again.column) and torch.equal(first.position, again.position)
    counts = torch.bincount(first.position * 2 + first.column)
    assert counts[:6].sum() == 0 and len(counts) == 18  # positions 3 to 8 of 3 to 10
    assert counts[6:].min() > 650 and counts[6:].max() < 850


def test_the_newest_rows_can_be_drawn_alone():
    aligned = AlignedRingBuffer(2 * 20, 2)
    aligned.push(Stream(2).unroll(15))
    assert aligned.draw(100, 2, newest=4).position.unique().tolist() == [11, 12, 13]


@pytest.mark.parametrize("length", [5, 12, 30])
def test_a_saved_ring_is_restored_with_as_many_rows_as_fit(length):
    stream = Stream(3, 0.3)
    aligned = aligned_ring(12)
    for _ in range(4):
        aligned.push(stream.unroll(5))
    restored = AlignedRingBuffer(length * 3, 3)
    restored.load_state_dict(copy.deepcopy(aligned.state_dict()))
    restored.check_valid()
    for _ in range(2):
        low, count = restored.start_range(3)
        index = SequenceIndex(
            torch.arange(3).repeat(int(count[0])),
            torch.arange(int(low[0]), int(low[0] + count[0])).repeat_interleave(3),
        )
        if length <= 12:
            expected = aligned.windows(index, 3)
            found = restored.windows(index, 3)
            there = found.experience.time_step.step_type != PAD
            assert length < 12 or there.float().mean() > 0.8
            for a, b in zip(nest.leaves(found.experience), nest.leaves(expected.experience), strict=True):
                assert torch.equal(a[there], b[there])
        else:
            assert restored.windows(index, 3).mask.any()
        more = stream.unroll(4)
        aligned.push(more)
        restored.push(more)
        restored.check_valid()


def test_a_clear_forgets_rows_and_their_ends():
    stream = Stream(3, 0.5)
    aligned = aligned_ring(12)
    aligned.push(stream.unroll(7))
    aligned.clear()
    assert aligned.num_rows == 0 and not aligned.has_start(2)
    with pytest.raises(UsageError, match="no window of 2 rows yet"):
        aligned.draw(4)
    aligned.push(stream.unroll(5))
    aligned.check_valid()
    assert aligned.windows(aligned.draw(50), 2).mask.float().mean() > 0.8


def test_a_window_begins_with_the_state_of_its_row():
    stream = Stream(3, 0.3)
    aligned = aligned_ring(12, state_period=4)
    for _ in range(5):
        experience = stream.unroll(4)
        aligned.push(experience)
    index = aligned.draw(40, 3)
    assert (index.position % 4 == 0).all()
    batch = aligned.windows(index, 3)
    assert torch.equal(batch.experience.state[:, 0], (index.position + 4) * 6.0)
    assert aligned.in_place(3) is None


def test_a_graph_gathers_the_same_windows():
    aligned = aligned_ring(12)
    stream = Stream(3, 0.3)
    aligned.push(stream.unroll(7))
    view = aligned.in_place(4)
    for _ in range(3):
        aligned.push(stream.unroll(4))
        index = aligned.draw(30, 4)
        found, expected = view.windows(index), aligned.windows(index, 4)
        assert_equal_windows((found.experience, found.mask), (expected.experience, expected.mask))


def test_the_stream_of_a_column_has_all_rows():
    stream = Stream(3, 0.3)
    aligned = aligned_ring(40)
    ring = RingBuffer(300, 3)
    for _ in range(4):
        experience = stream.unroll(6)
        aligned.push(experience)
        ring.push(in_line(experience).experience)
    for column in range(3):
        assert_equal_windows(aligned.stream(column), ring.stream(column))


def test_an_episode_that_breaks_off_ends_with_its_newest_row():
    """A resumed environment begins new episodes: a MID row is then followed by FIRST, without a LAST row."""
    aligned, ring = aligned_ring(20), RingBuffer(60, 3)
    stream = Stream(3, 0.0)
    for _ in range(2):
        experience = stream.unroll(4)
        aligned.push(experience)
        ring.push(in_line(experience).experience)
        stream._kind = np.full(3, FIRST)
    index = SequenceIndex(torch.zeros(7, dtype=torch.int64), torch.arange(7))
    found, expected = (each.windows(index, 2) for each in (aligned, ring))
    assert_equal_windows((found.experience, found.mask), (expected.experience, expected.mask))
    assert found.mask[0].tolist() == [True, True, True, False, True, True, True]


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"directory": "rows"}, "ReplayBatches.directory"),
        ({"keeps_episodes": True}, "HindsightReplay"),
        ({"return_gamma": 0.9}, "returns of whole episodes"),
    ],
)
def test_settings_that_need_an_index_on_the_host_are_refused(settings, name):
    with pytest.raises(UsageError, match=f"AlignedRingBuffer does not support {name}"):
        AlignedRingBuffer(100, 2, **settings)


@pytest.mark.parametrize("sampler", [Prioritized, Epochs])
def test_samplers_that_need_the_starts_are_refused(sampler):
    with pytest.raises(UsageError, match=f"{sampler.__name__} reads which rows may start a window"):
        sampler().bind(AlignedRingBuffer(100, 2), 2)
    Uniform().bind(AlignedRingBuffer(100, 2), 2)


def test_environments_that_reset_in_the_next_step_are_refused():
    experience = in_line(Stream(3).unroll(4)).experience
    with pytest.raises(
        UsageError, match="but these environments make one row in each step; leave ReplayBatches.buffer"
    ):
        AlignedRingBuffer(100, 3).push(experience)


def test_missing_rows_of_an_environment_are_refused():
    experience = Stream(3).unroll(4)
    experience.time_step.step_type[3:, 0] = PAD
    with pytest.raises(UsageError, match="but some rows are missing"):
        AlignedRingBuffer(100, 3).push(experience)


@pytest.mark.parametrize("order", [slice(None), slice(None, None, -1)])
def test_states_of_the_other_class_are_refused(order):
    saved, other = [aligned_ring(12), RingBuffer(36, 3)][order]
    experience = Stream(3).unroll(4)
    saved.push(experience if saved.knows_starts is False else in_line(experience).experience)
    with pytest.raises(UsageError, match="the saved replay is an? (Aligned)?RingBuffer"):
        other.load_state_dict(saved.state_dict())


def test_a_restored_stream_has_the_newest_rows_and_ends_episodes_whose_last_row_is_lost():
    stream = Stream(2, 0.6)
    aligned = AlignedRingBuffer(2 * 16, 2)
    for _ in range(5):
        aligned.push(stream.unroll(4))
    restored = AlignedRingBuffer(2 * 16, 2, end_fraction=1.0)
    restored.load_state_dict(copy.deepcopy(aligned.state_dict()))
    for column in range(2):
        found, expected = restored.stream(column), aligned.stream(column)
        assert_equal_windows(found, expected)
        kinds = found.time_step.step_type[:, 0]
        assert not (kinds == PAD).any() and not ((kinds[:-1] == MID) & (kinds[1:] == FIRST)).any()
        newest = aligned.read(torch.tensor([column]), torch.tensor([[19]])).time_step.observation
        assert newest[0, 0] in found.time_step.observation[-2:, 0]


def test_rows_that_begin_with_an_episode_are_drawn_from_the_first_one():
    """The look-back of a frame stack only matters where earlier rows are missing."""
    aligned = aligned_ring(12, num_ignored=2)
    stream = Stream(3)
    aligned.push(stream.unroll(6))
    assert aligned.start_range(2)[0].tolist() == [0, 0, 0]
    restored = aligned_ring(12, num_ignored=2)
    restored.load_state_dict(copy.deepcopy(aligned.state_dict()))
    restored.push(copy.deepcopy(stream).unroll(4))
    assert restored.start_range(2)[0].tolist() == [0, 0, 0]
    aligned.push(stream.unroll(8))
    assert aligned.start_range(2)[0].tolist() == [4, 4, 4]
    late = aligned_ring(12, num_ignored=2)
    late.push(stream.unroll(4))
    assert late.start_range(2)[0].tolist() == [2, 2, 2]


def test_rows_of_another_number_of_environments_are_refused():
    with pytest.raises(UsageError, match=r"shape \(4, 3\), but the replay is for 2 environments"):
        AlignedRingBuffer(100, 2).push(Stream(3).unroll(4))
