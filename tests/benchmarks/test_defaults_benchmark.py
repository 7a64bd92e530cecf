"""The benchmark of defaults: its tasks, its verdicts, and what it keeps."""

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from alfish.bin.confs import read
from alfish.configuration.locating import confs_directory
from benchmarks import defaults, tables
from benchmarks.runs import unknown_tasks
from benchmarks.runs.unknown_tasks import BUDGETS, TASKS

pytestmark = pytest.mark.slow

OWN = [task for task in TASKS.values() if not isinstance(task.env, str)]


@pytest.mark.filterwarnings("ignore:.*Box (action|observation) space")  # advice, which these spaces test
@pytest.mark.parametrize("task", OWN, ids=[task.name for task in OWN])
def test_each_small_environment_follows_the_interface_and_ends(task):
    env = unknown_tasks.made(task)
    check_env(env.unwrapped, skip_render_check=True)
    env.action_space.seed(0)
    found = unknown_tasks.returns(task, lambda observation, is_first: env.action_space.sample())
    assert len(found) == unknown_tasks.NUM_EPISODES and np.isfinite(found).all() and np.std(found) > 0


def test_no_task_has_a_conf_tuned_for_the_algorithm():
    tuned = [read(path) for path in confs_directory().glob("*.gin")]
    pairs = {(conf.algorithm.split()[0], conf.task.split()[0].strip(",")) for conf in tuned if conf.task}
    assert not {(algorithm, task.env) for task in TASKS.values() for algorithm in task.algorithms} & pairs


@pytest.mark.parametrize(
    ("ours", "theirs", "verdict"),
    [
        ([5.0, 6.0, 7.0], [1.0, 2.0, 3.0], "above"),
        ([5.0, 6.0, 7.0], [5.5, 6.5, 7.5], "level"),
        ([-5.0, -6.0, -7.0], [-1.0, -1.0, -1.0], "below"),
        ([1000.0, 1000.0, 1000.0], [999.5, 999.5, 999.5], "level"),
    ],
)
def test_a_verdict_is_by_the_spread_of_seeds(ours, theirs, verdict):
    assert defaults.compared(np.array(ours), np.array(theirs)) == verdict


def test_existing_runs_are_not_repeated_but_are_in_the_table(tmp_path, monkeypatch):
    monkeypatch.setattr(defaults, "CSV", tmp_path / "defaults.csv")
    monkeypatch.setattr(defaults.processes, "peer_python", lambda name: "python")
    made = []

    def run(key, core, python):
        made.append((key["task"], key["library"], key["seed"]))
        return {"seconds": 10.0 if key["library"] == "alfish" else 25.0, "returns": [1.0, key["seed"] + 2.0]}

    monkeypatch.setattr(defaults, "_run", run)
    for _ in range(2):
        defaults.run([("PPO", "docking", 0), ("PPO", "docking", 1)])
    assert sorted(made) == [("docking", name, seed) for name in ("alfish", "sb3") for seed in (0, 1)]
    rows = tables.read_rows(tmp_path / "defaults.csv")
    assert {row["env_steps"] for row in rows} == {str(BUDGETS["PPO"])} and len(rows) == 4
    table = defaults.table(rows)
    assert "| PPO | docking | 40,000 | 1.750 (1.500, 2.000) | 1.750 (1.500, 2.000) | level | 10 | 25 | 2.5 |" in table
    assert table.endswith("1 rows: 0 above, 1 level, 0 below. Ratio of seconds: median 2.5, smallest 2.5.")


def test_a_run_that_fails_ends_the_benchmark_with_its_words(tmp_path, monkeypatch):
    monkeypatch.setattr(defaults, "CSV", tmp_path / "defaults.csv")
    monkeypatch.setattr(defaults.processes, "peer_python", lambda name: "python")

    def run(key, core, python):
        raise SystemExit("it failed")

    monkeypatch.setattr(defaults, "_run", run)
    with pytest.raises(SystemExit, match="it failed"):
        defaults.run([("PPO", "docking", 0)])


def test_registered_tasks_exist():
    for task in TASKS.values():
        if isinstance(task.env, str):
            assert gymnasium.spec(task.env).id == task.env
