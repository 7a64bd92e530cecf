"""`alfish compare`: scores, the way to a threshold, environments together, and the forms of the table."""

import csv
import io

import numpy as np
import pytest

from alfish.__main__ import main
from alfish.analysis import statistics, tables
from alfish.analysis.comparison import ALL, compare
from alfish.analysis.sources import find
from alfish.errors import UsageError


@pytest.fixture(autouse=True)
def few_draws(monkeypatch):
    """Bootstraps draw less often; test_statistics.py has the intervals."""
    for function in (statistics.estimate, statistics.estimate_improvement):
        monkeypatch.setattr(function, "__defaults__", (500, 0))


@pytest.fixture
def compared():
    """Compares the runs of some words; notes are in `compared.notes`."""

    def compared(*words, metric="evaluation/mean_return", **options):
        compared.notes = []
        return compare(find(words), metric, compared.notes.append, **options)

    return compared


@pytest.fixture
def two_groups(make_run, tmp_path):
    for seed in range(3):
        make_run(f"good-{seed}", (10.0 * seed, 100.0, 200.0 + 10 * seed), seed=seed)
        make_run(f"poor-{seed}", (1.0, 2.0, 205.0 - 100 * seed), seed=seed, gamma=0.9)
    return tmp_path


def test_a_score_is_the_mean_of_the_last_values_of_a_run(two_groups, compared):
    good, poor = compared(two_groups).rows
    assert good.label == "PPO.gamma=0.98" and good.num_runs == 3 and good.environment == "CartPole-v1"
    assert good.scores.tolist() == [[200], [210], [220]] and poor.scores.tolist() == [[205], [105], [5]]
    assert good.mean == statistics.estimate(good.scores, statistics.mean)
    assert compared(two_groups, last=2).rows[0].scores.tolist() == [[150], [155], [160]]


def test_time_to_a_threshold_is_the_median_over_runs(two_groups, compared):
    good, poor = compared(two_groups, thresholds=["100"]).rows
    assert good.way == (2000, pytest.approx(1.1), 3)  # seconds 1.0, 1.1 and 1.2
    assert poor.way == (3000, pytest.approx(1.6), 2)
    assert compared(two_groups, thresholds=[206]).rows[1].way == (np.inf, np.inf, 0)
    assert good.optimality_gap.value == 0 and poor.optimality_gap.value == pytest.approx(95 / 3)
    assert compared(two_groups, thresholds=["100"], ranges=["0,1000"]).rows[0].way.clock == 2000
    assert good.rate == pytest.approx(3000 / 1.6)
    row = compared(two_groups).rows[0]
    assert row.way is None and row.optimality_gap is None


def test_two_groups_have_the_probability_of_improvement(two_groups, compared, make_run):
    good, poor = compared(two_groups).rows
    assert good.improvement == statistics.estimate_improvement(good.scores, poor.scores)
    assert good.improvement.value == pytest.approx(8 / 9) and poor.improvement.value == pytest.approx(1 / 9)
    make_run("third", algorithm="A2C")
    assert all(row.improvement is None for row in compared(two_groups).rows)


def test_environments_are_combined_if_each_has_a_score_range(make_run, compared, tmp_path):
    for env_id, scale in (("CartPole-v1", 1), ("Acrobot-v1", 100)):
        for seed in range(2):
            for gamma in (0.9, 0.98):
                make_run(f"{env_id}-{seed}-{gamma}", (scale * (seed + 50 * gamma),), seed, gamma, env_id=env_id)
    ranges = ["CartPole-v1:0,100", "Acrobot-v1:0,10000"]
    comparison = compared(tmp_path, ranges=ranges)
    together = [row for row in comparison.rows if row.environment == ALL]
    assert len(comparison.rows) == 6 and [row.label for row in together] == ["PPO.gamma=0.9", "PPO.gamma=0.98"]
    np.testing.assert_allclose(together[0].scores, [[0.45, 0.45], [0.46, 0.46]])
    assert together[0].iqm == statistics.estimate(together[0].scores, statistics.interquartile_mean)
    assert together[0].optimality_gap.value == pytest.approx(1 - 0.455) and together[0].improvement.value == 0
    assert len(compared(tmp_path, ranges=ranges[:1]).rows) == 4
    assert "only with a --score_range for each" in compared.notes[-1]
    make_run("more", (5.0,), seed=2, gamma=0.9)
    assert [row.label for row in compared(tmp_path, ranges=ranges).rows if row.environment == ALL] == ["PPO.gamma=0.98"]
    assert "number of runs differs" in compared.notes[-1]


def test_runs_that_end_at_different_steps_are_noted(make_run, compared, tmp_path):
    make_run("a", (1.0, 2.0)), make_run("b", (1.0, 2.0, 3.0), seed=1)
    compared(tmp_path)
    assert compared.notes == [f"{tmp_path / 'a'} has its last value at 2,000 of 3,000 env steps; this value is used"]


def test_an_early_end_is_noted_even_for_the_only_run_of_a_group(make_run, compared, tmp_path):
    make_run("a", (1.0,) * 3), make_run("b", (1.0,) * 3, seed=1), make_run("c", (1.0,) * 6, gamma=0.9)
    make_run("d", (1.0,), env_id="Acrobot-v1")
    compared(tmp_path)
    early = [note for note in compared.notes if "last value" in note]
    assert early == [
        f"{tmp_path / name} has its last value at {clock} of 6,000 env steps; this value is used"
        for name, clock in (("a", "3,000"), ("b", "3,000"))
    ]


def test_a_run_with_nan_score_is_noted_and_never_best(make_run, compared, tmp_path, capsys):
    for seed, value in enumerate((100.0, 200.0, 300.0, float("nan"))):
        make_run(f"a-{seed}", (1.0, value), seed=seed), make_run(f"b-{seed}", (1.0, 5.0), seed=seed, gamma=0.9)
    with_nan, whole = compared(tmp_path, thresholds=["50"]).rows
    for name in ("iqm", "mean", "median", "optimality_gap", "improvement"):
        estimate = getattr(with_nan, name)
        assert np.isnan([estimate.value, *estimate.interval]).all()
    assert whole.iqm.value == 5 and with_nan.way.num_reached == 3
    words = [
        f"{tmp_path / 'a-3'} ends with the score nan, so all results that depend on this run are nan too "
        "(PPO.gamma=0.98 in CartPole-v1)"
    ]
    assert [note for note in compared.notes if "nan" in note] == words
    for form in ("text", "csv"):
        assert main(["compare", str(tmp_path), f"--format={form}"]) == 0
        said = capsys.readouterr()
        assert f"note: {words[0]}\n" in said.err and "nan" in said.out and "250" not in said.out


def test_a_started_run_without_values_is_noted(make_run, compared, tmp_path):
    make_run("a")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "config.gin").write_text("")
    (tmp_path / "b" / "run_id").write_text("7")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "config.gin").write_text("")  # the base of a sweep
    compared(tmp_path)
    (note,) = (note for note in compared.notes if "left out" in note)
    assert note.startswith(f"{tmp_path / 'b'} has no metrics.csv yet")


def test_runs_with_fewer_values_than_are_asked_for_are_noted(make_run, compared, tmp_path):
    make_run("a", (1.0, 2.0)), make_run("b", (1.0, 4.0), seed=1)
    assert compared(tmp_path, last=2).rows[0].mean.value == 2 and compared.notes == []
    compared(tmp_path, last=5)
    assert compared.notes == ["PPO in CartPole-v1: a run has only 2 of the last 5 values; its score is their mean"]


def test_macros_count_as_their_values(make_run, compared, tmp_path):
    for name, seed in (("a", 0), ("b", 1)):
        file = make_run(name, seed=seed) / "operative_config.gin"
        text = file.read_text().replace("'CartPole-v1'", "%task").replace(f"seed = {seed}", "seed = %SEED")
        file.write_text(f"# Macros:\nSEED = {seed}\ntask = %name\nname = 'CartPole-v1'\n{text}")
    (row,) = compared(tmp_path).rows
    assert row.environment == "CartPole-v1" and row.num_runs == 2 and compared.notes == []


def test_runs_of_one_seed_in_a_group_are_noted(make_run, compared, tmp_path, capsys):
    first, again = make_run("a", (1.0,)), make_run("b", (1.0,))
    make_run("c", (1.0,), seed=1), make_run("d", (1.0,), gamma=0.9, seed=0)
    compared(tmp_path)
    words = f"PPO.gamma=0.98 in CartPole-v1: {first} and {again} all have seed 0, but count as 2 seeds"
    assert compared.notes == [words]
    assert main(["plot", str(tmp_path), f"--output={tmp_path / 'x.png'}"]) == 0
    assert f"note: {words}\n" in capsys.readouterr().err


def test_a_run_on_recorded_data_is_measured_in_updates(make_run, compared):
    (row,) = compared(make_run("a", offline=True), thresholds=[2]).rows
    assert row.way.clock == 2000 and row.axis == "updates"


def test_each_environment_is_measured_in_its_unit(make_run, compared, tmp_path):
    make_run("a"), make_run("b", env_id="Pendulum-v1", offline=True)
    found = compared(tmp_path, thresholds=["CartPole-v1:2", "Pendulum-v1:2"])
    assert [(row.axis, row.way.clock) for row in found.rows] == [("env_steps", 2000), ("updates", 2000)]
    header, first, second = tables.for_people(found)
    assert "steps to threshold" in header and "steps/s" in header
    assert first[header.index("steps to threshold")] == "2,000 env steps (1 of 1)"
    assert second[header.index("steps/s")] == "2,000 updates"
    header, *rows = tables.for_programs(found)
    assert "steps_to_threshold" in header and [row[header.index("unit")] for row in rows] == ["env_steps", "updates"]


@pytest.mark.parametrize(
    "options, words",
    [
        ({"thresholds": ["1", "2"]}, "CartPole-v1 has 2 values for its threshold"),
        ({"ranges": ["5"]}, "score range '5' cannot be parsed; write 0,500"),
        ({"ranges": ["5,1"]}, "score range '5,1' cannot be parsed"),
        ({"metric": "nothing"}, "has no metric 'nothing'"),
    ],
)
def test_mistakes_are_named(make_run, compared, options, words):
    with pytest.raises(UsageError, match=words):
        compared(make_run("a"), **options)


def test_tables_for_people_programs_and_pages_have_the_same_numbers(two_groups, capsys):
    words = ["compare", str(two_groups), "--threshold=100"]
    assert main(words) == 0
    header, good, poor, _, *sentences = capsys.readouterr().out.splitlines()
    assert header.split()[:5] == ["environment", "group", "seeds", "IQM", "mean"] and "env steps to threshold" in header
    assert "210 [200, 220]" in good and "2,000 (3 of 3)" in good and "3,000 (2 of 3)" in poor
    assert "PPO.gamma=0.98 is better than PPO.gamma=0.9 with probability 0.8889" in sentences[-1]
    assert main([*words, "--format=markdown"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "|---|---|---|---|---|---|---|---|---|---|" and "| 210 [200, 220] |" in lines[2]
    assert main([*words, "--format=csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["group"] for row in rows] == ["PPO.gamma=0.98", "PPO.gamma=0.9"]
    assert float(rows[0]["iqm"]) == 210 and float(rows[0]["iqm_high"]) == 220 and rows[1]["num_reached"] == "2"
    assert float(rows[0]["improvement"]) == pytest.approx(8 / 9)


def test_unknown_columns_are_left_out(tmp_path, capsys):
    (tmp_path / "peer.csv").write_text("step,value\n1,2.5\n")
    assert main(["compare", str(tmp_path / "peer.csv")]) == 0
    assert capsys.readouterr().out.splitlines()[:2] == [
        "group  seeds  IQM  mean  median",
        "peer   1      2.5  2.5   2.5",
    ]
