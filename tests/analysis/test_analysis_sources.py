"""What is read from run directories, monitors of stable-baselines3 and other tables."""

import shutil

import numpy as np
import pytest

from alfish.analysis.run_source import RunSeriesSource
from alfish.analysis.sources import find
from alfish.errors import UsageError
from alfish.parameters import differences


def one(word):
    (source,) = find([word])
    return source


def rows(series):
    return {name: list(clock) for name, clock in series.clocks.items()}, list(series.values)


def test_evaluations_have_the_clock_at_which_they_were_due(make_run):
    clocks, values = rows(RunSeriesSource(make_run("run", seed=3)).series("evaluation/mean_return"))
    assert values == [1, 2, 3] and clocks["env_steps"] == [1000, 2000, 3000] and clocks["updates"] == [100, 200, 300]
    np.testing.assert_allclose(clocks["wall_seconds"], [0.8, 1.3, 1.8])


def test_training_metrics_have_the_clock_of_their_iteration(make_run):
    clocks, values = rows(RunSeriesSource(make_run("run", seed=3)).series("train/loss"))
    assert values == [13, 8, 10 / 3 + 3] and clocks["env_steps"] == [1030, 2030, 3030]


def test_an_evaluation_column_is_the_mean_over_episodes(make_run):
    source = RunSeriesSource(make_run("run", seed=3))
    for metric, values in {"evaluation/return": [1, 2, 3], "evaluation/length": [7, 7, 7]}.items():
        series = source.series(metric)
        assert list(series.values) == values and list(series.clocks["env_steps"]) == [1000, 2000, 3000]


def test_a_column_that_later_evaluations_have_begins_with_them(make_run):
    directory = make_run("run", seed=3)
    first, *later = sorted((directory / "eval").glob("*.csv"))
    for path in later:
        header, *lines = path.read_text().splitlines()
        path.write_text("\n".join([f"{header},score", *(f"{line},5" for line in lines)]) + "\n")
    values = RunSeriesSource(directory).series("evaluation/score").values
    assert list(values) == [5] * len(later) and len(later) == 2


def test_training_rows_at_an_evaluation_clock_are_not_evaluations(make_run):
    assert list(RunSeriesSource(make_run("run", seed=0)).series("evaluation/return").values) == [1, 2, 3]


def test_a_run_on_recorded_data_has_updates_and_no_env_steps(make_run):
    clocks, _ = rows(RunSeriesSource(make_run("run", offline=True)).series("evaluation/mean_return"))
    assert set(clocks) == {"updates", "wall_seconds"} and clocks["updates"] == [1000, 2000, 3000]


def test_a_run_logs_its_environment_algorithm_and_seed(make_run):
    source = RunSeriesSource(make_run("run", seed=3, env_id="ALE/Pong-v5"))
    assert source.environment == "ALE/Pong-v5" and source.seed == "3"
    assert source.bindings["Trainer.algorithm"] == "@PPO"
    assert source.bindings["Trainer.listeners"] == "[@Evaluate(), @Summaries()]"


@pytest.mark.parametrize(
    "text, environment",
    [
        ("Trainer.environment = @make_environment\nmake_environment.env_id = 'my.module:Maze-v0'", "Maze-v0"),
        ("Trainer.environment = @a/alfish.make_environment\na/make_environment.env_id = @my.Maze", "Maze"),
        ("Trainer.environment = @my_lab.envs.Columns\nmake_environment.env_id = 'CartPole-v1'", "Columns"),
        ("make_environment.env_id = 'CartPole-v1'", "CartPole-v1"),
        ("Trainer.environment = @a/make_environment\na/make_environment.env_id = @b/my.Maze", "Maze"),
        ("Trainer.environment = @make_games\nmake_games.game = 'mpe2.simple_tag_v3'", "simple_tag_v3"),
        ("Trainer.environment = @a/make_games\na/make_games.game = 'hunt:Hunt'", "Hunt"),
        ("Trainer.environment = @make_games\nmake_games.game = @hunt.Hunt", "Hunt"),
        ("Trainer.seed = 0", None),
    ],
)
def test_the_environment_is_found_wherever_a_configuration_names_it(tmp_path, text, environment):
    (tmp_path / "config.gin").write_text(f"{text}\n")
    assert RunSeriesSource(tmp_path).environment == environment


def test_equal_values_have_one_text():
    texts = ["PPO.gamma = 1\nMLP.layers = [64, 64]\n", "PPO.gamma = 1.0\nMLP.layers = (64, 64.0)\n"]
    assert differences.values(texts[0]) == differences.values(texts[1])
    assert differences.values("PPO.gamma = 0.5\nA.b = '1.0'\nA.c = True\n") == {
        "PPO.gamma": "0.5",
        "A.b": "'1.0'",
        "A.c": "True",
    }
    assert differences.values("A.b = [@x/Y, 1.0]\n") == {"A.b": "[@x/Y, 1.0]"}


def test_modules_are_left_out_of_the_names_of_bindings():
    text = (
        "algorithm/alfish.algorithms.ppo.PPO.gamma = 0.9\nLAYERS = (8,)\n# PPO.gamma = 1\nMLP.layers = \\\n    %LAYERS"
    )
    assert differences.values(text) == {"algorithm/PPO.gamma": "0.9", "MLP.layers": "(8,)"}


def test_macros_are_their_values_outside_of_quotes():
    text = "a = 1\nb = [%a, '%a']\nX.y = (%b, %gin.REQUIRED, %none)\nloop = %loop\nX.z = %loop\n"
    assert differences.values(text) == {"X.y": "([1, '%a'], %gin.REQUIRED, %none)", "X.z": "%loop"}


def test_a_budget_that_is_a_macro_may_change():
    before = "n = 1024\nTrainer.num_env_steps = %n\nPPO.gamma = 0.9\n"
    assert differences.difference(before, before.replace("1024", "2048")) == ""
    assert differences.digest(before) == differences.digest(before.replace("1024", "2048"))
    assert differences.difference(before, before.replace("1024", "2048"), with_budget=True).splitlines() == [
        "-Trainer.num_env_steps = 1024", "+Trainer.num_env_steps = 2048",
    ]  # fmt: skip
    assert differences.difference(before, before.replace("0.9", "%n")) == "-PPO.gamma = 0.9\n+PPO.gamma = 1024"


def test_an_incomplete_last_row_is_left_out_and_noted(make_run):
    directory = make_run("run")
    path = directory / "metrics.csv"
    path.write_bytes(path.read_bytes()[:-4])
    source = RunSeriesSource(directory)
    assert list(source.series("evaluation/mean_return").values) == [1, 2]
    assert source.notes == [f"{path} ends within a row, which is left out"]


def test_monitor_files_of_a_run_are_joined_by_time(make_monitor, tmp_path):
    make_monitor("sb3/0.monitor.csv", [(1.0, 10, 1.0), (3.0, 10, 3.0)])
    make_monitor("sb3/1.monitor.csv", [(2.0, 5, 1.0), (4.0, 5, 3.0)], t_start=101.0)
    source = one(tmp_path / "sb3")
    clocks, values = rows(source.series("evaluation/mean_return"))
    assert clocks == {"env_steps": [10, 15, 25, 30], "wall_seconds": [1, 2, 3, 4]} and values == [1, 1.5, 2, 2.5]
    assert source.environment == "CartPole-v1" and source.label == "stable-baselines3"
    assert list(source.series("evaluation/mean_length").values) == [10, 7.5, 25 / 3, 7.5]


def test_a_monitor_is_averaged_over_the_last_100_episodes(make_monitor):
    source = one(make_monitor("x.monitor.csv", [(float(k), 1, float(k)) for k in range(150)]))
    values = source.series("evaluation/mean_return").values
    assert values[99] == np.mean(range(100)) and values[149] == np.mean(range(50, 150))


@pytest.mark.parametrize(
    "header", ["env_steps,mean", "Step,Value", "global_step,reward", "steps,extra,evaluation/mean_return"]
)
def test_a_table_has_a_step_and_a_value_column_of_any_common_name(tmp_path, header):
    path = tmp_path / "theirs.csv"
    extra = ",7" * (header.count(",") - 1)
    path.write_text(f"{header}\n20{extra},2.5\n10{extra},1.5\n")
    clocks, values = rows(one(path).series("evaluation/mean_return"))
    assert clocks == {"env_steps": [10, 20]} and values == [1.5, 2.5] and one(path).label == "theirs"


def test_a_table_with_seeds_and_environments_has_a_curve_for_each(tmp_path):
    (tmp_path / "theirs.csv").write_text("seed,env,step,value\n0,A,1,5\n1,A,1,6\n0,A,2,7\n0,B,1,8\n")
    sources = find([tmp_path / "theirs.csv"])
    found = [(source.environment, source.seed, list(source.series("any").values)) for source in sources]
    assert found == [("A", "0", [5, 7]), ("A", "1", [6]), ("B", "0", [8])]


def test_words_are_directories_globs_and_labels(make_run, tmp_path):
    for seed in range(3):
        make_run(f"runs/ppo-{seed}", seed=seed)
    names = [str(tmp_path / "runs" / f"ppo-{seed}") for seed in range(3)]
    (tmp_path / "runs" / "trials.csv").write_text("trial,steps,mean\n0,100,1.5\n")  # as in a sweep
    for words in ([tmp_path / "runs"], [f"{tmp_path}/runs/*"], names, [f"{tmp_path}/r*/ppo-[0-2]", names[0]]):
        assert [source.name for source in find(words)] == names
    (tmp_path / "runs" / "base").mkdir()
    (tmp_path / "runs" / "base" / "config.gin").write_text("")  # as in a sweep
    assert [source.name for source in find([tmp_path / "runs"])] == names
    assert {source.label for source in find([f"mine={tmp_path}/runs/*"])} == {"mine"}


def test_a_directory_that_is_not_a_run_is_left_out_beside_runs(make_run, tmp_path):
    make_run("runs/ppo", seed=0)
    (tmp_path / "runs" / "refused").mkdir()
    (tmp_path / "runs" / "refused" / "log.txt").write_text("")
    for words in ([f"{tmp_path}/runs/*"], sorted((tmp_path / "runs").iterdir())):
        notes = []
        (source,) = find(words, notes.append)
        assert source.name == str(tmp_path / "runs" / "ppo")
        assert len(notes) == 1 and notes[0].startswith(f"{tmp_path}/runs/refused is not a run: neither it nor")
        assert notes[0].endswith("; it is left out")


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda path: path / "nothing", "there is no run"),
        (lambda path: path, "is not a run: neither it nor its subdirectories contain config.gin or metrics.csv"),
        (lambda path: (path / "x.txt").write_text("") * 0 or path / "x.txt", "is not a run"),
    ],
)
def test_what_is_not_a_run_is_named(tmp_path, make, words):
    with pytest.raises(UsageError, match=words):
        find([make(tmp_path)])


@pytest.mark.parametrize(
    "content, words",
    [
        (b"", "is empty"),
        (b"steps,env_steps,iterations,updates\n1,2,3,4\n", "has no column wall_seconds"),
        (b"steps,env_steps,iterations,updates,wall_seconds,x\n1,2,3,4\n", "row 1, has 4 cells instead of 6"),
        (b"steps,env_steps,iterations,updates,wall_seconds,x\n1,2,3,4,5,six\n", "has a cell without a number"),
        (b"\xff\xfe\n", "is not a table"),
    ],
)
def test_a_damaged_table_of_metrics_is_named(tmp_path, content, words):
    (tmp_path / "metrics.csv").write_bytes(content)
    with pytest.raises(UsageError, match=words):
        RunSeriesSource(tmp_path).series("x")


def test_a_missing_metric_is_named_with_close_names(make_run):
    source = RunSeriesSource(make_run("run"))
    with pytest.raises(UsageError, match="no metric 'train/los'.*close ones are train/loss"):
        source.series("train/los")
    with pytest.raises(UsageError, match="has no evaluation yet"):
        RunSeriesSource(make_run("young", returns=())).series("evaluation/mean_return")


def test_missing_and_empty_evaluations_are_named(make_run):
    directory = make_run("run")
    metrics = directory / "metrics.csv"
    text = metrics.read_text()
    metrics.write_text(text.replace("evaluation/", "greedy/"))
    with pytest.raises(UsageError, match="run has evaluations without rows in metrics.csv, which stores their steps"):
        RunSeriesSource(directory).series("evaluation/length")
    shutil.rmtree(directory / "eval")
    with pytest.raises(UsageError, match="no evaluation with this name; it has for example metric='greedy/mean_"):
        RunSeriesSource(directory).series("evaluation/mean_return")


def test_the_clock_that_names_evaluations_is_known(make_run):
    assert RunSeriesSource(make_run("acting")).clock_words == "env steps"
    assert RunSeriesSource(make_run("offline", offline=True)).clock_words == "updates"
    directory = make_run("both")
    header, *rows = (directory / "metrics.csv").read_text().splitlines()
    assert header.startswith("steps,env_steps,")
    rows = [",".join([row.split(",")[0], "7", *row.split(",")[2:]]) for row in rows]
    (directory / "metrics.csv").write_text("\n".join([header, *rows]) + "\n")
    assert RunSeriesSource(directory).clock_words == "clock steps"


def test_a_table_without_its_columns_is_named(tmp_path, make_monitor):
    (tmp_path / "x.csv").write_text("a,b\n1,2\n")
    with pytest.raises(UsageError, match="no column for a clock, such as 'env_steps', among a, b"):
        one(tmp_path / "x.csv").series("b")
    (tmp_path / "y.csv").write_text("step,b\n1,2\n")
    with pytest.raises(UsageError, match="no column for a value.*among step, b; rename one of these columns or name"):
        one(tmp_path / "y.csv").series("evaluation/mean_return")
    assert list(one(tmp_path / "y.csv").series("b").values) == [2]
    with pytest.raises(UsageError, match="is a monitor file without 'entropy'"):
        one(make_monitor("m.monitor.csv", [(1, 1, 1)])).series("train/entropy")
    for first in ("[]", "5", '{"t_start": null}', '{"t_start": "a"}', '{"env_id": ["a"]}'):
        (tmp_path / "damaged.monitor.csv").write_text(f"#{first}\nr,l,t\n1,2,3\n")
        with pytest.raises(UsageError, match="is not a monitor file of stable-baselines3"):
            one(tmp_path / "damaged.monitor.csv")
    (tmp_path / "broken.monitor.csv").write_text("r,l,t\n1,2,3\n")
    with pytest.raises(UsageError, match="first line"):
        one(tmp_path / "broken.monitor.csv")
