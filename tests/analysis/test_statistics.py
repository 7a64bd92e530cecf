"""Aggregates by hand, and equal to rliable's own numbers: `rliable.json`, which `make_rliable.py` writes."""

import json
from pathlib import Path

import numpy as np
import pytest

from alfish.analysis import statistics

RLIABLE = json.loads(Path(__file__).with_name("rliable.json").read_text())
AGGREGATES = {
    "iqm": statistics.interquartile_mean,
    "mean": statistics.mean,
    "median": statistics.median,
    "optimality_gap": statistics.optimality_gap,
}


def column(*values):
    return np.array(values, float)[:, None]


def numbers(estimate):
    return [estimate.value, *estimate.interval]


def test_aggregates_of_small_tables_equal_hand_computed_values():
    # Eight scores lose two at each end; five lose one.
    assert statistics.interquartile_mean(column(90, 1, 2, 3, 4, 5, 6, -70)) == (2 + 3 + 4 + 5) / 4
    assert statistics.interquartile_mean(column(9, 1, 2, 3, -7)) == 2
    assert statistics.interquartile_mean(column(3, 5)) == 4
    table = np.array([[1.0, 10.0, 4.0], [3.0, 20.0, 4.0]])  # means 2, 15, 4
    assert statistics.mean(table) == 7 and statistics.median(table) == 4
    assert statistics.optimality_gap(column(0.5, 2.0)) == 0.25 and statistics.optimality_gap(column(3, 9), 5) == 1
    assert statistics.probability_of_improvement(column(1, 2, 3), column(2)) == 0.5
    assert statistics.probability_of_improvement(column(3, 3, 1, 0), column(2, 2)) == 0.5
    assert statistics.probability_of_improvement(column(5, 6), column(1, 5)) == (1 + 0.5 + 1 + 1) / 4


@pytest.mark.parametrize("case", RLIABLE["cases"], ids=lambda case: f"{len(case['scores'])}x{len(case['scores'][0])}")
@pytest.mark.parametrize("name", AGGREGATES)
def test_each_aggregate_and_its_interval_equal_those_of_rliable(name, case):
    estimate = statistics.estimate(np.array(case["scores"]), AGGREGATES[name], RLIABLE["num_draws"])
    expected = [case[name][key] for key in ("point", "low", "high")]
    np.testing.assert_allclose(numbers(estimate), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("pair", RLIABLE["pairs"], ids=("uneven", "one environment", "itself"))
def test_the_probability_of_improvement_and_its_interval_equal_those_of_rliable(pair):
    x, y = np.array(pair["x"]), np.array(pair["y"])
    estimate = statistics.estimate_improvement(x, y, RLIABLE["num_draws"])
    expected = [pair["probability_of_improvement"][key] for key in ("point", "low", "high")]
    np.testing.assert_allclose(numbers(estimate), expected, rtol=0, atol=1e-9)


def test_an_interval_is_the_same_in_parts_of_any_size(monkeypatch):
    scores = np.random.default_rng(0).normal(size=(5, 3))
    curves = np.random.default_rng(1).normal(size=(5, 40))
    whole = statistics.estimate(scores, statistics.median, 500)
    band = statistics.band(curves, statistics.interquartile_mean, 500)
    monkeypatch.setattr(statistics, "CHUNK", 7 * 2500)
    assert statistics.estimate(scores, statistics.median, 500) == whole
    np.testing.assert_array_equal(statistics.band(curves, statistics.interquartile_mean, 500), band)


def test_a_band_has_the_interval_of_the_values_at_each_point():
    curves = np.random.default_rng(0).normal(size=(6, 3)) + [0, 10, 20]
    low, high = statistics.band(curves, statistics.interquartile_mean, 2000)
    for point in range(3):
        one = statistics.estimate(curves[:, point : point + 1], statistics.interquartile_mean, 2000)
        np.testing.assert_allclose([low[point], high[point]], one.interval, atol=1e-12)


def test_one_run_has_no_interval():
    assert statistics.estimate(column(4.0), statistics.mean) == (4.0, None)
    assert statistics.estimate_improvement(column(4.0), column(3.0, 5.0)) == (0.5, None)
