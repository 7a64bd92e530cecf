"""Relabelled windows, whose goals tell which row they were achieved at."""

import functools
import logging

import gin
import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from test_ring_buffer import LAST, PAD, Columns, reloaded

from alfish import nest, specs
from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.data import AlgStep, Experience, LossInfo, StepType, TimeStep, trainable
from alfish.environments import make_environment
from alfish.environments.bit_flip import BitFlip, bit_flip_reached, bit_flip_reward
from alfish.errors import UsageError
from alfish.learner.batches import ReplayBatches
from alfish.offline import Arrays, Episode, OfflineBuffer, Spaces
from alfish.replay import HindsightReplay, RingBuffer
from alfish.replay.ring_buffer import SequenceIndex
from alfish.transforms import Transforms
from alfish.unrollers import SyncUnroller

FIRST, MID = StepType.FIRST, StepType.MID
WANTED = 200  # the step of a goal that the environment sets, which no episode has
SPEC = {key: spaces.Box(0, 255, (3,), np.float32) for key in ("achieved_goal", "desired_goal", "stamp")}


def reward_of(achieved, goal):
    """Tells its arguments apart, and its rows."""
    return achieved[..., 2].float() - 3 * goal[..., 2].float()


def with_goals(unroll, dtype=torch.float32):
    """(column, episode, step) as the achieved goal, (column, episode, WANTED) as the goal of rows of Stamped."""
    step = unroll.time_step
    achieved = step.observation["stamp"].clone()
    achieved[..., 0] = step.env_id - 10
    achieved = torch.where((step.step_type == PAD).unsqueeze(-1), 0, achieved).to(dtype)
    goal = achieved.clone()
    goal[..., 2] = WANTED
    reward = torch.where(step.step_type == FIRST, 0.0, reward_of(achieved, goal))
    observation = {"achieved_goal": achieved, "desired_goal": goal, "stamp": step.observation["stamp"]}
    return unroll._replace(time_step=step._replace(observation=observation, reward=reward))


def stamped_ring(num_envs=3, length=40, pushes=((20, 20, 20), (20, 7, 13), (4, 9, 9)), dtype=torch.float32, **settings):
    """A ring whose columns have gone round or not, with a long episode under way, and the rows that it was given."""
    columns = Columns(num_envs, truncates=True)
    buffer = RingBuffer(num_envs * length, num_envs, keeps_episodes=True, **settings)
    for counts in pushes:
        buffer.push(with_goals(columns.unroll(list(counts)), dtype))
    return buffer, columns.history


def bound(buffer, **settings):
    hindsight = HindsightReplay(**{"reward_fn": reward_of, **settings})
    hindsight.bind(buffer, SPEC)
    return hindsight


def relabel(hindsight, buffer, start, window_length):
    """The windows that start there, before and after."""
    batch = buffer.windows(start, window_length)
    before = nest.map(torch.clone, batch)
    after = hindsight.relabel(batch, start.column, start.position)
    for one, other in zip(nest.leaves(batch), nest.leaves(before)):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True, msg="what came in was written")
    return before, after


def equal_but(before, after, *changed):
    """All leaves but those whose path ends in one of `changed` are the same, and all have their dtypes and shapes."""
    assert nest.paths(before) == nest.paths(after)
    for path, one, other in zip(nest.paths(before), nest.leaves(before), nest.leaves(after)):
        assert one.dtype == other.dtype and one.shape == other.shape, path
        assert path.endswith(changed) or torch.equal(one, other), path


def episode_of(rows, position, oldest=0):
    """The positions of a row's episode, as far as they are stored."""
    _, _, _, *stamp = rows[position]
    return [p for p in range(oldest, len(rows)) if rows[p][3:5] == tuple(stamp[:2])]


def check_goals(before, after, start, history, length, strategy):
    """Every window has one goal of the right rows, where it has another at all; returns which windows have."""
    step, seen = after.experience.time_step, before.experience.time_step.observation
    goal, achieved = step.observation["desired_goal"], seen["achieved_goal"]
    relabelled = goal[0, :, 2] != WANTED
    for n, (column, position) in enumerate(zip(start.column.tolist(), start.position.tolist())):
        rows = history[column]
        members = episode_of(rows, position, max(0, len(rows) - length))
        within = [position + k in members for k in range(len(goal))]
        at, chosen = goal[:, n, 2], bool(relabelled[n])
        assert torch.equal(goal[..., :2], achieved[..., :2])  # of the same environment and episode
        assert at.tolist() == [float(at[0]) if inside else WANTED for inside in within]
        steps = [rows[p][5] for p in members]
        allowed = {
            "future": [rows[p][5] for p in members if p > position],
            "final": steps[-1:],
            "episode": steps,
        }[strategy]
        assert not chosen or at[0] in allowed
        assert not chosen or members[-1] > position
    rewards = reward_of(achieved[1:], goal[1:])
    within = torch.where(relabelled, goal[1:, :, 2] != WANTED, False)
    assert torch.equal(step.reward[1:], torch.where(within, rewards, before.experience.time_step.reward[1:]))
    assert torch.equal(step.reward[0], before.experience.time_step.reward[0])
    equal_but(before, after, "desired_goal", "reward")
    return relabelled


@pytest.mark.parametrize("strategy", ["future", "final", "episode"])
@pytest.mark.parametrize("window_length", [2, 4, 7])
def test_relabelled_goals_come_from_the_same_episode(strategy, window_length):
    torch.manual_seed(window_length)
    buffer, history = stamped_ring()
    start = buffer.draw(1500, window_length)
    before, after = relabel(bound(buffer, strategy=strategy), buffer, start, window_length)
    chosen = check_goals(before, after, start, history, 40, strategy)
    assert 0.75 < chosen.float().mean() < 0.85
    kinds = before.experience.time_step.step_type
    assert (kinds[1:] == LAST).any() and (window_length == 2 or (kinds[1:] == FIRST).any())
    newest = torch.tensor([len(rows) - 1 for rows in history])[start.column]
    assert (buffer.episode_end(start.column, start.position) == newest).any()


def test_relabelled_goals_are_right_while_the_ring_wraps():
    torch.manual_seed(0)
    rng, columns = np.random.default_rng(0), Columns(3, truncates=True)
    buffer = RingBuffer(3 * 15, 3, keeps_episodes=True)
    for k in range(40):
        buffer.push(with_goals(columns.unroll(rng.integers(1, 10, 3).tolist())))
        if k == 20:
            buffer = reloaded(buffer, RingBuffer(3 * 15, 3, keeps_episodes=True))
        start = buffer.draw(60, 3)
        before, after = relabel(bound(buffer, strategy="episode"), buffer, start, 3)
        check_goals(before, after, start, columns.history, 15, "episode")


def repeated(buffer, column, position, count):
    return SequenceIndex(torch.full((count,), column), torch.full((count,), position))


@pytest.mark.parametrize("strategy", ["future", "episode"])
def test_goals_are_uniform_over_the_rows_that_may_give_them(strategy):
    """Chi-square over the rows of one episode, with a seed: 3 standard deviations above its mean at most."""
    torch.manual_seed(3)
    buffer, history = stamped_ring()
    position = next(p for p, row in enumerate(history[0]) if row[5] == 2 and len(episode_of(history[0], p)) == 9)
    members = episode_of(history[0], position, len(history[0]) - 40)
    assert len(members) == 9
    _, after = relabel(bound(buffer, fraction=1.0, strategy=strategy), buffer, repeated(buffer, 0, position, 6000), 2)
    steps, counts = after.experience.time_step.observation["desired_goal"][0, :, 2].unique(return_counts=True)
    assert steps.tolist() == (list(range(3, 9)) if strategy == "future" else list(range(9)))
    expected, freedom = 6000 / len(steps), len(steps) - 1
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert chi_square < freedom + 3 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("fraction", [0.0, 0.3, 1.0])
def test_each_window_is_relabelled_independently(fraction):
    torch.manual_seed(0)
    buffer, _ = stamped_ring()
    _, after = relabel(bound(buffer, fraction=fraction), buffer, repeated(buffer, 1, 0, 4000), 2)
    tossed = (after.experience.time_step.observation["desired_goal"][0, :, 2] != WANTED).float()
    assert abs(tossed.mean() - fraction) < 0.025
    assert fraction in (0, 1) or abs((tossed[1:] * tossed[:-1]).mean() - fraction**2) < 0.025


def test_a_seed_means_the_same_goals():
    buffer, _ = stamped_ring()
    start, drawn = buffer.draw(100), []
    for _ in range(2):
        torch.manual_seed(9)
        drawn.append(relabel(bound(buffer), buffer, start, 2)[1].experience.time_step.observation["desired_goal"])
    assert torch.equal(*drawn)


def test_a_window_that_starts_at_last_keeps_its_goal():
    """Windows with memory's states do; there is nothing after the row, and the next episode's goals are its own."""
    buffer, history = stamped_ring()
    at = next(p for p, row in enumerate(history[1]) if row[0] == LAST)
    for strategy in ("future", "final", "episode"):
        before, after = relabel(bound(buffer, fraction=1.0, strategy=strategy), buffer, repeated(buffer, 1, at, 50), 4)
        equal_but(before, after)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float64])
def test_goals_keep_their_dtype(dtype):
    torch.manual_seed(0)
    buffer, history = stamped_ring(dtype=dtype)
    start = buffer.draw(200, 3)
    before, after = relabel(bound(buffer), buffer, start, 3)
    goal = after.experience.time_step.observation["desired_goal"]
    assert goal.dtype == dtype and after.experience.time_step.reward.dtype == torch.float32
    check_goals(before, after, start, history, 40, "future")


def test_the_rings_rows_are_not_written():
    buffer, _ = stamped_ring()
    rows = [leaf.clone() for leaf in nest.leaves(buffer.state_dict()["rows"])]
    hindsight = bound(buffer, fraction=1.0, terminated_fn=lambda achieved, goal: (achieved == goal).all(-1))
    for _ in range(3):
        start = buffer.draw(300, 4)
        hindsight.relabel(buffer.windows(start, 4), start.column, start.position)
    # Of a shorter column, some are not written yet, and may be anything.
    found = nest.leaves(buffer.state_dict()["rows"])
    torch.testing.assert_close(rows, found, rtol=0, atol=0, equal_nan=True)


def test_returns_under_another_goal_are_not_known():
    torch.manual_seed(0)
    buffer, _ = stamped_ring(return_gamma=0.9)
    start = buffer.draw(300, 4)
    before, after = relabel(bound(buffer), buffer, start, 4)
    relabelled = after.experience.time_step.observation["desired_goal"][..., 2] != WANTED
    expected = torch.where(relabelled, torch.nan, before.experience.return_to_go)
    torch.testing.assert_close(after.experience.return_to_go, expected, rtol=0, atol=0, equal_nan=True)
    assert not expected.isnan().all()


def ring_of(achieved, wanted, discounts, kinds=None, length=20):
    """One column of rows that achieve these numbers, want that one, and are rewarded 0 for it, else -1."""
    kinds = kinds or [FIRST, *[MID] * (len(achieved) - 2), LAST]
    step_type = torch.tensor(kinds, dtype=torch.int32).unsqueeze(1)
    goals = torch.tensor(achieved, dtype=torch.float32).reshape(-1, 1, 1)
    wanted = torch.full_like(goals, wanted)
    reward = torch.where(step_type == FIRST, 0, sparse(goals[:, 0], wanted[:, 0]).unsqueeze(1))
    discount = torch.tensor(discounts, dtype=torch.float32).unsqueeze(1)
    action = torch.zeros(step_type.shape, dtype=torch.int64)
    observation = {"achieved_goal": goals, "desired_goal": wanted}
    buffer = RingBuffer(length, 1, keeps_episodes=True)
    step = TimeStep(step_type, reward, discount, observation, action, torch.zeros_like(step_type))
    buffer.push(Experience(step, action, None, None))
    return buffer


def reached(achieved, goal):
    return (achieved == goal).all(-1)


def sparse(achieved, goal):
    return reached(achieved, goal).float() - 1


def columns_of(batch):
    """step_type, reward, discount and mask of the first window, as lists."""
    step = batch.experience.time_step
    return [rows[:, 0].tolist() for rows in (step.step_type, step.reward, step.discount, batch.mask)]


def sparse_hindsight(buffer, **settings):
    hindsight = HindsightReplay(**{"reward_fn": sparse, "fraction": 1.0, "strategy": "final", **settings})
    space = spaces.Box(0, 9, (1,), np.float32)
    hindsight.bind(buffer, {"achieved_goal": space, "desired_goal": space})
    return hindsight


def test_a_window_ends_where_its_new_goal_is_reached_first():
    buffer = ring_of([0, 1, 3, 2, 3], 9, [1, 1, 1, 1, 1])
    start = repeated(buffer, 0, 0, 1)
    before, after = relabel(sparse_hindsight(buffer, terminated_fn=reached), buffer, start, 5)
    assert columns_of(before) == [[FIRST, MID, MID, MID, LAST], [0, -1, -1, -1, -1], [1] * 5, [True] * 4]
    assert columns_of(after) == [
        [FIRST, MID, LAST, LAST, LAST],
        [0, -1, 0, -1, 0],
        [1, 1, 0, 1, 0],
        [True, True, False, False],
    ]
    assert torch.equal(after.mask, trainable(after.experience.time_step.step_type))
    _, after = relabel(sparse_hindsight(buffer), buffer, start, 5)
    assert columns_of(after) == [[FIRST, MID, MID, MID, LAST], [0, -1, 0, -1, 0], [1] * 5, [True] * 4]


def test_rows_of_the_episode_after_are_left():
    kinds = [FIRST, MID, LAST, FIRST, MID]
    buffer = ring_of([0, 3, 3, 3, 3], 9, [1, 1, 1, 1, 1], kinds)
    _, after = relabel(sparse_hindsight(buffer, terminated_fn=reached), buffer, repeated(buffer, 0, 0, 1), 5)
    step_type, reward, discount, mask = columns_of(after)
    assert step_type == [FIRST, LAST, LAST, FIRST, MID] and mask == [True, False, False, True]
    assert reward == [0, 0, 0, 0, -1] and discount == [1, 0, 0, 1, 1]
    assert after.experience.time_step.observation["desired_goal"][:, 0, 0].tolist() == [3, 3, 3, 9, 9]


@pytest.mark.parametrize("wanted", [3, 9])
def test_relabelled_goals_change_which_rows_terminate(wanted):
    """The last row reached the old goal (3) and terminated; or it fell (9)."""
    torch.manual_seed(0)
    buffer = ring_of([0, 1, 3], wanted, [1, 1, 0])
    hindsight = sparse_hindsight(buffer, terminated_fn=reached, strategy="episode")
    before, after = relabel(hindsight, buffer, repeated(buffer, 0, 1, 300), 2)
    step = after.experience.time_step
    goal = step.observation["desired_goal"][1, :, 0]
    assert goal.unique().tolist() == [0, 1, 3]
    assert torch.equal(step.discount[1], torch.where(goal == 3, 0.0, 1.0 if wanted == 3 else 0.0))
    equal_but(before, after, "desired_goal", "reward", "discount")


def test_a_row_0_that_is_at_the_goal_trains():
    buffer = ring_of([3, 1, 3], 9, [1, 1, 1])
    _, after = relabel(sparse_hindsight(buffer, terminated_fn=reached), buffer, repeated(buffer, 0, 0, 1), 3)
    assert columns_of(after) == [[FIRST, MID, LAST], [0, -1, 0], [1, 1, 0], [True, True]]


def test_vector_rewards_are_relabelled_as_a_whole():
    buffer = ring_of([0, 1, 2], 9, [1, 1, 1])
    start = repeated(buffer, 0, 0, 2)
    batch = buffer.windows(start, 3)
    step = batch.experience.time_step
    step = step._replace(reward=torch.stack([step.reward, step.reward], -1))
    batch = batch._replace(experience=batch.experience._replace(time_step=step))
    hindsight = sparse_hindsight(buffer, reward_fn=lambda a, g: torch.stack([sparse(a, g), 2 * sparse(a, g)], -1))
    after = hindsight.relabel(batch, start.column, start.position)
    assert after.experience.time_step.reward[:, 0].tolist() == [[0, 0], [-1, -2], [0, 0]]


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "absl"]


@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_a_replaced_reward_gives_one_warning(caplog, fraction):
    torch.manual_seed(0)
    buffer, _ = stamped_ring()
    hindsight = bound(
        buffer, fraction=fraction, reward_fn=lambda a, g: reward_of(a, g) + (a[..., 2] == 2), check_period=1
    )
    start = repeated(buffer, 1, 1, 64)  # steps 1 to 4 of an episode
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            relabel(hindsight, buffer, start, 4)
    (message,) = warnings_of(caplog)
    assert (
        f"returns {2 - 3 * WANTED + 1} where the environment returned {2 - 3 * WANTED}, and differs in 64 of 192"
        in message
    )


def test_the_environments_own_reward_is_not_warned_of(caplog):
    buffer, _ = stamped_ring()
    hindsight = bound(buffer, check_period=1)
    with caplog.at_level(logging.WARNING):
        for window_length in (2, 5):
            relabel(hindsight, buffer, buffer.draw(500, window_length), window_length)
    assert warnings_of(caplog) == []


def test_rewards_are_compared_at_first_and_now_and_then(caplog):
    buffer, _ = stamped_ring()
    seen = []

    def wrong_at_last(achieved, goal):
        seen.append(len(achieved))
        return reward_of(achieved, goal) + (len(seen) > 6)

    hindsight = bound(buffer, reward_fn=wrong_at_last, check_period=4)
    start, compared = buffer.draw(10), []
    with caplog.at_level(logging.WARNING):
        for _ in range(9):
            before = len(seen)
            relabel(hindsight, buffer, start, 2)
            compared.append(len(seen) - before == 2)
            if len(compared) == 5:
                assert warnings_of(caplog) == []
    assert compared == [True, False, False, False, True, False, False, False, True]
    assert len(warnings_of(caplog)) == 1


def test_rewards_that_differ_by_rounding_are_equal(caplog):
    buffer, _ = stamped_ring()
    hindsight = bound(buffer, reward_fn=lambda a, g: reward_of(a, g) * (1 + 5e-6))
    with caplog.at_level(logging.WARNING):
        relabel(hindsight, buffer, buffer.draw(100), 2)
    assert warnings_of(caplog) == []


GOAL = spaces.Box(0, 1, (3,), np.float32)


@pytest.mark.parametrize(
    ("spec", "settings", "words"),
    [
        (GOAL, {}, "a dict observation"),
        ({"achieved_goal": GOAL}, {}, "goal_key is 'desired_goal', which is not a leaf .*achieved_goal: Box"),
        ({"desired_goal": GOAL}, {}, "achieved_key is 'achieved_goal'"),
        ({"desired_goal": GOAL, "achieved_goal": GOAL}, {"goal_key": "goal"}, "goal_key is 'goal'"),
        ({"desired_goal": {"x": GOAL}, "achieved_goal": GOAL}, {}, "goal_key is 'desired_goal', which is not a leaf"),
        ({"desired_goal": GOAL, "achieved_goal": spaces.Box(0, 1, (2,))}, {}, r"achieved_goal is .*\(2,\).*\(3,\)"),
        ({"desired_goal": GOAL, "achieved_goal": spaces.Box(0, 1, (3,), np.uint8)}, {}, "the same shape and dtype"),
    ],
)
def test_observations_without_such_goals_are_refused_by_name(spec, settings, words):
    buffer = RingBuffer(20, 1, keeps_episodes=True)
    with pytest.raises(UsageError, match=words):
        HindsightReplay(reward_of, **settings).bind(buffer, spec)


def test_a_ring_that_keeps_no_episodes_is_refused():
    with pytest.raises(UsageError, match="keeps_episodes = True"):
        HindsightReplay(reward_of).bind(RingBuffer(20, 1), SPEC)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"fraction": 1.2}, "fraction is 1.2"),
        ({"fraction": -0.1}, "fraction is -0.1"),
        ({"strategy": "random"}, "'random'; it must be one of 'future', 'final', 'episode'"),
        ({"check_period": 0}, "check_period is 0"),
    ],
)
def test_settings_out_of_range_are_named(settings, words):
    with pytest.raises(UsageError, match=words):
        HindsightReplay(reward_of, **settings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"reward_fn": lambda a, g: (a == g).float()}, r"reward_fn received two tensors of 30 goals.*\(30, 3\)"),
        ({"reward_fn": lambda a, g: 0.0}, "returned float"),
        ({"terminated_fn": lambda a, g: (a == g).all()}, r"terminated_fn .*returned \(\)"),
    ],
)
def test_goal_functions_must_return_a_value_for_every_row(settings, words):
    buffer, _ = stamped_ring()
    hindsight = bound(buffer, **settings)
    start = buffer.draw(10, 4)
    with pytest.raises(UsageError, match=words):
        hindsight.relabel(buffer.windows(start, 4), start.column, start.position)


def test_recorded_episodes_are_relabelled_too():
    torch.manual_seed(0)
    episodes = []
    for number, length in enumerate((3, 6, 1, 5)):
        achieved = np.array([[0, number, step] for step in range(length + 1)], np.float32)
        goal = achieved * [1, 1, 0] + [0, 0, WANTED]
        observations = {"achieved_goal": achieved, "desired_goal": goal.astype(np.float32), "stamp": achieved}
        rewards = reward_of(torch.from_numpy(achieved[1:]), torch.from_numpy(goal[1:])).numpy()
        ends = np.arange(1, length + 1) == length
        actions = np.zeros(length, np.int64)
        episodes.append(
            Episode(str(number), observations, actions, rewards, ends & (number == 1), ends & (number != 1))
        )
    of = Spaces(spaces.Dict(SPEC), spaces.Discrete(2))
    buffer = OfflineBuffer([Arrays(episodes, of)], num_columns=2, keeps_episodes=True)
    start = buffer.draw(500, 4)
    before, after = relabel(bound(buffer, fraction=1.0), buffer, start, 4)
    step = after.experience.time_step
    achieved, goal = step.observation["achieved_goal"], step.observation["desired_goal"]
    number, at = achieved[0, :, 1], achieved[0, :, 2]
    length = torch.tensor([3, 6, 1, 5])[number.long()]
    wanted = goal[0, :, 2]
    assert (goal[0, :, 1] == number).all() and ((wanted > at) & (wanted <= length)).all()
    # Behind the end of a column LAST repeats, as it was recorded.
    within = (achieved[..., 1] == number) & (at + torch.arange(4)[:, None] <= length)
    assert torch.equal(goal[..., 2], torch.where(within, wanted, WANTED)) and not within.all()
    assert (step.step_type[-2:] == LAST).all(0).any()
    assert torch.equal(step.reward[1:][within[1:]], reward_of(achieved[1:], goal[1:])[within[1:]])
    equal_but(before, after, "desired_goal", "reward")


def test_it_is_configured_by_name():
    gin.parse_config("""
        import alfish.environments.bit_flip
        HindsightReplay.reward_fn = @bit_flip_reward
        HindsightReplay.terminated_fn = @bit_flip_reached
    """)
    replay = HindsightReplay()
    replay.bind(RingBuffer(20, 1, keeps_episodes=True), bit_flip_spec(4))
    assert (replay._reward_fn, replay._terminated_fn) == (bit_flip_reward, bit_flip_reached)


def bit_flip_spec(num_bits):
    return specs.observation_spec(BitFlip(num_bits).observation_space)


def test_windows_of_bit_flip_are_relabelled_by_its_own_functions(caplog):
    """Rows of the environment itself: no reward differs, and a failed episode shows how its end is reached."""
    torch.manual_seed(0)
    env = make_environment(BitFlip, num_envs=2, env_kwargs={"num_bits": 6})
    buffer, rows = RingBuffer(2 * 300, 2, keeps_episodes=True), []
    time_step = env.reset()
    for _ in range(300):
        action = torch.randint(6, (2,))
        rows.append(nest.tensors(Experience(time_step, action, None, None)))
        time_step = env.step(action.numpy())
    buffer.push(nest.stack(rows))
    hindsight = HindsightReplay(bit_flip_reward, terminated_fn=bit_flip_reached, fraction=1.0, check_period=1)
    hindsight.bind(buffer, bit_flip_spec(6))
    start = buffer.draw(1000, 3)
    with caplog.at_level(logging.WARNING):
        before, after = relabel(hindsight, buffer, start, 3)
    assert warnings_of(caplog) == []
    step, mask = after.experience.time_step, after.mask
    arrival = nest.at(step, slice(1, None))
    success = bit_flip_reached(arrival.observation["achieved_goal"], arrival.observation["desired_goal"])
    assert torch.equal((arrival.reward == 0)[mask], success[mask])
    assert torch.equal((arrival.discount == 0)[mask], success[mask])
    assert (arrival.step_type == LAST)[mask & success].all()
    assert (arrival.reward == 0)[mask].float().mean() > 4 * (before.experience.time_step.reward[1:] == 0)[
        mask
    ].float().mean()


# Functions of the environment, by name.


class Reaching(gymnasium.Env):
    """Goals of gymnasium-robotics' convention: float64 inside, rewards of whole batches, Discrete from 5."""

    def __init__(self):
        goal = spaces.Discrete(7, start=5) if self.discrete else spaces.Box(-9, 9, (2,), np.float64)
        self.observation_space = spaces.Dict(observation=goal, achieved_goal=goal, desired_goal=goal)
        self.action_space = spaces.Discrete(2)

    discrete = False

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._step = 0
        return self._observation(), {}

    def step(self, action):
        self._step += 1
        seen = self._observation()
        goals = seen["achieved_goal"], seen["desired_goal"]
        return seen, self.compute_reward(*([goal] for goal in goals), [{}])[0], False, self._step == 5, {}

    def compute_reward(self, achieved_goal, desired_goal, info):
        assert len(info) == len(achieved_goal) and info[0] == {}
        achieved_goal, desired_goal = np.asarray(achieved_goal), np.asarray(desired_goal)
        assert achieved_goal.dtype == desired_goal.dtype == (np.int64 if self.discrete else np.float64)
        if self.discrete:
            assert achieved_goal.min() >= 5
            return achieved_goal * 10.0 + desired_goal
        return -np.linalg.norm(achieved_goal - desired_goal, axis=-1)

    def compute_terminated(self, achieved_goal, desired_goal, info):
        return (np.asarray(achieved_goal) == np.asarray(desired_goal)).all(-1)

    def _observation(self):
        if self.discrete:
            return {"observation": 5 + self._step, "achieved_goal": 5 + self._step, "desired_goal": 11}
        at = np.array([self._step, -self._step], np.float64)
        return {"observation": at, "achieved_goal": at, "desired_goal": np.full(2, 7.0)}


class ReachingNumbers(Reaching):
    discrete = True


class Scalar(Reaching):
    def compute_terminated(self, achieved_goal, desired_goal, info):
        return bool(np.linalg.norm(achieved_goal - desired_goal) < 1)


class OfOnePair(Reaching):
    def compute_reward(self, achieved_goal, desired_goal, info):
        assert len(achieved_goal) == 1, "one pair"
        return super().compute_reward(achieved_goal, desired_goal, info)


class Still(RLAlgorithm):
    on_policy = False

    def rollout_step(self, time_step, state):
        return AlgStep(torch.zeros(len(time_step.step_type), dtype=torch.int64), state)

    def train_step(self, experience, state):
        return AlgStep()

    def calc_loss(self, experience, info):
        return LossInfo(torch.zeros(()))


def named(environment, **settings):
    """Windows of a replay of some rows of the environment, before and after hindsight."""
    hindsight = functools.partial(HindsightReplay, fraction=1.0, **settings)
    batches = ReplayBatches(400, 8, 3, warmup_env_steps=40, hindsight=hindsight)
    transforms = Transforms((), environment.observation_spec, environment.reward_spec)
    algorithm = Still(environment.observation_spec, environment.action_spec, environment.reward_spec)
    batches.bind(algorithm, transforms, 20, environment.num_envs)
    batches.start(environment)
    batches.add(SyncUnroller(environment, algorithm, transforms).unroll(20))
    start = SequenceIndex(torch.arange(2).repeat(9), torch.arange(18) // 2)
    return batches.buffer.windows(start, 3), batches._collected.at(start)


@pytest.mark.parametrize("vectorization", ["sync", "async"])
@pytest.mark.parametrize("make", [Reaching, ReachingNumbers])
def test_rewards_are_read_from_the_environment_by_name(make, vectorization, caplog):
    environment = make_environment(make, num_envs=2, vectorization=vectorization)
    before, after = named(environment)
    environment.close()
    old, new = before.experience.time_step, after.experience.time_step
    moved = (new.observation["desired_goal"] != old.observation["desired_goal"]).flatten(2).any(-1)[1:] if (
        make is Reaching) else new.observation["desired_goal"][1:] != old.observation["desired_goal"][1:]  # fmt: skip
    assert moved.any()
    achieved, goal = (new.observation[key][1:].double() for key in ("achieved_goal", "desired_goal"))
    if make is ReachingNumbers:
        expected = (achieved + 5) * 10 + goal + 5
    else:
        expected = -(achieved - goal).norm(dim=-1)
    assert torch.allclose(new.reward[1:][moved].double(), expected[moved], atol=1e-5)
    assert "differs" not in caplog.text


def test_terminations_are_read_from_the_environment_by_name():
    _, after = named(make_environment(Reaching, num_envs=2), terminated_fn="compute_terminated", strategy="future")
    step = after.experience.time_step
    reached = (step.observation["achieved_goal"] == step.observation["desired_goal"]).all(-1)[1:]
    assert (step.discount[1:][reached] == 0).all() and reached.any()


@pytest.mark.parametrize(
    ("make", "settings", "sentence"),
    [
        (
            functools.partial(gymnasium.make, "CartPole-v1"),
            {},
            "HindsightReplay.reward_fn is 'compute_reward', but the environment has no such method; add "
            "compute_reward(achieved_goal, desired_goal, info), or bind a function of (achieved goals, goals)",
        ),
        (
            Scalar,
            {"terminated_fn": "compute_terminated"},
            "HindsightReplay.terminated_fn: compute_terminated of the environment received 36 rows of goals and "
            "returned shape []; return one value per row, or bind a function of (achieved goals, goals)",
        ),
    ],
)
def test_a_missing_method_of_the_environment_is_reported_in_one_sentence(make, settings, sentence):
    with pytest.raises(UsageError) as error:
        if make is Scalar:
            named(make_environment(make, num_envs=2), **settings)
        else:
            HindsightReplay(**settings).start(make_environment(make))
    assert str(error.value) == sentence


def test_unbatched_reward_functions_are_refused_with_input_shapes():
    words = (
        r"compute_reward, called with goals \[36, 2\] and \[36, 2\] and 36 infos \{\}, raised AssertionError: one pair "
        r"\(.*, in compute_reward\); it must accept one pair or a batch of pairs and return one value per row; "
        "or bind a function of"
    )
    with pytest.raises(UsageError, match=words):
        named(make_environment(OfOnePair, num_envs=2))
