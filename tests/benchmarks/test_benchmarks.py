"""The benchmarks run, with tiny budgets, and their files say what was measured; no test asks how fast it was."""

import contextlib
import csv
import importlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from alfish.__main__ import main
from alfish.errors import RunError, UsageError
from alfish.training.evaluations.evaluation import Evaluation
from benchmarks import (
    PROJECT,
    RESULTS,
    cost_model,
    learning,
    offline,
    plotting,
    processes,
    ray_costs,
    shipped,
    tables,
    threads,
    throughput,
    time_to_threshold,
    timing,
)
from benchmarks.runs import alfish_run
from benchmarks.runs import script as run_scripts
from benchmarks.runs.script import NO_SUCH_RECIPE
from benchmarks.runs.shipped import TASKS, evaluation_line

pytestmark = pytest.mark.slow

RACE = ["--benchmark=threshold", "ppo_cartpole", "0", "--max_env_steps=500"]
PUBLISHED = sorted([*RESULTS.glob("*.csv"), *learning.RESULTS.glob("*.csv")])
RUN = {
    "recipe": "ppo_cartpole", "library": "alfish plain", "threads": 1, "seed": 0, "env_steps_per_second": 1000.0,
    "peak_memory_mb": 300, "env_steps": 2000, "seconds": 2.0, "cpu_seconds": 2.0, "updates": 80, "return": 20.5,
    "versions": "alfish 0.1.0", "machine": "a processor", "date": "2026-01-01",
}  # fmt: skip
PEERS_RUN = RUN | {
    "library": "sb3",
    "env_steps_per_second": 500.0,
    "seconds": 4.0,
    "versions": "sb3 2.9",
    "return": -3.0,
}


def script(text: str) -> list[str]:
    return [sys.executable, "-c", text]


@pytest.fixture
def command_line(monkeypatch):
    """Calls a benchmark's `main` with options."""

    def call(benchmark, *options: str) -> None:
        monkeypatch.setattr("sys.argv", [benchmark.__name__, *options])
        benchmark.main()

    return call


# Commands.

COMMANDS = sorted(path.stem for path in (PROJECT / "benchmarks").glob("*.py") if "def main" in path.read_text())
PEERS = ("benchmarl_", "sb3_", "sbx_", "sample-factory_", "tianshou_", "torchrl_", "jax_", "rlox_")


def test_every_module_that_needs_no_peer_is_imported_and_every_command_explains_itself(capsys, monkeypatch):
    monkeypatch.setattr(os, "environ", dict(os.environ))  # to which a module may add
    folders = PROJECT / "benchmarks", PROJECT / "benchmarks" / "runs"  # not `peers`, once these are installed
    paths = sorted(path for folder in folders for path in folder.glob("*.py") if not path.name.startswith(PEERS))
    names = [".".join(path.relative_to(PROJECT).with_suffix("").parts) for path in paths]
    assert {"benchmarks.growth", "benchmarks.runs.alfish_run", "benchmarks.runs.replay"} <= {*names}
    for name in names:
        module = importlib.import_module(name)
        if name.count(".") == 1 and hasattr(module, "main"):
            monkeypatch.setattr("sys.argv", [name, "--help"])
            with pytest.raises(SystemExit):
                module.main()
            assert module.__doc__.strip() in capsys.readouterr().out, f"{name} does not say what it is"


def test_benchmarks_of_other_processes_do_not_import_torch():
    """Of pages that it held as well, they would be told half."""
    commands = "data_sets, iteration, learning, offline, replay, shipped, threads, throughput, time_to_threshold"
    text = f"import sys; from benchmarks import {commands}; print('torch' in sys.modules)"
    assert subprocess.run(script(text), cwd=PROJECT, capture_output=True, text=True).stdout == "False\n"


def test_documented_commands_exist():
    paths = [PROJECT / "README.md", PROJECT / "Makefile", *(PROJECT / "docs").glob("*.md")]
    texts = [path.read_text() for path in paths]
    named = {name for text in texts for name in re.findall(r"-m benchmarks\.(\w+)", text)}
    assert len(named) > 5 and named <= {*COMMANDS}


# Other processes.


def test_a_script_gives_the_object_of_its_last_line():
    environment = processes.with_threads(3)
    text = "import os, benchmarks; print('a word'); print('{\"threads\":', os.environ['OMP_NUM_THREADS'], '}')"
    assert processes.run_script(script(text), environment) == {"threads": 3}


def test_a_failing_script_reports_the_reason():
    with pytest.raises(SystemExit, match="(?s)-c .* failed:\nno such luck"):
        processes.run_script(script("raise SystemExit('no such luck')"), os.environ)


def test_a_script_without_a_recipe_has_its_own_exit_status(monkeypatch, capsys):
    with pytest.raises(processes.NoSuchRecipe, match=f"SystemExit.{NO_SUCH_RECIPE}"):
        processes.run_script(script(f"raise SystemExit({NO_SUCH_RECIPE})"), os.environ)
    monkeypatch.setattr("sys.argv", ["alfish_run.py", "nothing", "0"])
    with pytest.raises(SystemExit) as ended:
        run_scripts.main(alfish_run.RECIPES)
    assert ended.value.code == NO_SUCH_RECIPE and "there is ppo_cartpole" in capsys.readouterr().err


def test_a_script_runs_the_benchmark_that_its_command_names(monkeypatch, capsys):
    called = []
    recipes = {"ppo_cartpole": lambda *words: called.append(words)}
    for words in (["ppo_cartpole", "1"], ["ppo_cartpole", "1", "compiled", "--profile"]):
        monkeypatch.setattr("sys.argv", ["sb3_run.py", *words])
        run_scripts.main(recipes, shipped=called.append)
    monkeypatch.setattr("sys.argv", processes.side("python", "sb3", "shipped", "dqn_cartpole", 2)[1:])
    run_scripts.main(recipes, shipped=called.append)
    assert called[:2] == [(1,), (1, "compiled")]
    assert (called[2].recipe, called[2].seed) == ("dqn_cartpole", 2)
    monkeypatch.setattr("sys.argv", processes.side("python", "sb3", "threshold", "dqn_cartpole", 2)[1:])
    with pytest.raises(SystemExit):
        run_scripts.main(recipes, shipped=called.append)
    assert "'threshold'" in capsys.readouterr().err


@pytest.mark.slow
def test_an_unknown_recipe_is_reported():
    path = PROJECT / "benchmarks" / "runs" / "alfish_run.py"
    with pytest.raises(processes.NoSuchRecipe, match="alfish_run.py nothing 0"):
        processes.run_script([sys.executable, str(path), "nothing", "0"], processes.with_threads(1))


def test_a_script_is_watched_while_it_runs_and_killed_if_the_watcher_raises():
    """It would wait for ever: that it is gone shows that it was killed."""
    seen = []

    def watch(pid):
        seen.append(pid)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        processes.run_script(script("import threading; threading.Event().wait()"), os.environ, watch)
    with pytest.raises(ProcessLookupError):
        os.kill(seen[0], 0)


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").is_file(), reason="only Linux tells")
def test_memory_includes_a_process_and_its_children():
    large = "held = b'x' * 100_000_000; print('there', flush=True); input()"
    small = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {large!r}])"
    with subprocess.Popen(script(small), stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"there\n"
        memory = processes.memory_mb(process.pid)
        process.communicate(b"\n")
    assert 95 < memory < 200
    assert processes.memory_mb(process.pid) == 0.0


def test_a_peers_environment_is_made_once(tmp_path, monkeypatch):
    commands = []

    def make(command, check):
        commands.append([str(word) for word in command])
        (tmp_path / ".venv-sb3" / "bin").mkdir(parents=True, exist_ok=True)
        (tmp_path / ".venv-sb3" / "bin" / "python").touch()

    monkeypatch.setattr(processes, "PEERS", tmp_path)
    monkeypatch.setattr(subprocess, "run", make)
    (tmp_path / "sb3.txt").write_text("stable-baselines3==2.7.0\n")
    python = str(tmp_path / ".venv-sb3" / "bin" / "python")
    assert [processes.peer_python("sb3") for _ in range(2)] == [python, python]
    made = [
        [sys.executable, "-m", "venv", "--clear", str(tmp_path / ".venv-sb3")],
        [python, "-m", "pip", "install", "--quiet", "--requirement", str(tmp_path / "sb3.txt")],
    ]
    assert commands == made
    (tmp_path / "sb3.txt").write_text("stable-baselines3==2.9.2\n")
    processes.peer_python("sb3")
    assert commands == 2 * made


def test_a_peers_environment_whose_installation_was_interrupted_is_made_again(tmp_path, monkeypatch):
    (tmp_path / "sb3.txt").write_text("stable-baselines3==2.7.0\n")
    commands = []

    def fail_once(command, check):
        commands.append(command)
        (tmp_path / ".venv-sb3" / "bin").mkdir(parents=True, exist_ok=True)
        (tmp_path / ".venv-sb3" / "bin" / "python").touch()
        if len(commands) == 2:
            raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(processes, "PEERS", tmp_path)
    monkeypatch.setattr(subprocess, "run", fail_once)
    with pytest.raises(subprocess.CalledProcessError):
        processes.peer_python("sb3")
    processes.peer_python("sb3")
    assert len(commands) == 4


def test_process_time_includes_running_children():
    code = "import sys, time\nwhile time.process_time() < 0.3: pass\nprint(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        before = run_scripts.cpu_seconds()
        child.stdout.readline()
        assert run_scripts.cpu_seconds() - before + 0.05 > 0.2 and run_scripts.cpu_seconds(child.pid) >= 0.25
        child.stdin.close()
    assert run_scripts.cpu_seconds(child.pid) == 0.0


# Result files.


def test_there_are_published_files():
    assert len(PUBLISHED) > 70


def test_a_published_csv_is_written_back_as_it_is(tmp_path):
    for path in PUBLISHED:
        rows = tables.read_rows(path)
        tables.write_rows(tmp_path / "copy.csv", rows, rows[0])
        assert (tmp_path / "copy.csv").read_bytes() == path.read_bytes(), path.stem


def test_rows_replace_only_rows_with_the_same_key(tmp_path):
    path = tmp_path / "new" / "table.csv"
    first = [{"task": "a", "seed": 0, "x": 1.5}, {"task": "a", "seed": 1, "x": 2}, {"task": "b", "seed": 0}]
    assert tables.replace_rows(path, first, ["task", "seed", "x"], ["task", "seed"]) == tables.read_rows(path)
    replaced = tables.replace_rows(path, [{"task": "a", "seed": 0, "x": 3}], ["task", "seed", "x"], ["task", "seed"])
    assert [tuple(row.values()) for row in replaced] == [("a", "1", "2"), ("b", "0", ""), ("a", "0", "3")]
    replaced = tables.replace_rows(path, [{"task": "a", "seed": 7, "x": 4}], ["task", "seed", "x"], ["task"])
    assert [tuple(row.values()) for row in replaced] == [("b", "0", ""), ("a", "7", "4")]


def test_rows_are_sorted_numerically_on_request(tmp_path):
    path = tmp_path / "table.csv"
    for seed in (10, 9, 2):
        rows = tables.replace_rows(path, [{"seed": seed}], ["seed"], ["seed"], lambda row: int(row["seed"]))
    assert [row["seed"] for row in rows] == ["2", "9", "10"]


def test_writing_no_rows_keeps_the_file(tmp_path):
    path = tmp_path / "table.csv"
    assert tables.replace_rows(path, [], ["seed"], ["seed"]) == []
    assert not path.exists()
    path.write_text("seed\n1\n")  # with line ends that the csv module would not write
    assert tables.replace_rows(path, [], ["seed"], ["seed"]) == [{"seed": "1"}]
    assert path.read_text() == "seed\n1\n"


def test_a_failed_row_write_keeps_the_file(tmp_path):
    path = tmp_path / "table.csv"
    tables.write_rows(path, [{"seed": 1}], ["seed"])
    before = path.read_bytes()
    with pytest.raises(ValueError, match="score"):
        tables.replace_rows(path, [{"seed": 2}, {"seed": 3, "score": 1}], ["seed"], ["seed"])
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "table.csv"
    tables.write_rows(path, [{"seed": 1}], ["seed"])
    before = path.read_bytes()

    def fail(source, destination):
        raise OSError("killed before the end")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(RunError, match="killed"):
        tables.replace_rows(path, [{"seed": 2}], ["seed"], ["seed"])
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_a_ratio_has_an_interval_of_its_medians():
    assert tables.times(2.0, np.array([4.0, 4.0]), np.array([2.0])) == "2.00x [2.00, 2.00]"
    assert tables.times(1.0, np.array([1.0, 2.0, 9.0]), np.array([2.0])) == "1.00x [0.50, 4.50]"


def test_a_ratio_of_runs_that_never_finish_has_infinite_bounds():
    ended, endless = np.array([2.0]), np.array([np.inf])
    assert tables.times(3.0, endless, ended) == "3.00x [inf, inf]"
    assert tables.times(3.0, ended, endless) == "3.00x [0.00, 0.00]"
    assert tables.times(3.0, endless, endless) == "3.00x [0.00, inf]"


# Time.


def test_a_call_averages_consecutive_calls(monkeypatch):
    """On a clock that only calls move: number n takes n seconds."""
    now, numbers = [0.0], []

    def call(number):
        now[0] += number
        numbers.append(number)

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    assert timing.seconds_a_call(call, 4, first=10) == (10 + 11 + 12 + 13) / 4
    assert timing.seconds_a_call(call, 3) == 1.0
    assert timing.seconds_a_call(call, first=7) == 7.0
    assert numbers == [10, 11, 12, 13, 0, 1, 2, 7]


# Throughput.


def test_the_throughput_of_two_runs_is_compared(tmp_path):
    path = tmp_path / "throughput.csv"
    throughput.publish(path, [RUN, PEERS_RUN])
    *_, headings, _, ours, theirs = path.with_suffix(".md").read_text().splitlines()
    assert headings == "| recipe | library | threads | steps/s | updates/s | return | MB | times sb3 |"
    speed = "1,000 [1,000, 1,000] | 40 | 20.5 | 300 | 2.00x [2.00, 2.00] |"
    assert ours == f"| ppo_cartpole | alfish 0.1.0 (plain) | 1 | {speed}"
    assert theirs == "| ppo_cartpole | sb3 2.9 | 1 | 500 [500, 500] | 20 | -3.0 | 300 |  |"


def test_a_recipe_that_is_measured_again_keeps_no_old_run(tmp_path):
    path = tmp_path / "throughput.csv"
    other = RUN | {"recipe": "dqn_cartpole"}
    for runs in ([RUN, PEERS_RUN], [other], [RUN]):
        throughput.publish(path, runs)
    assert [row["recipe"] for row in tables.read_rows(path)] == ["dqn_cartpole", "ppo_cartpole"]
    assert "sb3" not in path.with_suffix(".md").read_text()


@pytest.mark.parametrize(
    "table", [ray_costs.table, lambda: cost_model.table(cost_model.cases())], ids=["costs", "model"]
)
def test_published_worker_costs_match_their_raw_data(table):
    assert table() in (PROJECT / "docs" / "scale.md").read_text()


def test_the_modelled_rate_is_limited_by_the_workers_or_by_the_trainer():
    case = cost_model.Case("2 ms environment", 450, 14, 256, 0.4, 0.7, 0.7)
    of_workers, of_trainer = 4 * case.rate, 1e6 / (case.train_us + 1e3 * case.segment_ms / case.rows)
    assert cost_model.rows_per_second(case, 4) == pytest.approx(of_workers, rel=0.05)
    assert 0.9 * of_trainer < cost_model.rows_per_second(case, 1000, iterations=15) < of_trainer
    slow = case._replace(call_ms=1000 * case.call_ms)
    assert cost_model.rows_per_second(slow, 1000, iterations=15) < 0.5 * of_trainer


def test_a_recipe_that_other_work_slows_too_much_is_named(command_line, capsys, monkeypatch, tmp_path):
    runs, busy = [], [0]

    @contextlib.contextmanager
    def busy_processes(count):
        busy[0] = count
        yield

    def run_script(command, environment):
        _, _, recipe, seed, variant, _ = command
        runs.append((recipe, seed, variant, busy[0]))
        slower = busy[0] and {"ppo_cartpole": 2.4, "dqn_cartpole": 2.6}[recipe]
        own = RUN | {"seconds": 2.0 * (slower or 1)}
        return {name: own[name] for name in ("env_steps", "seconds", "cpu_seconds", "updates", "return", "versions")}

    monkeypatch.setattr(threads, "RESULTS", tmp_path)
    monkeypatch.setattr(processes, "busy_processes", busy_processes)
    monkeypatch.setattr(processes, "run_script", run_script)
    command_line(threads, "--recipes=ppo_cartpole,dqn_cartpole", "--threads=auto", "--repeats=2")
    assert runs == [
        (recipe, seed, "auto", count)
        for recipe in ("ppo_cartpole", "dqn_cartpole")
        for seed in "01"
        for count in (0, 1)
    ]
    assert "Below 0.4 of the idle speed: dqn_cartpole with auto threads\n" in capsys.readouterr().out


def test_libraries_take_turns_and_one_without_a_recipe_is_left_out(command_line, capsys, monkeypatch, tmp_path):
    runs = []

    def run_script(command, environment, watch):
        python, script, recipe, *words, benchmark = command
        assert benchmark == "--benchmark=throughput"
        runs.append((python, Path(script).name, recipe, *words, environment["OMP_NUM_THREADS"]))
        if python == "tianshou's" and recipe == "ppo_cartpole":
            raise processes.NoSuchRecipe
        return {name: RUN[name] for name in ("env_steps", "seconds", "cpu_seconds", "updates", "return", "versions")}

    monkeypatch.setattr(throughput, "RESULTS", tmp_path)
    monkeypatch.setattr(processes, "run_script", run_script)
    monkeypatch.setattr(processes, "peer_python", lambda peer: f"{peer}'s")
    recipes = "--recipes=ppo_cartpole,dqn_cartpole"
    command_line(throughput, recipes, "--variants=compiled", "--peers=tianshou:2,sb3", "--repeats=2")
    ours, theirs, others = (sys.executable, "alfish_run.py"), ("tianshou's", "tianshou_run.py"), ("sb3's", "sb3_run.py")
    assert runs == [
        (*ours, "ppo_cartpole", "0", "compiled", "1"),
        (*theirs, "ppo_cartpole", "0", "2"),
        (*others, "ppo_cartpole", "0", "1"),
        (*ours, "ppo_cartpole", "1", "compiled", "1"),
        (*others, "ppo_cartpole", "1", "1"),
        (*ours, "dqn_cartpole", "0", "compiled", "1"),
        (*theirs, "dqn_cartpole", "0", "2"),
        (*others, "dqn_cartpole", "0", "1"),
        (*ours, "dqn_cartpole", "1", "compiled", "1"),
        (*theirs, "dqn_cartpole", "1", "2"),
        (*others, "dqn_cartpole", "1", "1"),
    ]
    assert "ppo_cartpole tianshou has no such recipe" in capsys.readouterr().out
    rows = tables.read_rows(tmp_path / "throughput.csv")
    told = [(row["library"], row["threads"], row["env_steps_per_second"]) for row in rows]
    ours, theirs, others = ("alfish compiled", "1", "1000.0"), ("tianshou", "2", "1000.0"), ("sb3", "1", "1000.0")
    assert told == [ours, others] * 2 + [ours, theirs, others] * 2


def test_the_published_throughput_matches_its_raw_data(tmp_path):
    path = tmp_path / "throughput.csv"
    shutil.copy(RESULTS / path.name, path)
    last = path.read_text().splitlines()[-1].split(",")[0]
    throughput.publish(path, [row for row in tables.read_rows(path) if row["recipe"] == last])
    assert path.read_bytes() == (RESULTS / path.name).read_bytes()
    assert path.with_suffix(".md").read_text() == (RESULTS / "throughput.md").read_text()


# Time to a threshold.


def test_a_race_to_the_threshold_trains_the_shipped_conf(command_line, capsys):
    command_line(alfish_run, *RACE, "--gin_param=MLP.layers=(8,)")
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["env_steps"] >= 500 and result["updates"] > 0
    assert not result["reached"] and 0 < result["mean"] < 475


def test_a_race_refuses_an_unread_binding(command_line):
    with pytest.raises(UsageError, match=r"nothing reads Prioritized\.alpha, bound in this call"):
        command_line(alfish_run, *RACE, "--gin_param=Prioritized.alpha=0.5")


def test_the_published_races_are_what_their_raw_data_say(command_line, capsys):
    command_line(time_to_threshold, "--table")
    told, published = capsys.readouterr().out, (RESULTS / "time_to_threshold.md").read_text()
    assert told.splitlines()[1:-1] == published.splitlines()[1:]  # the first line names this machine


def test_a_race_of_its_own_raw_data_replaces_them(command_line, capsys, monkeypatch, tmp_path):
    """Run again, each run with the result that it had, in another order: the file is the same."""
    path = tmp_path / "time_to_threshold.csv"
    shutil.copy(time_to_threshold.CSV, path)
    monkeypatch.setattr(time_to_threshold, "CSV", path)
    monkeypatch.setattr(processes, "peer_python", lambda peer: "python")
    old = {(row["task"], row["library"], int(row["seed"])): row for row in tables.read_rows(path)}

    def result(python, library, key, arguments):
        row = old[key["task"], key["library"], key["seed"]]
        words = ("task", "library", "versions", "machine", "date")
        numbers = {name: json.loads(row[name].lower()) for name in row if name not in words}
        return row | numbers

    monkeypatch.setattr(time_to_threshold, "_run", result)
    command_line(time_to_threshold, "--tasks=sac_pendulum,ppo_cartpole", "--seeds=1,0", "--again")
    assert "ppo_cartpole alfish seed 0: reached" in capsys.readouterr().out
    assert path.read_bytes() == (RESULTS / path.name).read_bytes()
    assert path.with_suffix(".md").is_file()


# Shipped commands.


def evaluations(text="Evaluation at 10,000 steps: return 401.5 [380, 420] over 20 episodes"):
    """A program that reports an evaluation and then needs a moment to end."""
    return script(f"import sys, time; print({text!r}, file=sys.stderr, flush=True); time.sleep(0.3)")


def test_seconds_are_read_when_a_line_arrives_and_when_the_program_has_ended():
    first, end = shipped.timed(evaluations(), os.environ)
    assert (first["event"], first["env_steps"], first["return"]) == ("evaluation", "10000", "401.5")
    assert end["event"] == "end" and end["seconds"] >= first["seconds"] + 0.3


def test_a_failing_shipped_command_reports_the_reason():
    with pytest.raises(SystemExit, match="failed:\nno such luck"):
        shipped.timed(script("raise SystemExit('no such luck')"), os.environ)


@pytest.mark.parametrize("mean", [-1234.5, 0.004, 89.25, 500.0, 12345.6])
def test_evaluations_of_alfish_and_peers_are_read_equally(mean):
    ours = f"Evaluation at 20,000 steps: {Evaluation(20_000, 0, (mean,) * 20, (1,) * 20).words()}"
    for line in (ours, evaluation_line(20_000, mean)):
        env_steps, value = shipped.EVALUATION.search(line).groups()
        assert env_steps == "20,000" and float(value.replace(",", "")) == pytest.approx(mean, rel=0.01, abs=0.01)


def test_tasks_match_the_shipped_confs():
    for task in TASKS.values():
        text = (PROJECT / "confs" / f"{task.name}.gin").read_text()
        assert f"env_id = '{task.env_id}'" in text
        assert (f"Trainer.num_env_steps = {task.env_steps:_}\n" in text) == task.is_budget
        period = re.search(r"Evaluate.period = ([\d_]+)", text)
        assert task.period == (int(period[1]) if period else 10_000)


@pytest.fixture
def shipped_here(tmp_path, monkeypatch):
    """Calls the benchmark with files of its own; programs report an evaluation, and their commands are returned."""
    commands = []

    def timed(command, environment):
        commands.append((command, environment))
        cache = Path(environment.get("XDG_CACHE_HOME", tmp_path))
        seconds = 4.0 if (cache / "made").exists() else 10.0
        if "--benchmark=shipped" in command:
            seconds = 15.0 + 5.0 * int(environment["OMP_NUM_THREADS"])
        (cache / "made").touch()
        evaluation = {"event": "evaluation", "env_steps": "10000", "seconds": seconds / 2, "return": "480"}
        return [evaluation, {"event": "end", "seconds": seconds}]

    monkeypatch.setattr(shipped, "CSV", tmp_path / "shipped.csv")
    monkeypatch.setattr(shipped, "PICTURE", tmp_path / "wall_seconds.png")
    monkeypatch.setattr(shipped, "timed", timed)
    monkeypatch.setattr(shipped, "PACKAGES", dict.fromkeys(shipped.PACKAGES, ("numpy",)))
    monkeypatch.setattr(processes, "peer_python", lambda name: sys.executable)
    monkeypatch.setattr(shipped.tempfile, "gettempdir", lambda: str(tmp_path / "caches"))
    return commands


def test_benchmarks_alternate_with_peers_for_empty_and_warm_caches(shipped_here, command_line):
    options = "--tasks=ppo_cartpole,sac_halfcheetah", "--peers=sb3:1,sb3:2"
    command_line(shipped, *options, "--seeds=0,1")
    words = [" ".join(command[1:]) for command, _ in shipped_here]
    ours = [text for text in words if " train " in text]
    assert ["alfish" in text.split()[1] for text in words[:5]] == [True, True, False, False, True]
    assert "--gin_param" not in ours[0], "the shipped command, without a flag"
    assert ours[2].endswith("--gin_param=Trainer.seed=1")
    assert ours[4].endswith("--gin_param=Trainer.num_env_steps=30000")
    assert not any("OMP_NUM_THREADS" in environment for command, environment in shipped_here if "train" in command)
    rows = tables.read_rows(shipped.CSV)
    ends = [(row["library"], row["threads"], row["seconds"]) for row in rows if row["event"] == "end"][:4]
    assert ends[0] == ("alfish, empty cache", "auto", "10.0") and ends[2] == ("alfish, warm cache", "auto", "4.0")
    [line] = [line for line in shipped.table(rows).splitlines() if line.startswith("| ppo") and "x [" in line]
    assert (
        "| 1 | 2 | 20.0 " in line and "2.00x [2.00, 2.00] | 5.00x [5.00, 5.00]" in line and "| 10.0 (2 of 2) |" in line
    )
    assert shipped.PICTURE.stat().st_size > 10_000
    command_line(shipped, *options, "--seeds=0,1")
    assert len(shipped_here) == 16, "what is there is not run again"


def test_an_interruption_loses_one_run(shipped_here, command_line, monkeypatch):
    whole, count = shipped.timed, iter(range(9))

    def interrupted(command, environment):
        if next(count) == 1:
            raise KeyboardInterrupt
        return whole(command, environment)

    monkeypatch.setattr(shipped, "timed", interrupted)
    options = "--tasks=dqn_cartpole", "--peers=", "--seeds=0"
    with pytest.raises(KeyboardInterrupt):
        command_line(shipped, *options)
    shutil.rmtree(Path(shipped.tempfile.gettempdir()))  # by a reboot
    command_line(shipped, *options)
    ends = [row["seconds"] for row in tables.read_rows(shipped.CSV) if row["event"] == "end"]
    assert ends == ["10.0", "4.0"] and len(shipped_here) == 3, "the warm run made its cache again"


def test_a_run_that_never_reaches_the_threshold_counts_as_endless():
    events = {"task": "ppo_cartpole", "seed": "0", "versions": "x 1", "machine": "m"}
    key = events | {"library": "alfish, empty cache", "threads": "auto"}
    rows = [key | {"event": "evaluation", "env_steps": "1", "seconds": "1", "return": "9"}]
    rows.append(key | {"event": "end", "env_steps": "", "seconds": "3", "return": ""})
    assert "not reached (0 of 1)" in shipped.table(rows)


# Offline data.


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="only Linux tells")
def test_a_step_of_offline_data_is_reported_with_its_own_memory(command_line, capsys, monkeypatch, tmp_path):
    pytest.importorskip("minari")
    monkeypatch.setattr(offline, "RESULTS", tmp_path)
    held = b"x" * 600_000_000  # by this process, which starts the others
    command_line(offline, "--transitions=200", "--episode_length=20")
    table = (tmp_path / "offline.md").read_text()
    del held
    assert table.splitlines()[2].startswith("`python -m benchmarks.offline`: 200 transitions in episodes of 20; ")
    rows = [line.split(" | ") for line in table.splitlines()[6:]]
    assert len(rows) == 5
    assert all(10 < int(row[2]) < 600 for row in rows)
    assert capsys.readouterr().out.splitlines() == table.splitlines()[6:]


# Learning.


def test_new_results_of_a_seed_replace_old_results(tmp_path):
    path = tmp_path / "ppo_cartpole-curve.csv"
    shutil.copy(learning.RESULTS / path.name, path)
    own = [row for row in tables.read_rows(path) if row["seed"] == "1"]
    learning.publish(path, own)
    assert path.read_bytes() == (learning.RESULTS / path.name).read_bytes()
    learning.publish(path, own[:1])
    assert [row["env_steps"] for row in tables.read_rows(path) if row["seed"] == "1"] == [own[0]["env_steps"]]
    learning.publish(path, [])
    assert len(tables.read_rows(path)) == len(tables.read_rows(learning.RESULTS / path.name)) - len(own) + 1


# What `alfish evaluate --json` prints, as far as it is published.
EVALUATED = {"env_steps": 500, "num_episodes": 10, "mean": 2.0, "ci_low": 1, "ci_high": 3, "std": 1, "min": 1, "max": 3}


def test_an_unfinished_run_is_published_up_to_now(monkeypatch, tmp_path):
    monkeypatch.setattr(learning, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(learning.processes, "run_script", lambda command, environment: EVALUATED)
    monkeypatch.setattr(learning, "train", lambda *_: pytest.fail("it trains"))
    evaluations = tmp_path / "ppo_pong" / "seed0" / "eval"
    evaluations.mkdir(parents=True)
    (tmp_path / "results").mkdir()
    (evaluations / "evaluation-000000000250.csv").write_text("episode,seed,return,length\n0,0,-21.0,9\n1,1,-19.0,9\n")
    monkeypatch.setattr("sys.argv", ["learning", "--confs=ppo_pong", f"--root={tmp_path}", "--unfinished"])
    learning.main()
    (row,) = tables.read_rows(tmp_path / "results" / "ppo_pong.csv")
    assert (row["env_steps"], row["mean"], row["command_seconds"]) == ("500", "2.0", "")
    (point,) = tables.read_rows(tmp_path / "results" / "ppo_pong-curve.csv")
    assert (point["env_steps"], point["mean"], point["episodes"]) == ("250", "-20.0", "2")


def test_run_seconds_are_those_of_its_training_command(monkeypatch, tmp_path):
    """A later command finds the run done, or trains its rest only."""
    result = dict(EVALUATED)
    monkeypatch.setattr(learning, "RESULTS", tmp_path)
    monkeypatch.setattr(learning.processes, "run_script", lambda command, environment: result)
    root_dir = tmp_path / "runs"
    monkeypatch.setattr(
        learning.processes, "alfish", lambda *_: (root_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
    )
    goal = next(goal for goal in learning.GOALS if goal.name == "ppo_cartpole")

    def seconds():
        learning.record(goal, 0, root_dir, learning.train(goal, 0, root_dir))
        return tables.read_rows(tmp_path / "ppo_cartpole.csv")[0]["command_seconds"]

    first = seconds()
    assert float(first) >= 0 and seconds() == first
    result["mean"] = 3.0  # it was trained again, in several commands
    assert seconds() == ""


def test_an_unknown_conf_is_named(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["learning", "--table", "--confs=ppo_cartpole,nonsense"])
    with pytest.raises(SystemExit):
        learning.main()
    assert "there is no nonsense; there are ppo_cartpole" in capsys.readouterr().err


def test_confs_whose_result_needs_another_file_are_trained_with_it(monkeypatch, tmp_path):
    given = []
    monkeypatch.setattr(learning.processes, "alfish", lambda *words: given.extend(words))
    goal = next(goal for goal in learning.GOALS if goal.name == "appo_halfcheetah-async")
    learning.train(goal, 0, tmp_path)
    assert given[:3] == ["train", "--gin_file=appo_halfcheetah.gin", "--gin_file=async.gin"]
    assert tables.read_rows(learning.RESULTS / f"{goal.name}.csv")


def test_a_policy_is_judged_by_its_own_return_in_games_of_a_lineup(monkeypatch, tmp_path):
    asked, result = (
        [],
        {
            **EVALUATED,
            "returns": [1, 2],
            "lengths": [25, 25],
            "by_objective": {"chaser": [8, 12], "runner": [-30, -10]},
        },
    )
    monkeypatch.setattr(learning, "RESULTS", tmp_path)
    monkeypatch.setattr(learning.processes, "run_script", lambda command, environment: asked.append(command) or result)
    trained = []
    monkeypatch.setattr(learning, "train", lambda goal, seed, root_dir: trained.append(root_dir))
    (tmp_path / "runs" / "ppo_tag" / "seed0" / "eval").mkdir(parents=True)
    evaluation = "episode,seed,return,length,return/chaser,return/runner\n0,0,1.0,25,6.0,-4.0\n"
    (tmp_path / "runs" / "ppo_tag" / "seed0" / "eval" / "evaluation-000000000100.csv").write_text(evaluation)
    lineups = {"chaser": "adversary_*=chaser,agent_*=random", "runner": "adversary_*=chaser,agent_*=runner"}
    goals = [
        learning.Goal("ppo_tag", (0,), 0, False, 200, lineup=lineup, policy=name, match=name)
        for name, lineup in lineups.items()
    ]
    monkeypatch.setattr(learning, "GOALS", goals)
    monkeypatch.setattr("sys.argv", ["learning", f"--root={tmp_path / 'runs'}"])
    learning.main()
    assert trained == 2 * [tmp_path / "runs" / "ppo_tag" / "seed0"], "both goals are of one run"
    flags = [[word for word in command if word.startswith(("--lineup", "--seed"))] for command in asked]
    assert flags == [[f"--lineup={lineup}", "--seed=1000"] for lineup in lineups.values()]
    for policy, mean, least, point in (("chaser", "10.0", "8.0", "6.0"), ("runner", "-20.0", "-30.0", "-4.0")):
        (row,) = tables.read_rows(tmp_path / f"ppo_tag-{policy}.csv")
        assert (row["mean"], row["min"], row["num_episodes"]) == (mean, least, "2")
        (curve,) = tables.read_rows(tmp_path / f"ppo_tag-{policy}-curve.csv")
        assert curve["mean"] == point


def test_learning_results_are_printed_as_a_table(monkeypatch, tmp_path):
    goals = [goal for goal in learning.GOALS if goal.name in ("ppo_cartpole", "a2c_cartpole")]
    monkeypatch.setattr(learning, "RESULTS", tmp_path)
    with open(tmp_path / "ppo_cartpole.csv", "w") as file:
        csv.writer(file).writerows([("seed", "env_steps", "mean"), (0, 50_001, 480.0), (1, 50_000, 470.0)])
    ours, theirs = learning.table(goals).splitlines()[2:]
    assert ours == "| ppo_cartpole | 50,001 | 0, 1 | 475.0 | 480.0, 470.0 | 475 every seed | no, 2 of 5 seeds |"
    assert theirs == "| a2c_cartpole | | | not run | | 475 | |"


def test_returns_below_1_are_printed_with_three_digits(monkeypatch, tmp_path):
    goals = [goal for goal in learning.GOALS if goal.name == "ppo_minigrid_doorkey"]
    monkeypatch.setattr(learning, "RESULTS", tmp_path)
    with open(tmp_path / "ppo_minigrid_doorkey.csv", "w") as file:
        csv.writer(file).writerows([("seed", "env_steps", "mean"), (0, 100_000, 0.9604), (1, 100_000, 0.99999)])
    (line,) = learning.table(goals).splitlines()[2:]
    assert "| 0.980 | 0.960, 1.0 | 0.95 in the mean |" in line


def test_runs_written_for_the_benchmark_of_plots_are_read_as_runs(tmp_path, capsys):
    for seed in range(2):
        plotting.write_run(tmp_path / f"run{seed}", 0.9, seed, 20_000)
    assert main(["compare", str(tmp_path), "--format=csv", "--threshold=1"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["seeds"] for row in rows] == ["2"] and rows[0]["environment"] == "CartPole-v1"


def test_the_plots_table_equals_the_results_page():
    assert plotting.table() in (PROJECT / "docs" / "results.md").read_text()
