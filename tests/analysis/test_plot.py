"""Groups, curves, and the pictures and sentences of `alfish plot`."""

import re
import sys

import numpy as np
import pytest

import alfish
from alfish.__main__ import main
from alfish.analysis import statistics
from alfish.analysis.curves import aligned, axis_of
from alfish.analysis.grouping import differences, group
from alfish.analysis.series import Series
from alfish.analysis.sources import find
from alfish.errors import UsageError


def labels(words):
    return {(one.environment, one.label): len(one.sources) for one in group(find(words))}


# Groups.


def test_the_legend_shows_differing_bindings_without_the_seed(make_run, tmp_path):
    for seed in range(2):
        make_run(f"a{seed}", seed=seed)
        make_run(f"b{seed}", seed=seed, gamma=0.9)
    assert labels([tmp_path]) == {("CartPole-v1", "PPO.gamma=0.98"): 2, ("CartPole-v1", "PPO.gamma=0.9"): 2}
    assert labels([tmp_path / "a0", tmp_path / "a1"]) == {("CartPole-v1", "PPO"): 2}


def test_run_labels_have_the_algorithm_and_its_differing_settings(make_run, tmp_path):
    make_run("a")
    make_run("b", gamma=0.9)
    make_run("c", algorithm="A2C", gamma=0.5)
    names = ["PPO.gamma=0.98", "PPO.gamma=0.9", "A2C"]
    assert labels([tmp_path]) == {("CartPole-v1", name): 1 for name in names}


def bind(run, *bindings):
    """Adds bindings to the configuration of a run."""
    path = run / "operative_config.gin"
    path.write_text("\n".join([path.read_text(), *bindings, ""]))


def test_settings_that_cannot_change_returns_do_not_form_groups(make_run, tmp_path):
    for seed, gamma in enumerate((0.9, 0.9, 0.98)):
        run = make_run(f"r{seed}", gamma=gamma, seed=seed)
        bind(run, f"Trainer.num_threads = {seed + 1}", f"Trainer.device = 'cuda:{seed}'", "Evaluate.period = 1")
        bind(run, f"CheckpointSaver.period = {seed}", f"Trainer.summary_period = {seed + 1}")
        more = ["@progress/alfish.Progress()", "@EvaluateSampled()"][:seed]
        bind(run, f"Trainer.extra_listeners = [{', '.join(more)}]")
    assert labels([tmp_path]) == {("CartPole-v1", "PPO.gamma=0.9"): 2, ("CartPole-v1", "PPO.gamma=0.98"): 1}


def test_a_listener_that_may_change_a_return_makes_a_group(make_run, tmp_path):
    make_run("plain")
    bind(make_run("stopped"), "Trainer.extra_listeners = [@StopAt()]")
    names = {("CartPole-v1", "PPO"): 1, ("CartPole-v1", "Trainer.extra_listeners=[@StopAt()]"): 1}
    assert labels([tmp_path]) == names


def test_environments_are_separate_and_share_labels(make_run, tmp_path):
    for env_id in ("CartPole-v1", "Acrobot-v1"):
        for gamma in (0.9, 0.98):
            make_run(f"{env_id}-{gamma}", gamma=gamma, env_id=env_id)
    names = ("PPO.gamma=0.9", "PPO.gamma=0.98")
    assert labels([tmp_path]) == {(env_id, name): 1 for env_id in ("Acrobot-v1", "CartPole-v1") for name in names}


def test_a_label_of_the_user_and_tables_stand_beside_configurations(make_run, make_monitor, tmp_path):
    run = make_run("a")
    monitor = make_monitor("0.monitor.csv", [(1, 1, 1)])
    (tmp_path / "peer.csv").write_text("step,value\n1,2\n")
    found = labels([f"ours={run}", monitor, tmp_path / "peer.csv"])
    assert found == {("CartPole-v1", name): 1 for name in ("ours", "stable-baselines3", "peer")}


def test_a_table_without_environment_among_several_is_refused(make_run, tmp_path):
    make_run("a")
    make_run("b", env_id="Acrobot-v1")
    (tmp_path / "peer.csv").write_text("step,value\n1,2\n")
    with pytest.raises(UsageError, match="peer.csv does not state its environment.*CartPole-v1, Acrobot-v1"):
        group(find([tmp_path, tmp_path / "peer.csv"]))


def test_settings_of_uncommon_parts_are_shown_only_if_needed():
    schedules = {"PPO.clip": "@Linear()", "Linear.start": "0.2", "Linear.end": "0.0", "Trainer.seed": "1"}
    plain = {"PPO.clip": "0.2", "Trainer.seed": "2"}
    assert differences([schedules, plain]) == [{"PPO.clip": "@Linear()"}, {"PPO.clip": "0.2"}]
    other = schedules | {"Linear.end": "0.1"}
    assert differences([schedules, other, plain])[1] == {"PPO.clip": "@Linear()", "Linear.end": "0.1"}
    assert differences([plain, plain]) == [{}, {}]


# Curves.


def test_runs_are_compared_at_the_points_that_they_share():
    clocks = [np.array([10, 20, 30]), np.array([10, 20])]
    points, values = aligned(clocks, [np.array([1.0, 2, 3]), np.array([5.0, 6])])
    assert list(points) == [10, 20] and values.tolist() == [[1, 2], [5, 6]]


def test_runs_without_common_points_are_interpolated_where_both_have_values():
    points, values = aligned(
        [np.array([0, 100]), np.array([10, 20, 60])], [np.array([0.0, 1.0]), np.array([1.0, 2, 6])]
    )
    assert points[0] == 10 and points[-1] == 60
    np.testing.assert_allclose(values, [points / 100, points / 10])


def test_runs_that_do_not_overlap_are_refused():
    clocks = [np.array([0, 1000, 2000]), np.array([5000, 6000, 7000])]
    with pytest.raises(UsageError, match="a run ends at 2000 and another begins at 5000"):
        aligned(clocks, [np.arange(3.0), np.arange(3.0)])


def test_few_common_points_do_not_replace_interpolation():
    clocks = [np.array([0, 10, 20, 30, 40]), np.array([0, 7, 17, 27, 37])]
    points, _ = aligned(clocks, [np.arange(5.0), np.arange(5.0)])
    assert points[-1] == 37 and len(points) == 200


def test_the_last_of_two_values_at_one_clock_counts():
    points, values = aligned([np.array([5, 5, 6])], [np.array([1.0, 2.0, 3.0])])
    assert list(points) == [5, 6] and values.tolist() == [[2, 3]]


def test_the_axis_is_env_steps_unless_a_run_has_none():
    online = Series({"env_steps": np.ones(1), "updates": np.ones(1)}, np.ones(1))
    offline = Series({"updates": np.ones(1)}, np.ones(1))
    assert axis_of([online], ["a"]) == "env_steps" and axis_of([online, offline], ["a", "b"]) == "updates"
    with pytest.raises(UsageError, match="b has no env_steps; x='updates'"):
        axis_of([online, offline], ["a", "b"], "env_steps")


# Figures.


def lines(panel):
    return {line.get_label(): line for line in panel.get_lines() if not line.get_label().startswith("_")}


def test_a_figure_has_a_line_a_band_and_a_threshold(make_run, tmp_path):
    returns = [(1.0, 2.0), (3.0, 5.0), (9.0, 20.0)]
    for seed, values in enumerate(returns):
        make_run(f"a{seed}", values, seed=seed)
    figure = alfish.plot(tmp_path, statistic="median", threshold=4)
    (panel,) = figure.axes
    line = lines(panel)["PPO"]
    assert line.get_xydata().tolist() == [[1000, 3], [2000, 5]]
    assert panel.get_title() == "CartPole-v1" and panel.get_xlabel() == "env steps"
    assert [list(other.get_ydata()) for other in panel.get_lines() if other is not line] == [[4, 4]]
    (band,) = panel.collections
    corners = band.get_paths()[0].vertices
    assert corners[:, 1].min() == 1 and corners[:, 1].max() == 20
    mean = lines(alfish.plot(tmp_path, statistic="mean").axes[0])["PPO"]
    np.testing.assert_allclose(mean.get_ydata(), np.mean(returns, 0))


def test_the_line_is_the_interquartile_mean_by_default(make_run, tmp_path):
    values = [(1.0,), (2.0,), (3.0,), (100.0,)]
    for seed, one in enumerate(values):
        make_run(f"a{seed}", one, seed=seed)
    (panel,) = alfish.plot(tmp_path).axes
    assert lines(panel)["PPO"].get_ydata() == statistics.interquartile_mean(np.array(values)) == 2.5


def test_a_single_run_has_no_band_and_a_note(make_run, capsys, tmp_path):
    run = make_run("a")
    assert not alfish.plot(run).axes[0].collections
    assert main(["plot", str(run), f"--output={tmp_path / 'x.png'}"]) == 0
    words = "note: PPO in CartPole-v1 has one run: a line without a band, because a band needs several seeds\n"
    assert capsys.readouterr().err == words
    assert main(["plot", str(run), str(make_run("b", gamma=0.9)), f"--output={tmp_path / 'x.png'}"]) == 0
    assert capsys.readouterr().err.startswith("note: 2 groups have one run each: a line without a band")


def test_each_environment_has_a_panel_and_one_legend_has_all_groups(make_run, tmp_path):
    for env_id in ("CartPole-v1", "Acrobot-v1", "Pendulum-v1", "Hopper-v5"):
        make_run(f"{env_id}-ppo", env_id=env_id)
        make_run(f"{env_id}-a2c", env_id=env_id, algorithm="A2C")
    figure = alfish.plot(tmp_path, threshold=["CartPole-v1:2.5"])
    shown = [panel for panel in figure.axes if panel.get_visible()]
    assert [panel.get_title() for panel in shown] == ["Acrobot-v1", "CartPole-v1", "Hopper-v5", "Pendulum-v1"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["A2C", "PPO"]
    assert [len(panel.get_lines()) for panel in shown] == [2, 3, 2, 2]
    colors = {(panel.get_title(), name): line.get_color() for panel in shown for name, line in lines(panel).items()}
    assert len({(name, color) for (_, name), color in colors.items()}) == len(set(colors.values())) == 2


def test_runs_of_different_environments_in_one_plot_are_refused(make_run, tmp_path):
    from matplotlib.figure import Figure

    one, other = make_run("a"), make_run("b", env_id="Acrobot-v1")
    axes = Figure().subplots()
    assert alfish.plot(one, axes=axes) is axes.figure
    with pytest.raises(UsageError, match="different environments, CartPole-v1, Acrobot-v1, are not drawn in one plot"):
        alfish.plot([one, other], axes=axes)
    with pytest.raises(UsageError, match="say which environment the threshold 475 is for, as in CartPole-v1:475"):
        alfish.plot([one, other], threshold=475)
    with pytest.raises(UsageError, match="belongs to none of the environments of these runs: CartPole-v1"):
        alfish.plot(one, threshold="Acrobot-v1:3")
    with pytest.raises(UsageError, match="threshold 'high' cannot be parsed; write 475"):
        alfish.plot(one, threshold="high")


def test_a_single_run_without_evaluations_is_refused(make_run, capsys, tmp_path):
    make_run("a"), make_run("b", returns=())
    assert main(["plot", str(tmp_path), f"--output={tmp_path / 'x.svg'}"]) == 0
    assert "note: " + str(tmp_path / "b") + " has no evaluation yet" in capsys.readouterr().err
    assert main(["plot", str(tmp_path / "b"), f"--output={tmp_path / 'x.svg'}"]) == 2
    assert "has no evaluation yet" in capsys.readouterr().err


# The command.


def test_the_suffix_selects_the_picture_format(make_run, capsys, tmp_path):
    make_run("a"), make_run("b", seed=1)
    begins = {".png": b"\x89PNG", ".svg": b"<?xml", ".html": b"<!doctype html>"}
    for suffix, begin in begins.items():
        contents = []
        for _ in range(2):
            output = tmp_path / f"curves{suffix}"
            assert main(["plot", f"{tmp_path}/?", f"--output={output}"]) == 0
            assert capsys.readouterr().out == f"written: {output}\n"
            contents.append(output.read_bytes())
        assert contents[0].startswith(begin) and contents[0] == contents[1]


def test_the_page_needs_no_network(make_run, tmp_path):
    make_run("a<b>"), make_run("b", gamma=0.9)
    output = tmp_path / "curves.html"
    assert main(["plot", str(tmp_path), f"--output={output}"]) == 0
    page = output.read_text()
    assert "<svg" in page and "PPO.gamma=0.98" in page and "a&lt;b&gt;" in page
    links = re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?([^"')>\s]*)""", page)
    assert links and all(link.startswith(("#", "data:")) for link in links)
    assert "<script" not in page and "@import" not in page


@pytest.mark.parametrize(
    "output, words",
    [
        ("x.jpg", "must end in .png, .svg or .html"),
        ("", "--output is missing"),
        ("nowhere/x.png", "there is no directory"),
        ("directory.png", "is a directory"),
    ],
)
def test_an_output_that_cannot_be_written_is_refused_before_anything_is_read(tmp_path, capsys, output, words):
    (tmp_path / "directory.png").mkdir()
    assert main(["plot", "no_such_run", f"--output={tmp_path / output if output else ''}"]) == 2
    words_said = capsys.readouterr().err
    assert words in words_said and words_said.count("\n") == 1 and "no_such_run" not in words_said


def test_without_matplotlib_the_command_to_install_it_is_shown(make_run, monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["plot", str(make_run("a")), f"--output={tmp_path / 'x.png'}"]) == 2
    assert "pip install 'alfish[plot]'" in capsys.readouterr().err


def test_values_that_are_not_finite_are_noted_and_not_drawn(make_run, tmp_path, capsys):
    for seed, value in enumerate((2.0, float("nan"), 1e308, float("-inf"))):
        make_run(f"runs/a-{seed}", (1.0, value, 1e308), seed=seed)
    for statistic in ("iqm", "mean", "median"):
        flags = [f"--output={tmp_path / 'x.svg'}", f"--statistic={statistic}"]
        assert main(["plot", str(tmp_path / "runs"), *flags]) == 0
        words = capsys.readouterr().err
        assert (
            f"note: {tmp_path}/runs/a-1: 1 of 3 values are not finite and therefore not drawn\n" in words
            and "a-2:" not in words
        )
    assert main(["report", f"--root_dir={tmp_path / 'runs' / 'a-2'}", f"--output={tmp_path / 'x.html'}"]) == 0
    assert main(["compare", str(tmp_path / "runs")]) == 0


def test_long_labels_are_wrapped_and_fit_into_the_picture(make_run, tmp_path):
    words = " ".join(["setting"] * 30)
    figure = alfish.plot([f"{words} 1={make_run('a')}", f"{words} 2={make_run('b')}"])
    figure.draw_without_rendering()
    (legend,) = figure.legends
    assert [" ".join(text.get_text().split()) for text in legend.get_texts()] == [f"{words} 1", f"{words} 2"]
    box = legend.get_window_extent()
    assert box.x1 <= figure.bbox.x1 and box.y0 >= 0 and box.y1 < figure.axes[0].get_window_extent().y0
