"""Groups of runs on a shipped environment that saves its state: killed with SIGKILL, they end with the same bytes."""

import csv

import pytest
import toy_confs
from kills import assert_nothing_is_left, kill, run
from test_kills import table_of
from test_population_kills import assert_equal

from alfish import nest
from alfish.runs.checkpoints import Checkpoints

NUM_KILLS = 3


@pytest.fixture
def native(tmp_path):
    """The file of a configuration of PPO on an environment in tensors."""
    path = tmp_path / "native.gin"
    path.write_text(toy_confs.CARTPOLE_IN_TENSORS)
    return path


def metrics(directory):
    """Rows of `metrics.csv` by their steps, without times."""
    with open(directory / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) > 2
    timed = {name for name in rows[0] if name.startswith("time/") or "second" in name}
    found = {row["steps"]: {name: value for name, value in row.items() if name not in timed} for row in rows}
    assert len(found) == len(rows), "two rows of the same steps"
    return found


def assert_equal_runs(one, other, names):
    for name in names:
        killed, whole = metrics(one / name), metrics(other / name)
        assert {step: killed[step] for step in whole} == whole, name
        # A run whose controller is killed ends as by SIGTERM: it saves, and writes a row where it was.
        assert len(killed) - len(whole) <= NUM_KILLS
        evaluations = [
            {path.name: path.read_bytes() for path in (root / name / "eval").iterdir()} for root in (one, other)
        ]
        assert evaluations[0] == evaluations[1] and evaluations[0], name
        states = [Checkpoints(root / name / "checkpoints").load("latest") for root in (one, other)]
        assert states[0][0] == states[1][0]
        for part in ("algorithm", "transforms", "learner", "rng", "unroller"):
            leaves = [nest.leaves(state[part]) for _, state in states]
            assert all(same(a, b) for a, b in zip(*leaves, strict=True)), (name, part)


def same(a, b):
    return bool((a == b).all()) if hasattr(a, "shape") else a == b


@pytest.mark.slow
def test_a_sweep_killed_three_times_equals_an_uninterrupted_one(native, tmp_path):
    flags = "--sampler=random", "--trials=2", "--jobs=1", "--search=Learner.learning_rate=log(1e-4, 1e-2)"
    victims = kill("sweep", native, tmp_path / "killed", NUM_KILLS, 2 * 1000, *flags)
    run("sweep", native, tmp_path / "whole", *flags)
    assert table_of(tmp_path / "killed") == table_of(tmp_path / "whole")
    assert_equal_runs(tmp_path / "killed", tmp_path / "whole", ["000", "001"])
    assert len(victims) == NUM_KILLS
    assert_nothing_is_left(tmp_path / "killed")


@pytest.mark.slow
def test_a_population_killed_three_times_equals_an_uninterrupted_one(native, tmp_path):
    rate = "--perturb=Learner.learning_rate=1e-4..1e-2"
    flags = "--members=2", "--share=0.5", "--generations=2", "--jobs=1", rate
    victims = kill("population", native, tmp_path / "killed", NUM_KILLS, 6 * 500, *flags)
    run("population", native, tmp_path / "whole", *flags)
    assert_equal(tmp_path / "killed", tmp_path / "whole")
    members = sorted(
        str(path.parent.relative_to(tmp_path / "whole")) for path in (tmp_path / "whole").glob("g*/m*/eval")
    )
    assert_equal_runs(tmp_path / "killed", tmp_path / "whole", members)
    assert len(victims) == NUM_KILLS
    assert_nothing_is_left(tmp_path / "killed")
