"""Metrics against a plain loop over single steps, and against numbers worked by hand."""

import io
import math

import gin
import numpy as np
import pytest
import torch
from far_device import FarDevice

from alfish.data import StepType
from alfish.errors import UsageError
from alfish.metrics import (
    DEFAULT_METRICS,
    AverageDiscountedReturn,
    AverageEpisodeLength,
    AverageReturn,
    AverageReward,
    EnvInfo,
    EnvironmentSteps,
    EpisodeMetric,
    Metrics,
    NumberOfEpisodes,
    SimulatorLog,
    StartDiscountedReturn,
    StepBatch,
)

FIRST, MID, LAST, PAD = StepType.FIRST, StepType.MID, StepType.LAST, StepType.PAD
GARBAGE = np.array([np.nan, np.inf, -np.inf, 1e30, -7.0], np.float32)


def random_stream(rng, num_rows, num_envs, num_rewards=None):
    """Step types drawn one by one: legal episodes and every break of the grammar. FIRST and PAD rewards are junk."""
    step_type = rng.choice([FIRST, MID, LAST, PAD], (num_rows, num_envs), p=[0.1, 0.65, 0.1, 0.15]).astype(np.int32)
    shape = (num_rows, num_envs) if num_rewards is None else (num_rows, num_envs, num_rewards)
    reward = rng.normal(size=shape).astype(np.float32)
    junk = (step_type == FIRST) | (step_type == PAD)
    reward[junk] = rng.choice(GARBAGE, reward[junk].shape)
    return step_type, reward


def random_splits(rng, num_rows, num_splits):
    cuts = np.sort(rng.integers(0, num_rows + 1, num_splits))
    return [slice(start, end) for start, end in zip([0, *cuts], [*cuts, num_rows], strict=True)]


def finished_episodes(step_type, reward):
    """Rewards of each episode that was seen from FIRST to LAST, in the order of ending; one step at a time."""
    num_rows, num_envs = step_type.shape
    running = [None] * num_envs
    finished = []
    for t in range(num_rows):
        for b in range(num_envs):
            if step_type[t, b] == FIRST:
                running[b] = []
            elif step_type[t, b] in (MID, LAST):
                if running[b] is not None:
                    running[b].append(float(np.sum(np.float64(reward[t, b]))))
                if step_type[t, b] == LAST:
                    if running[b] is not None:
                        finished.append(running[b])
                    running[b] = None
    return finished


def discounted_returns(rewards, gamma):
    """G_t for each step t of an episode."""
    returns = []
    for start in range(len(rewards)):
        returns.append(sum(gamma ** (k - start) * rewards[k] for k in range(start, len(rewards))))
    return returns


def expected_results(step_type, reward, gamma, window, reward_window):
    episodes = finished_episodes(step_type, reward)
    steps = [
        float(np.sum(np.float64(reward[t, b])))
        for t in range(step_type.shape[0])
        for b in range(step_type.shape[1])
        if step_type[t, b] in (MID, LAST)
    ]
    results = {"episodes": len(episodes), "environment_steps": len(steps)}

    def mean(name, values):
        if values:
            results[name] = math.fsum(values) / len(values)
            results[f"{name}/n"] = len(values)

    mean("average_reward", steps[-reward_window:])
    mean("average_return", [sum(rewards) for rewards in episodes][-window:])
    mean("average_episode_length", [len(rewards) for rewards in episodes][-window:])
    returns = [discounted_returns(rewards, gamma) for rewards in episodes][-window:]
    mean("average_discounted_return", [sum(g) / len(g) for g in returns])
    mean("start_discounted_return", [g[0] for g in returns])
    return results


def all_metrics(gamma=0.9, window=7, reward_window=50):
    return [
        NumberOfEpisodes(),
        EnvironmentSteps(),
        AverageReturn(window),
        AverageEpisodeLength(window),
        AverageReward(reward_window),
        AverageDiscountedReturn(gamma, window),
        StartDiscountedReturn(gamma, window),
    ]


def fed(metrics, num_envs, step_type, reward, **kwargs):
    container = Metrics(metrics, num_envs, **kwargs)
    container.update(step_type, reward)
    return container


def column(*steps):
    """`[T, 1]` step types and rewards from (step type, reward) pairs."""
    step_type, reward = zip(*steps, strict=True)
    return np.array(step_type, np.int32)[:, None], np.array(reward, np.float32)[:, None]


def alf_fixture():
    """ALF's metrics_test.py: two environments, two episodes each."""
    step_type = np.repeat(np.array([FIRST, MID, LAST, FIRST, MID, LAST], np.int32)[:, None], 2, axis=1)
    reward = np.array([[0, 0], [1, 2], [3, 4], [0, 0], [5, 6], [7, 8]], np.float32)
    infos = [
        {"x": np.array([1, 0]), "y": np.array([1, 1])},
        {"x": np.array([1, 2]), "y": np.array([0, 3])},
        {"x": np.array([-1, -2]), "y": np.array([1, -1])},
        {"x": np.array([1, 1]), "y": np.array([1, 1])},
        {"x": np.array([2, -2]), "y": np.array([-1, -6])},
        {"x": np.array([10, 10]), "y": np.array([5, 5])},
    ]
    return step_type, reward, list(enumerate(infos))


# Arithmetic


def test_alf_golden_numbers():
    step_type, reward, infos = alf_fixture()
    metrics = Metrics([*(metric() for metric in DEFAULT_METRICS), EnvInfo(when="sum")], 2)
    metrics.update(step_type, reward, infos)
    results = metrics.results()
    assert results.pop("average_discounted_return") == pytest.approx(7.2225, abs=1e-12)
    assert results.pop("start_discounted_return") == pytest.approx(8.945, abs=1e-12)
    assert results == {
        "episodes": 4,
        "environment_steps": 8,
        "average_return": 9,
        "average_return/n": 4,
        "average_episode_length": 2,
        "average_episode_length/n": 4,
        "average_reward": 4.5,
        "average_reward/n": 8,
        "average_discounted_return/n": 4,
        "start_discounted_return/n": 4,
        "env_info/x": 5,
        "env_info/x/n": 4,
        "env_info/y": 1.5,
        "env_info/y/n": 4,
    }


@pytest.mark.parametrize(
    ("gamma", "average", "start"),
    [
        (0.0, (1 + 2 + 4) / 3, 1),
        (0.5, ((1 + 1 + 1) + (2 + 2) + 4) / 3, 1 + 1 + 1),
        (1.0, (7 + 6 + 4) / 3, 7),
    ],
)
def test_discounted_returns_of_one_episode_at_any_gamma(gamma, average, start):
    rows = column((FIRST, 100), (MID, 1), (MID, 2), (LAST, 4))
    results = fed([AverageDiscountedReturn(gamma), StartDiscountedReturn(gamma)], 1, *rows).results()
    assert results["average_discounted_return"] == pytest.approx(average, rel=1e-15)
    assert results["start_discounted_return"] == pytest.approx(start, rel=1e-15)


def test_index_counts_arrivals_since_first_and_continues_from_the_rows_before():
    step_type = np.array([[FIRST, MID, PAD], [MID, LAST, MID], [PAD, FIRST, LAST], [MID, MID, MID]], np.int32)
    rows = StepBatch(step_type, np.zeros((4, 3), np.float32), open_length=np.array([-1, 5, -1]))
    assert rows.index.tolist() == [[-1, 5, -1], [0, 6, -1], [-1, -1, -1], [1, 0, -1]]
    assert rows.next_open_length.tolist() == [2, 1, -1]
    assert rows.lengths.tolist() == [7]


def test_episode_sums_cover_ended_and_open_episodes():
    step_type = np.array([[MID, MID, FIRST], [LAST, LAST, MID], [FIRST, MID, LAST], [MID, MID, PAD]], np.int32)
    rows = StepBatch(step_type, np.zeros((4, 3), np.float32), open_length=np.array([3, -1, 0]))
    per_step = np.arange(12, dtype=np.float64).reshape(4, 3)
    ended, under_way = rows.episode_sums(per_step, np.array([100.0, 0.0, 300.0]))
    assert ended.tolist() == [100 + 0 + 3, 5 + 8]
    assert under_way.tolist() == [9, 0, 0]


def test_rewards_are_zero_where_no_step_arrives():
    rows = StepBatch(*column((FIRST, np.nan), (MID, 1), (PAD, np.inf), (LAST, 2)))
    assert rows.reward.tolist() == [[0], [1], [0], [2]]


# Streams


@pytest.mark.parametrize(("num_rewards", "gamma", "seed"), [(None, 0.0, 0), (3, 0.9, 1), (None, 0.9, 2), (3, 1.0, 3)])
def test_results_equal_a_plain_loop_over_steps(seed, gamma, num_rewards):
    rng = np.random.default_rng(seed)
    step_type, reward = random_stream(rng, 300, 5, num_rewards)
    metrics = Metrics(all_metrics(gamma), 5, flush_rows=int(rng.integers(1, 60)))
    for rows in random_splits(rng, 300, 40):
        metrics.update(step_type[rows], reward[rows])
        if rng.random() < 0.2:
            seen = slice(0, rows.stop)
            expected = expected_results(step_type[seen], reward[seen], gamma, 7, 50)
            assert metrics.results() == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert metrics.results() == pytest.approx(expected_results(step_type, reward, gamma, 7, 50), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_results_are_bit_equal_however_updates_split(seed):
    rng = np.random.default_rng(seed)
    step_type, reward = random_stream(rng, 400, 3)
    whole = fed(all_metrics(), 3, step_type, reward, flush_rows=1).results()
    for flush_rows in (1, 7, 256):
        metrics = Metrics(all_metrics(), 3, flush_rows)
        for rows in random_splits(rng, 400, 60):
            metrics.update(step_type[rows], reward[rows])
        assert metrics.results() == whole


def test_episode_sums_are_bit_equal_to_float64_addition_in_time():
    rng = np.random.default_rng(0)
    rewards = (10.0 ** rng.uniform(-6, 6, 5000)).astype(np.float32)
    rows = column((FIRST, 0), *[(MID, reward) for reward in rewards[:-1]], (LAST, rewards[-1]))
    total = 0.0
    for reward in rewards:
        total += float(reward)
    assert fed([AverageReturn()], 1, *rows).results()["average_return"] == total


def test_first_and_pad_rewards_are_ignored():
    clean = column((FIRST, 0), (MID, 1), (PAD, 0), (LAST, 2), (PAD, 0), (FIRST, 0), (LAST, 3))
    junk = column((FIRST, np.nan), (MID, 1), (PAD, np.inf), (LAST, 2), (PAD, 1e9), (FIRST, -np.inf), (LAST, 3))
    assert fed(all_metrics(), 1, *junk).results() == fed(all_metrics(), 1, *clean).results()
    assert fed(all_metrics(), 1, *clean).results()["average_return"] == 3


def test_headless_episode_adds_steps_and_rewards_but_no_episode():
    headless = column((MID, 10), (LAST, 10))
    results = fed(all_metrics(), 1, *headless).results()
    assert results == {"episodes": 0, "environment_steps": 2, "average_reward": 10, "average_reward/n": 2}
    after = column((MID, 10), (LAST, 10), (MID, 10), (FIRST, 0), (MID, 1), (LAST, 2))
    assert fed(all_metrics(), 1, *after).results()["average_return"] == 3


def test_a_first_row_in_mid_episode_drops_the_unfinished_episode():
    rows = column((FIRST, 0), (MID, 10), (FIRST, 0), (MID, 1), (LAST, 2))
    results = fed(all_metrics(), 1, *rows).results()
    assert (results["average_return"], results["average_episode_length"], results["episodes"]) == (3, 2, 1)
    assert results["environment_steps"] == 3


def test_non_finite_episodes_are_counted_and_poison_no_other():
    rows = column(
        *[(FIRST, 0), (MID, np.nan), (LAST, 1)],
        *[(FIRST, 0), (MID, np.inf), (MID, -np.inf), (LAST, 1)],
        *[(FIRST, 0), (MID, 5), (LAST, 1)],
    )
    results = fed(all_metrics(), 1, *rows).results()
    for name in ("average_return", "average_discounted_return", "start_discounted_return"):
        assert math.isfinite(results[name])
        assert (results[f"{name}/n"], results[f"{name}/nonfinite"]) == (1, 2)
    assert results["average_return"] == 6
    assert results["average_episode_length/n"] == 3
    assert (results["average_reward"], results["average_reward/n"], results["average_reward/nonfinite"]) == (2, 4, 3)


def test_only_non_finite_episodes_report_no_mean():
    results = fed([AverageReturn()], 1, *column((FIRST, 0), (LAST, np.nan))).results()
    assert results == {"average_return/nonfinite": 1}


def test_mean_is_of_the_latest_episodes_only():
    steps = [step for value in range(10) for step in ((FIRST, 0), (LAST, value))]
    results = fed([AverageReturn(window=3)], 1, *column(*steps)).results()
    assert results == {"average_return": 8, "average_return/n": 3}


def test_no_metrics_are_reported_before_the_first_update():
    assert Metrics(all_metrics(), 2).results() == {"episodes": 0, "environment_steps": 0}


def test_a_window_has_the_mean_and_the_variance_of_the_mean():
    metrics = Metrics([AverageReturn(window=3), AverageReward(), NumberOfEpisodes()], 1)
    assert metrics.windows()["average_return"].mean_and_variance() is None
    step_type = np.array([[FIRST], [LAST]] * 5, np.int32)
    for count, expected in ((1, (1.0, math.inf)), (4, (3.0, 1 / 3))):
        rows = slice(0, 2) if count == 1 else slice(2, 2 * count)
        reward = np.repeat(np.arange(1.0, 6.0), 2).astype(np.float32)[:, None]
        metrics.update(step_type[rows], reward[rows])
        windows = metrics.windows()
        assert set(windows) == {"average_return", "average_reward"}
        assert windows["average_return"].mean_and_variance() == pytest.approx(expected)
    assert metrics.results()["average_return"] == 3.0


def test_vector_rewards_are_summed_for_a_single_row():
    step_type = np.array([[FIRST, FIRST], [LAST, LAST]], np.int32)
    reward = np.array([[[9, 9], [9, 9]], [[1, 2], [3, 4]]], np.float32)
    assert fed([AverageReturn()], 2, step_type, reward).results() == {"average_return": 5, "average_return/n": 2}


def test_a_custom_metric_has_a_name_and_a_contribution():
    class SquaredReward(EpisodeMetric):
        name = "squared_reward"

        def per_step(self, rows):
            return rows.reward**2

        def finish(self, total, length):
            return np.sqrt(total / length)

    results = fed([SquaredReward()], 1, *column((FIRST, 9), (MID, 1), (LAST, 7))).results()
    assert results == {"squared_reward": 5, "squared_reward/n": 1}


# The container


def test_the_callers_buffers_may_be_reused():
    step_type, reward, infos = alf_fixture()
    metrics = Metrics([AverageReturn(), EnvInfo(when="sum")], 2)
    step_buffer, reward_buffer = torch.zeros(1, 2, dtype=torch.int32), torch.zeros(1, 2)
    info_buffer = {"x": np.zeros(2), "nested": {"y": torch.zeros(2)}}
    for t, info in infos:
        step_buffer.copy_(torch.from_numpy(step_type[t]))
        reward_buffer.copy_(torch.from_numpy(reward[t]))
        info_buffer["x"][:] = info["x"]
        info_buffer["nested"]["y"].copy_(torch.from_numpy(info["y"]))
        metrics.update(step_buffer, reward_buffer, [(0, info_buffer)])
    results = metrics.results()
    assert (results["average_return"], results["env_info/x"], results["env_info/nested.y"]) == (9, 5, 1.5)


@pytest.mark.parametrize("seed", range(4))
def test_a_state_round_trip_in_mid_episode_is_bit_identical(seed):
    rng = np.random.default_rng(seed)
    step_type, reward = random_stream(rng, 200, 3)
    infos = [(t, {"x": rng.normal(size=3), "_x": rng.random(3) < 0.7}) for t in range(200)]

    def new():
        info_metrics = [EnvInfo(when=when, name=when) for when in ("episode_end", "step", "sum")]
        return Metrics([*all_metrics(), *info_metrics], 3)

    def feed(metrics, start, end):
        rows = slice(start, end)
        metrics.update(step_type[rows], reward[rows], [(t - start, info) for t, info in infos[rows]])

    whole, before, after = new(), new(), new()
    feed(whole, 0, 200)
    feed(before, 0, 90)
    file = io.BytesIO()
    torch.save(before.state_dict(), file)
    feed(before, 90, 150)  # what was saved is a copy
    file.seek(0)
    after.load_state_dict(torch.load(file, weights_only=True))
    feed(after, 90, 200)
    assert after.results() == whole.results()


def test_state_of_fresh_metrics_loads():
    metrics = Metrics([*all_metrics(), EnvInfo()], 2)
    metrics.load_state_dict(Metrics([*all_metrics(), EnvInfo()], 2).state_dict())
    assert metrics.results() == {"episodes": 0, "environment_steps": 0}


def test_loading_discards_the_rows_seen_so_far():
    rows = column((FIRST, 0), (MID, 1), (LAST, 2))
    used = fed(all_metrics(), 1, *rows)
    used.load_state_dict(Metrics(all_metrics(), 1).state_dict())
    assert used.results() == {"episodes": 0, "environment_steps": 0}


def test_a_state_of_another_number_of_environments_is_refused():
    with pytest.raises(UsageError, match="2 environments"):
        Metrics(all_metrics(), 3).load_state_dict(Metrics(all_metrics(), 2).state_dict())


def test_a_metric_added_in_mid_episode_ignores_that_episode():
    before = fed([NumberOfEpisodes()], 1, *column((FIRST, 0), (MID, 1)))
    after = Metrics([NumberOfEpisodes(), AverageReturn()], 1)
    after.load_state_dict(before.state_dict())
    after.update(*column((LAST, 2), (FIRST, 0), (LAST, 5)))
    assert after.results() == {"episodes": 1, "average_return": 5, "average_return/n": 1}


def test_two_metrics_of_one_name_are_refused():
    with pytest.raises(UsageError, match="'average_return'"):
        Metrics([AverageReturn(), AverageReturn(window=5)], 1)
    Metrics([AverageReturn(), AverageReturn(window=5, name="recent_return")], 1)


def test_rows_of_other_shapes_are_refused():
    metrics = Metrics(all_metrics(), 2)
    with pytest.raises(ValueError, match="Expected"):
        metrics.update(np.zeros((1, 3), np.int32), np.zeros((1, 3), np.float32))
    with pytest.raises(ValueError, match="Expected"):
        metrics.update(np.zeros((2, 2), np.int32), np.zeros((1, 2), np.float32))


def test_gin_binds_every_metric():
    gin.clear_config()
    try:
        gin.parse_config("""
            AverageReturn.window = 2
            StartDiscountedReturn.gamma = 0.5
            alfish.metrics.AverageReward.window = 3
            EnvInfo.when = 'sum'
            EnvInfo.include = ('x',)
        """)
        steps = [step for value in range(5) for step in ((FIRST, 0), (MID, value), (LAST, value))]
        results = fed(
            [AverageReturn(), StartDiscountedReturn(), AverageReward(), EnvInfo()], 1, *column(*steps)
        ).results()
    finally:
        gin.clear_config()
    assert results["average_return/n"] == 2
    assert results["start_discounted_return"] == 3
    assert results["average_reward"] == pytest.approx(11 / 3)


@pytest.mark.parametrize("make", [lambda: AverageReturn(window=0), lambda: AverageDiscountedReturn(gamma=1.5)])
def test_settings_out_of_range_are_refused(make):
    with pytest.raises(UsageError):
        make()


def test_a_metric_needs_no_base_class():
    class Duck:
        name = "duck"

        def update(self, rows):
            pass

        def result(self):
            return {"duck": 1.0}

        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            pass

    assert not Metrics([Duck()], 1).reads_infos
    del Duck.load_state_dict
    with pytest.raises(UsageError, match="Duck is not a metric; it has no load_state_dict"):
        Metrics([Duck()], 1)


def test_a_result_may_have_numbers_of_numpy_and_torch():
    class Own(AverageReturn):
        def result(self):
            return {"a": np.float32(0.5), "b": torch.tensor(2)}

    assert Metrics([Own()], 1).results() == {"a": 0.5, "b": 2.0}


def logged(device="cpu"):
    """Infos of three steps, of which the second has no log, as simulators return them."""
    level = [{"/level": torch.tensor(number).to(device), "Episode_Reward/track": number} for number in (1.0, 4.0)]
    others = {"note": "text", "each": torch.zeros(2).to(device), "nested": {"x": 1.0}, "none": None}
    return [(0, {**level[0], **others}), (2, level[1])]


def test_simulator_logs_are_averaged_over_logged_steps():
    metrics = Metrics([SimulatorLog(), SimulatorLog(window=1, name="last")], 2)
    for _ in range(2):
        metrics.update(np.full((3, 2), MID), np.zeros((3, 2)), logged())
    names = ("Episode_Reward/track", "level")
    expected = {f"simulator/{name}": 2.5 for name in names} | {f"simulator/{name}/n": 4 for name in names}
    expected |= {f"last/{name}": 4 for name in names} | {f"last/{name}/n": 1 for name in names}
    assert metrics.results() == expected
    other = Metrics([SimulatorLog(), SimulatorLog(window=1, name="last")], 2)
    other.load_state_dict(metrics.state_dict())
    assert other.results() == expected


def test_infos_of_a_device_are_read_once():
    with FarDevice() as far:
        metrics = Metrics([SimulatorLog(), EnvInfo(when="step")], 2)
        for _ in range(5):
            infos = logged(far.device)
            metrics.update(np.full((3, 2), MID), np.zeros((3, 2)), infos)
            infos[0][1]["/level"].zero_()  # the environment may write to its own
        assert far.waits == []
        assert metrics.results()["simulator/level"] == 2.5
        assert len(far.waits) == 1
