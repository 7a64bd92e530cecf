"""The books of episodes against every row that was ever pushed, with episodes that break off or have no beginning."""

import math

import numpy as np
import pytest
import torch
from test_ring_buffer import reloaded
from toys import Stamped

from alfish import nest
from alfish.data import Experience, StepType, TimeStep
from alfish.errors import UsageError
from alfish.offline import Arrays, Episode, OfflineBuffer, Spaces
from alfish.replay import RingBuffer
from alfish.replay.ring_buffer import SequenceIndex

FIRST, MID, LAST, PAD = StepType.FIRST, StepType.MID, StepType.LAST, StepType.PAD
JUNK = 1e9  # at FIRST, whose reward and discount no return reads


class Columns:
    """Rows of episodes of any kind, and all of them: `history[column][position]` is (kind, reward, discount).

    Columns may begin within an episode, and episodes may break off: then FIRST follows FIRST or MID. Behind a LAST, the
    middle of another episode may follow.
    """

    def __init__(self, num_envs, generator, ends=0.2, breaks=0.1):
        self.history = [[] for _ in range(num_envs)]
        self._generator, self._ends, self._breaks = generator, ends, breaks

    def _next_row(self, column):
        rows, draw = self.history[column], self._generator.random
        begins = 0.7 if not rows else 0.9 if rows[-1][0] == LAST else self._breaks
        if draw() < begins:
            rows.append((FIRST, JUNK, JUNK))
        else:
            kind = LAST if draw() < self._ends else MID
            rows.append((kind, self._generator.normal(), self._generator.choice([0.0, 0.5, 1.0])))
        return rows[-1]

    def unroll(self, counts):
        rows = [[self._next_row(column) for _ in range(count)] for column, count in enumerate(counts)]
        return unroll_of([[*some, *[(PAD, JUNK, JUNK)] * (max(counts) - len(some))] for some in rows])


def unroll_of(columns):
    """An experience of rows (kind, reward, discount), as many in each column."""
    step_type, reward, discount = torch.tensor(columns, dtype=torch.float64).permute(2, 1, 0)
    env_id = torch.arange(len(columns), dtype=torch.int32).expand(step_type.shape)
    action = torch.zeros(step_type.shape, dtype=torch.int64)
    time_step = TimeStep(step_type.int(), reward.float(), discount.float(), reward.float(), action, env_id)
    return Experience(time_step, action, None, None)


def expected_books(rows, oldest, gamma):
    """Position -> (first row that is left, last row, return) of a column's rows, from the definitions."""
    books, start = {}, oldest
    for position in range(oldest, len(rows)):
        if rows[position][0] == FIRST or position and rows[position - 1][0] == LAST:
            start = position
        end = position
        while rows[end][0] != LAST and end + 1 < len(rows) and rows[end + 1][0] != FIRST:
            end += 1
        has_ended = rows[end][0] == LAST or end + 1 < len(rows)
        return_to_go, weight = 0.0, 1.0
        for _, reward, discount in rows[position + 1 : end + 1]:
            return_to_go += weight * reward
            weight *= gamma * discount
        books[position] = start, end, return_to_go if has_ended else math.nan
    return books


def check_books(buffer, history, length, cleared_at, gamma):
    buffer.check_valid()
    for column, rows in enumerate(history):
        oldest = max(len(rows) - length, cleared_at[column])
        books = expected_books(rows, oldest, gamma)
        if not books:
            continue
        where = torch.full((len(books),), column), torch.tensor(list(books))
        start, end, return_to_go = (torch.tensor(part) for part in zip(*books.values()))
        assert torch.equal(buffer.episode_start(*where), start)
        assert torch.equal(buffer.episode_end(*where), end)
        kept = buffer.return_to_go(*where)
        assert kept.dtype == torch.float32
        torch.testing.assert_close(kept, return_to_go.float(), rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize(
    ("num_envs", "length", "ends", "mapped", "gamma"),
    [(1, 9, 0.2, False, 1.0), (3, 14, 0.3, False, 0.9), (4, 20, 0.05, True, 0.9)],
)
def test_the_index_agrees_with_the_rows_after_any_operations(tmp_path, num_envs, length, ends, mapped, gamma):
    """Episodes are about 5 rows long, or 3, or 20; the ring goes round within them, and some are longer than it."""
    rng = np.random.default_rng(num_envs)
    columns, cleared_at, num_made = Columns(num_envs, rng, ends, breaks=ends / 4), [0] * num_envs, 0

    def make():
        nonlocal num_made
        num_made += 1
        directory = tmp_path / str(num_made) if mapped else None
        return RingBuffer(length * num_envs, num_envs, directory=directory, return_gamma=gamma)

    buffer = make()
    for _ in range(80):
        operation = rng.choice(["aligned", "uneven", "reload", "clear"], p=[0.46, 0.43, 0.08, 0.03])
        if operation == "aligned":
            buffer.push(columns.unroll([int(rng.integers(1, length + 1))] * num_envs))
        elif operation == "uneven":
            counts = rng.integers(0, 1 + rng.integers(1, length + 1), num_envs)
            counts[rng.integers(num_envs)] += counts.max() == 0
            if rng.random() < 0.3:  # all columns level again
                sizes = np.array([len(rows) for rows in columns.history])
                counts = np.minimum(sizes.max() - sizes + 1, length)
            buffer.push(columns.unroll(counts.tolist()))
        elif operation == "reload":
            buffer = reloaded(buffer, make())
        else:
            buffer.clear()
            cleared_at = [len(rows) for rows in columns.history]
        check_books(buffer, columns.history, length, cleared_at, gamma)
    assert buffer.num_pushed > 5 * length * num_envs


def ring_of(*rows, length=20, gamma=0.5):
    """A ring of one column that was given these rows, a push a list."""
    buffer = RingBuffer(length, 1, return_gamma=gamma)
    for some in rows:
        buffer.push(unroll_of([some]))
    return buffer


def return_to_go(buffer, *positions):
    return buffer.return_to_go(torch.zeros(len(positions), dtype=torch.int64), torch.tensor(positions)).tolist()


def episode_end(buffer, *positions):
    return buffer.episode_end(torch.zeros(len(positions), dtype=torch.int64), torch.tensor(positions)).tolist()


def test_returns_are_discounted_to_the_end_of_the_episode():
    buffer = ring_of([(FIRST, JUNK, JUNK), (MID, 2, 1), (MID, 3, 1), (LAST, 4, 0)])
    assert return_to_go(buffer, 0, 1, 2, 3) == [4.5, 5.0, 4.0, 0.0]  # 2 + (3 + 4 / 2) / 2


def test_the_return_of_a_truncated_episode_is_of_its_rows():
    buffer = ring_of([(FIRST, 0, 1), (MID, 2, 1), (LAST, 4, 1)])
    assert return_to_go(buffer, 0, 1, 2) == [4.0, 4.0, 0.0]


def test_the_environments_discount_counts_too():
    buffer = ring_of([(FIRST, 0, 1), (MID, 2, 0), (MID, 6, 0.5), (LAST, 4, 0)])
    assert return_to_go(buffer, 0, 1, 2, 3) == [2.0, 7.0, 4.0, 0.0]


def test_the_return_of_an_unfinished_episode_is_nan():
    buffer = ring_of([(FIRST, 0, 1), (MID, 2, 1)], [(MID, 3, 1)])
    assert all(math.isnan(value) for value in return_to_go(buffer, 0, 1, 2)) and episode_end(buffer, 0, 2) == [2, 2]
    buffer.push(unroll_of([[(LAST, 4, 0)]]))
    assert return_to_go(buffer, 0, 1, 2, 3) == [4.5, 5.0, 4.0, 0.0] and episode_end(buffer, 0, 3) == [3, 3]


@pytest.mark.parametrize("pushes", [(4, 2), (6,), (3, 3)], ids=str)
def test_an_episode_that_was_interrupted_ends_with_its_newest_row(pushes):
    rows = [(FIRST, 0, 1), (MID, 2, 1), (MID, 3, 1), (MID, 4, 0.5), (FIRST, JUNK, JUNK), (MID, 8, 1)]
    starts = np.cumsum([0, *pushes])
    buffer = ring_of(*[rows[a:b] for a, b in zip(starts, starts[1:])])
    buffer.check_valid()
    assert return_to_go(buffer, 0, 1, 2, 3) == [4.5, 5.0, 4.0, 0.0]
    assert all(math.isnan(value) for value in return_to_go(buffer, 4, 5))
    assert episode_end(buffer, *range(6)) == [3, 3, 3, 3, 5, 5]


@pytest.mark.parametrize("pushes", [(1, 2), (3,)], ids=str)
def test_an_episode_interrupted_at_once_has_one_row(pushes):
    rows = [(FIRST, 0, 1), (FIRST, JUNK, JUNK), (LAST, 8, 1)]
    starts = np.cumsum([0, *pushes])
    buffer = ring_of(*[rows[a:b] for a, b in zip(starts, starts[1:])])
    assert episode_end(buffer, 0, 1, 2) == [0, 2, 2] and return_to_go(buffer, 0, 1, 2) == [0.0, 8.0, 0.0]


def test_an_episode_longer_than_the_ring_is_partly_known():
    buffer = ring_of([(FIRST, 0, 1), (MID, 9, 1)], [(MID, 1, 1)] * 4, [(MID, 1, 1), (LAST, 2, 0)], length=4)
    column, position = torch.zeros(4, dtype=torch.int64), torch.arange(4, 8)
    assert buffer.episode_start(column, position).tolist() == [4] * 4
    assert episode_end(buffer, *position.tolist()) == [7] * 4
    assert return_to_go(buffer, *position.tolist()) == [2.0, 2.0, 2.0, 0.0]


def test_long_episodes_are_exact_in_float32():
    num_rows, gamma = 5000, 0.999
    buffer = ring_of([(FIRST, 0, 1), *[(MID, 1, 1)] * (num_rows - 2), (LAST, 1, 0)], length=num_rows, gamma=gamma)
    expected = (1 - gamma ** np.arange(num_rows - 1, -1, -1)) / (1 - gamma)
    np.testing.assert_allclose(return_to_go(buffer, *range(num_rows)), expected, rtol=1e-6)


def test_rows_include_their_returns():
    columns = Columns(3, np.random.default_rng(0))
    buffer = RingBuffer(3 * 20, 3, return_gamma=0.9)
    for counts in ([12, 7, 1], [9, 9, 9], [0, 11, 5]):
        buffer.push(columns.unroll(counts))
    start = buffer.draw(200, 4)
    position = start.position + torch.arange(4)[:, None]
    expected = buffer.return_to_go(start.column, position)
    assert expected.shape == (4, 200) and 0 < expected.isnan().sum() < 400
    for read in (buffer.windows(start, 4).experience, buffer.read(start.column, position)):
        torch.testing.assert_close(read.return_to_go, expected, rtol=0, atol=0, equal_nan=True)
    assert buffer.sample(8, 4).experience.return_to_go.shape == (4, 8)


def test_an_index_is_kept_only_on_request():
    rows = Columns(2, np.random.default_rng(0)).unroll([9, 9])
    plain, with_ends = RingBuffer(20, 2), RingBuffer(20, 2, keeps_episodes=True)
    where = torch.tensor([0]), torch.tensor([3])
    for buffer in (plain, with_ends):
        buffer.push(rows)
        assert buffer.sample(4).experience.return_to_go is None
        with pytest.raises(UsageError, match="return_gamma" if buffer.keeps_episodes else "keeps_episodes = True"):
            buffer.return_to_go(*where)
    for ask in (plain.episode_start, plain.episode_end):
        with pytest.raises(UsageError, match="keeps_episodes = True"):
            ask(*where)
    assert (plain.keeps_episodes, with_ends.keeps_episodes) == (False, True)


def test_a_saved_ring_does_not_depend_on_the_index():
    columns, plain = Columns(2, np.random.default_rng(4)), RingBuffer(24, 2)
    for counts in ([9, 5], [8, 8]):
        plain.push(columns.unroll(counts))
    with_books = reloaded(plain, RingBuffer(24, 2, return_gamma=0.9))
    check_books(with_books, columns.history, 12, [0, 0], 0.9)
    one, other = plain.state_dict(), with_books.state_dict()
    assert nest.paths(one) == nest.paths(other)
    assert all(
        torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(nest.leaves(one), nest.leaves(other))
    )
    rows = columns.unroll([7, 9])
    with_books.push(rows)
    check_books(with_books, columns.history, 12, [0, 0], 0.9)


@pytest.mark.parametrize("saved", [[], [[(MID, 3, 1), (LAST, 4, 0)]]], ids=["empty", "headless"])
def test_a_ring_that_loads_another_forgets_its_own_episodes(saved):
    buffer = ring_of([(FIRST, 0, 1), (LAST, 1, 1), (FIRST, 0, 1), (MID, 2, 1)])
    buffer.load_state_dict(ring_of(*saved).state_dict())
    buffer.push(unroll_of([[(MID, 3, 1), (LAST, 4, 0)]]))
    buffer.check_valid()
    assert episode_end(buffer, 0, 1) == [1, 1]
    assert buffer.episode_start(torch.zeros(2, dtype=torch.int64), torch.arange(2)).tolist() == [0, 0]


@pytest.mark.parametrize(("name", "value"), [("_end", 3), ("_start", 9), ("_return_to_go", 0.5)])
def test_check_valid_finds_damage(name, value):
    buffer = ring_of([(FIRST, 0, 1), (MID, 2, 1), (MID, 3, 1)], [(LAST, 4, 0), (FIRST, 0, 1)])
    buffer.check_valid()
    getattr(buffer._episodes, name)[4] = value
    with pytest.raises(AssertionError):
        buffer.check_valid()


@pytest.mark.parametrize("gamma", [-0.1, 1.5])
def test_a_gamma_that_is_not_a_discount_is_refused(gamma):
    with pytest.raises(UsageError, match=f"return_gamma of a replay is {gamma}"):
        RingBuffer(20, 1, return_gamma=gamma)


def test_returns_of_vector_rewards_are_refused_and_ends_are_not():
    rows = Columns(2, np.random.default_rng(0)).unroll([5, 5])
    reward = rows.time_step.reward.unsqueeze(-1).expand(-1, -1, 3)
    rows = rows._replace(time_step=rows.time_step._replace(reward=reward))
    with pytest.raises(UsageError, match="vectors of 3"):
        RingBuffer(20, 2, return_gamma=0.9).push(rows)
    buffer = RingBuffer(20, 2, keeps_episodes=True)
    buffer.push(rows)
    buffer.check_valid()


def offline(**settings):
    """Episodes of 1, 2, 3, 4 rewards 1, 2, ..., the even ones truncated."""
    episodes = []
    for length in (1, 2, 3, 4):
        ends = np.arange(1, length + 1) == length
        observations = np.stack([np.full(length + 1, 7), np.full(length + 1, length), np.arange(length + 1)], 1)
        rewards = np.arange(1, length + 1, dtype=np.float32)
        truncated = ends & (length % 2 == 0)
        actions = np.zeros(length, np.int64)
        episodes.append(
            Episode(str(length), observations.astype(np.float32), actions, rewards, ends & ~truncated, truncated)
        )
    spaces = Spaces(Stamped().observation_space, Stamped().action_space)
    return OfflineBuffer([Arrays(episodes, spaces)], num_columns=3, **settings)


def test_recorded_episodes_have_ends_and_returns():
    buffer = offline(return_gamma=1.0)
    buffer.check_valid()
    for stored in buffer.episodes:
        position = torch.arange(stored.position, stored.position + stored.length + 1)
        column = torch.full_like(position, stored.column)
        assert (buffer.episode_start(column, position) == stored.position).all()
        assert (buffer.episode_end(column, position) == stored.position + stored.length).all()
        total = stored.length * (stored.length + 1) / 2
        earned = torch.arange(stored.length + 1) * (torch.arange(stored.length + 1) + 1) / 2
        assert torch.equal(buffer.return_to_go(column, position), total - earned)


def test_the_return_after_the_end_of_a_recorded_column_is_zero():
    buffer = offline(return_gamma=1.0)
    stored = max(buffer.episodes, key=lambda episode: (episode.column, episode.position))
    start = SequenceIndex(torch.tensor([stored.column]), torch.tensor([stored.position + stored.length - 1]))
    assert buffer.windows(start, 4).experience.return_to_go[:, 0].tolist() == [stored.length, 0, 0, 0]


def test_recorded_data_are_the_same_data_with_returns_and_without():
    offline(return_gamma=0.9).load_state_dict(offline(keeps_episodes=True).state_dict())
    assert offline().sample(4).experience.return_to_go is None and not offline().keeps_episodes
