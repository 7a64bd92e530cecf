"""The picture of return against seconds of the processor: what is measured, computed, drawn and kept."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from alfish.configuration import reading
from benchmarks import frontier, learning, tables
from benchmarks.frontier import Costs, Curve
from benchmarks.runs import alfish_costs
from benchmarks.runs.alfish_costs import Reading

pytestmark = pytest.mark.slow

SAC = {"warmup_env_steps": 5000, "start_seconds": 10.0, "warmup_step_seconds": 0.001, "step_seconds": 0.01}
CONFS = ("sac_halfcheetah", "ppo_halfcheetah", "crossq_halfcheetah")


# Costs.


def test_step_seconds_lie_between_readings_and_the_rest_is_start_up():
    warmup = [Reading(1, 12.0), Reading(1001, 14.0)]
    found = alfish_costs.costs(warmup, [Reading(1101, 30.0), Reading(1301, 34.0)])
    assert found == pytest.approx({"start_seconds": 34 - 1001 * 0.002 - 300 * 0.02, "warmup_step_seconds": 0.002,
                                   "step_seconds": 0.02})  # fmt: skip


def test_without_replay_there_is_no_warmup():
    found = alfish_costs.costs([], [Reading(1024, 30.0), Reading(2048, 34.0)])
    assert found["warmup_step_seconds"] == 0.0
    assert found["start_seconds"] == pytest.approx(30 - 4)


def test_readings_begin_after_compilation_and_end_the_run(monkeypatch):
    now, reasons = [0.0], []
    monkeypatch.setattr(alfish_costs, "processor_seconds", lambda: now[0])
    run, costs = SimpleNamespace(stop=reasons.append), alfish_costs.Costs(seconds=2.0)
    for env_steps in range(1, 500):
        now[0] += 1.0 if env_steps < 300 else 0.25
        updates = max(0, env_steps - 100)
        costs.after_iteration(run, SimpleNamespace(env_steps=env_steps, updates=updates, finished=bool(reasons)))
        if len(reasons) > 0:
            break
    assert reasons == ["measured"]
    assert costs.warmup == [Reading(1, 1.0), Reading(100, 100.0)]
    assert costs.training == [Reading(300, 299.25), Reading(308, 301.25)]


@pytest.mark.parametrize(
    ("conf", "expected"), [("sac_halfcheetah", 5000), ("sac_pendulum", 500), ("ppo_halfcheetah", 0)]
)
def test_warm_up_follows_the_conf(conf, expected):
    reading.read([f"{conf}.gin"], [])
    assert alfish_costs.warmup_env_steps() == expected


def test_updates_that_stayed_plain_are_not_published():
    alfish_costs.check_compiled(SimpleNamespace(state_dict=lambda: {"fell_back": False}))
    with pytest.raises(SystemExit, match="could not be compiled"):
        alfish_costs.check_compiled(SimpleNamespace(state_dict=lambda: {"fell_back": True}))


def test_a_conf_is_measured_by_a_short_run(monkeypatch, capsys):
    monkeypatch.setattr(alfish_costs, "SETTINGS", ["Learner.compile = False"])  # compilation has tests of its own
    monkeypatch.setattr(alfish_costs, "WARMUP", 300)
    monkeypatch.setattr("sys.argv", ["alfish_costs", "sac_pendulum", "--seconds=0.1"])
    alfish_costs.main()
    found = alfish_costs.json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["warmup_env_steps"] == 500
    assert 0 < found["warmup_step_seconds"] < found["step_seconds"] < found["start_seconds"]


def test_a_conf_is_measured_with_the_settings_of_its_goal(monkeypatch):
    commands = []
    goals = [learning.Goal("droq_halfcheetah", (0,), 0, False, settings=learning.IN_BFLOAT16)]
    monkeypatch.setattr(learning, "GOALS", goals)
    monkeypatch.setattr(frontier.processes, "run_script", lambda command, _: commands.append(command) or SAC)
    assert frontier.measure("droq_halfcheetah", 5.0)["conf"] == "droq_halfcheetah"
    frontier.measure("sac_halfcheetah", 5.0)
    bfloat16 = ["--gin_param=Learner.compile = True", "--gin_param=Learner.precision = 'bfloat16'"]
    assert [command[3:] for command in commands] == [["droq_halfcheetah", "--seconds=5.0", *bfloat16],
                                                     ["sac_halfcheetah", "--seconds=5.0"]]  # fmt: skip


def test_a_run_begins_with_its_start_and_its_warmup():
    costs = Costs(**SAC)
    assert costs.seconds(np.array([0, 5000, 6000])) == pytest.approx([10, 15, 25])


# Curves.


def write_curve(directory, conf, seeds, num_points=3, scale=2000.0):
    rows = [
        {"seed": seed, "env_steps": 10_000 * (k + 1), "mean": scale * (k + 1) + 10 * seed, "episodes": 20}
        for seed in seeds
        for k in range(num_points)
    ]
    tables.replace_rows(directory / f"{conf}-curve.csv", rows, rows[0], ["seed"])


@pytest.fixture
def results(tmp_path, monkeypatch):
    """Published curves of SAC and PPO, no costs, and a page."""
    monkeypatch.setattr(frontier, "RESULTS", tmp_path)
    monkeypatch.setattr(frontier, "COSTS", tmp_path / "frontier_costs.csv")
    monkeypatch.setattr(frontier, "PICTURE", tmp_path / "frontier.png")
    monkeypatch.setattr(frontier, "PAGE", tmp_path / "results.md")
    for conf in CONFS[:2]:
        write_curve(tmp_path, conf, [0, 1])
    page = "before\n<!-- table of benchmarks.frontier -->\nold\n<!-- end of the table -->\nafter\n"
    (tmp_path / "results.md").write_text(page)
    return tmp_path


@pytest.fixture
def measured(monkeypatch):
    """Confs in the order in which they were measured."""
    confs = []

    def measure(conf, seconds):
        confs.append(conf)
        return {"conf": conf, **SAC, "versions": "v", "machine": "m", "date": "2026-01-01"}

    monkeypatch.setattr(frontier, "measure", measure)
    return confs


def call(monkeypatch, *options):
    monkeypatch.setattr("sys.argv", ["frontier", *options])
    frontier.main()


def test_a_curve_leaves_out_tuning_seeds_and_seeds_that_still_train(results):
    write_curve(results, "td3_halfcheetah", [0, 2], num_points=3)
    write_curve(results, "td3_halfcheetah", [1], num_points=2)
    write_curve(results, "td3_halfcheetah", [100], num_points=3)
    found = frontier.curve("td3_halfcheetah")
    assert found.env_steps.tolist() == [10_000, 20_000, 30_000]
    assert found.returns.tolist() == [[2000, 4000, 6000], [2020, 4020, 6020]]


def test_a_conf_without_evaluations_of_its_seeds_has_no_curve(results):
    assert frontier.curve("redq_halfcheetah") is None
    write_curve(results, "redq_halfcheetah", [100])
    assert frontier.curve("redq_halfcheetah") is None


def test_a_threshold_is_reached_by_the_mean_over_seeds():
    curve = Curve(np.array([1e4, 2e4, 3e4]), np.array([[3000.0, 5000, 6000], [0, 3000, 5000]]))
    assert frontier.first_above(curve, 4000) == 2e4
    assert frontier.first_above(curve, 4001) == 3e4
    assert frontier.first_above(curve, 9999) == math.inf


# The command.


def test_measurements_fill_the_figure_and_the_table(results, measured, monkeypatch, capsys):
    call(monkeypatch)
    assert measured == list(CONFS[:2])
    assert frontier.PICTURE.stat().st_size > 10_000
    before, table, after = frontier.PAGE.read_text().partition("<!-- table of benchmarks.frontier -->\n")[2].partition(
        "<!-- end of the table -->\n")  # fmt: skip
    assert before in capsys.readouterr().out and after == "after\n" and table.startswith("<!-- end")
    sac = before.splitlines()[2]
    assert sac == ("| SAC | `sac_halfcheetah` | 2 | 30,000 | 6,005 [6,000, 6,010] | 10.00 | 265 | 30,000 | 265 |")


def test_what_has_been_measured_is_not_measured_again_unless_asked(results, measured, monkeypatch):
    call(monkeypatch)
    call(monkeypatch)
    assert measured == list(CONFS[:2])
    call(monkeypatch, "--again", "--confs=ppo_halfcheetah")
    assert measured == [*CONFS[:2], "ppo_halfcheetah"]


def test_a_new_curve_is_picked_up(results, measured, monkeypatch):
    call(monkeypatch)
    write_curve(results, "crossq_halfcheetah", [0], scale=1000.0)
    call(monkeypatch)
    assert measured == list(CONFS)
    assert "| CrossQ | `crossq_halfcheetah` | 1 | 30,000 | 3,000 | 10.00 | 265 | not reached |  |" in (
        frontier.PAGE.read_text()
    )


def test_an_interrupted_measurement_keeps_what_it_has(results, measured, monkeypatch):
    whole = frontier.measure

    def interrupted(conf, seconds):
        if conf == "ppo_halfcheetah" and len(measured) == 1:
            measured.append("interrupted")
            raise KeyboardInterrupt
        return whole(conf, seconds)

    monkeypatch.setattr(frontier, "measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        call(monkeypatch)
    call(monkeypatch)
    assert measured == ["sac_halfcheetah", "interrupted", "ppo_halfcheetah"]


def test_drawing_names_learners_of_unknown_costs(results, measured, monkeypatch, capsys):
    call(monkeypatch, "--confs=sac_halfcheetah")
    call(monkeypatch, "--draw")
    assert measured == ["sac_halfcheetah"]
    assert "ppo_halfcheetah has no line over CPU time: its costs have not been measured" in capsys.readouterr().err
    assert "| PPO | `ppo_halfcheetah` | 2 | 30,000 | 6,005 [6,000, 6,010] |  |  | 30,000 |  |" in (
        frontier.PAGE.read_text()
    )


def test_a_learner_that_is_not_in_the_picture_is_refused(results, measured, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        call(monkeypatch, "--confs=dqn_cartpole")
    assert "no learner of the picture is called dqn_cartpole" in capsys.readouterr().err and measured == []


def test_learners_differ_in_colour_and_marker():
    assert len({member.color for member in frontier.MEMBERS}) == len(frontier.MEMBERS)
    assert len({member.marker for member in frontier.MEMBERS}) == len(frontier.MEMBERS)


def test_numbers_of_an_axis_are_short():
    assert [frontier.number(x) for x in (50, 2000, 20_000, 500_000, 1_000_000)] == [
        "50",
        "2,000",
        "20 k",
        "500 k",
        "1 M",
    ]


def test_the_page_has_a_place_for_the_table():
    assert frontier.TABLE.search(frontier.PAGE.read_text())
