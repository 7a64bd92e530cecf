"""The tree against what it stands for: one array of weights, and its running sum."""

import numpy as np
import pytest

from alfish.replay.sum_tree import FAN_OUT, MAX_TOP_SIZE, SumTree

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
    drawn = np.concatenate([tree.find(rng.random(10 * size)) for _ in range(100)])
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
