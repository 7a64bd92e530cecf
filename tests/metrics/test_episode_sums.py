import numpy as np
import pytest
import torch
from far_device import FarDevice

from alfish import host, nest
from alfish.data import StepType
from alfish.metrics import (
    DEFAULT_METRICS,
    AverageDiscountedReturn,
    AverageReturn,
    AverageReward,
    EnvInfo,
    EpisodeMetric,
    Metrics,
    StartDiscountedReturn,
)

FIRST, MID, LAST, PAD = StepType.FIRST, StepType.MID, StepType.LAST, StepType.PAD


def metrics_of(num_envs):
    kinds = [kind() for kind in DEFAULT_METRICS]
    others = [
        AverageReturn(3, "last_three"),
        AverageDiscountedReturn(1.0, name="one"),
        StartDiscountedReturn(0.0, 9, "0"),
    ]
    return Metrics([*kinds, *others], num_envs)


def steps_of(rng, num_steps, num_envs):
    """Random steps: rewards, and whether an episode ends with the step."""
    rewards = rng.normal(size=(num_steps, num_envs)).astype(np.float32)
    return rewards, rng.random((num_steps, num_envs)) < 0.2


def update(metrics, reward, ended):
    """Adds steps as rows, with FIRST rows behind LAST rows."""
    for rewards, ends in zip(reward, ended):
        metrics.update(np.where(ends, LAST, MID)[None].astype(np.int32), rewards[None])
        metrics.update(np.where(ends, FIRST, PAD)[None].astype(np.int32), np.zeros_like(rewards)[None])


def add(metrics, reward, ended, device="cpu"):
    """Adds the same steps as sums."""
    sums, episodes, found = metrics.episode_sums(), metrics.open_episodes(torch.device(device)), []
    reward, ended = torch.from_numpy(reward).to(device), torch.from_numpy(ended).to(device)
    for rewards, ends in zip(reward, ended):
        episodes, finished = sums.step(episodes, rewards, ends)
        found.append(finished)
    numbers = sums.numbers(nest.map(lambda *leaves: torch.stack(leaves), *found), reward)
    metrics.add(sums.sums(host.read(numbers), reward.numel(), episodes))


def assert_same(one, other):
    assert one.results() == pytest.approx(other.results(), rel=1e-9)
    found, expected = one.state_dict(), other.state_dict()
    assert nest.paths(found) == nest.paths(expected)
    for path, a, b in zip(nest.paths(found), nest.leaves(found), nest.leaves(expected)):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9, msg=path)


@pytest.mark.parametrize("is_far", [False, True])
def test_sums_and_rows_give_the_same_results_and_states(is_far):
    rng = np.random.default_rng(0)
    by_sums, by_rows = metrics_of(6), metrics_of(6)
    begun = np.array([[FIRST, FIRST, MID, FIRST, PAD, FIRST]], np.int32)  # the starts of two episodes are missing
    for metrics in (by_sums, by_rows):
        metrics.update(begun, np.zeros((1, 6), np.float32))
    for number in range(6):
        steps = steps_of(rng, 30, 6)
        if number == 3:  # rows may follow sums, and sums may follow rows
            update(by_sums, *steps)
        elif is_far:
            with FarDevice() as far:
                add(by_sums, *steps, far.device)
                by_sums._settle()
        else:
            add(by_sums, *steps)
        update(by_rows, *steps)
        if number in (1, 4):
            assert_same(by_sums, by_rows)
    assert_same(by_sums, by_rows)


def test_sums_continue_from_a_saved_state():
    rng = np.random.default_rng(1)
    whole, before, after = metrics_of(4), metrics_of(4), metrics_of(4)
    steps = [steps_of(rng, 20, 4) for _ in range(2)]
    for metrics in (whole, before):
        metrics.update(np.full((1, 4), FIRST, np.int32), np.zeros((1, 4), np.float32))
        add(metrics, *steps[0])
    after.load_state_dict(before.state_dict())
    for metrics in (whole, after):
        add(metrics, *steps[1])
    assert_same(after, whole)
    assert whole.results()["episodes"] > 10


@pytest.mark.parametrize("is_far", [False, True])
def test_non_finite_values_are_counted_and_finite_ones_kept(is_far):
    metrics = Metrics([AverageReturn(2)], 1)
    metrics.update(np.array([[FIRST]], np.int32), np.zeros((1, 1), np.float32))
    reward, ended = np.array([[1], [2], [np.inf], [np.nan]], np.float32), np.ones((4, 1), bool)
    if is_far:
        with FarDevice() as far:
            add(metrics, reward, ended, far.device)
    else:
        add(metrics, reward, ended)
    assert metrics.results() == {"average_return": 1.5, "average_return/n": 2, "average_return/nonfinite": 2}


class SquaredReturn(AverageReturn):
    def per_step(self, rows):
        return np.square(rows.reward)


class Lengths(EpisodeMetric):
    name = "lengths"

    def per_step(self, rows):
        return rows.arrived.astype(np.float64)


class PositiveRewards(AverageReward):
    def update(self, rows):
        self._window.extend(rows.reward[rows.reward > 0])


@pytest.mark.parametrize("metric", [SquaredReturn, Lengths, PositiveRewards, EnvInfo])
def test_metrics_that_need_rows_get_rows(metric):
    """A subclass of a metric that takes tensors may have overridden a method with one that takes arrays."""
    metric = metric()
    assert Metrics([AverageReturn(name="other"), metric], 2).episode_sums() is None
    assert Metrics([AverageReturn()], 2, objectives=["speed", "energy"]).episode_sums() is None
    assert Metrics([AverageReturn()], 2).episode_sums() is not None
