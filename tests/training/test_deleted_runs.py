"""A run whose directory is deleted or moved while it goes on says so, writes what it knows again, and fails."""

import json
import os
import shutil

import pytest

import alfish
from alfish.errors import RunError, UsageError
from alfish.runs import files
from alfish.training.listener import Listener
from alfish.training.listeners import CheckpointSaver, Evaluate, Summaries

SETTINGS = {
    "num_iterations": 8, "unroll_length": 16, "make_environment.num_envs": 1, "MLP.layers": (4,), "summary_period": 16,
    "EpochBatches.num_epochs": 1,
}  # fmt: skip


class At(Listener):
    """Calls something after an iteration, after the other listeners."""

    def __init__(self, iteration, call):
        self._iteration, self._call = iteration, call

    def after_iteration(self, run, report):
        if report.iterations == self._iteration:
            self._call(run.directory.path)


def train(root_dir, call):
    listeners = [Evaluate(32, 1), CheckpointSaver(period=32), Summaries(), At(4, call)]
    return alfish.train("PPO", "CartPole-v1", root_dir=root_dir, listeners=listeners, **SETTINGS)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of which nothing was deleted."""
    root_dir = tmp_path_factory.mktemp("runs") / "whole"
    train(root_dir, lambda path: None)
    return root_dir


def rows(root_dir):
    return (root_dir / "metrics.csv").read_text().splitlines()


@pytest.mark.parametrize(
    "call", [shutil.rmtree, lambda path: os.rename(path, f"{path}-elsewhere")], ids=["deleted", "moved"]
)
def test_a_partial_run_is_written_again_with_known_values(tmp_path, call, caplog):
    root_dir = tmp_path / "run"
    with pytest.raises(RunError, match="run was deleted or moved during training, so it is incomplete"):
        train(root_dir, call)
    loud = [one.getMessage() for one in caplog.records if "DELETED OR MOVED" in one.getMessage()]
    assert sum(f"{root_dir} WAS" in one for one in loud) == 1 and sum("metrics.csv WAS" in one for one in loud) == 1
    names = (
        "config.gin",
        "operative_config.gin",
        "run_id",
        "provenance.json",
        "done",
        "log.txt",
        "checkpoints",
        "eval",
    )
    assert {*names, "tensorboard"} <= set(os.listdir(root_dir))
    steps = [int(row.split(",")[0]) for row in rows(root_dir)[1:]]
    assert min(steps) <= 32 and max(steps) > 96 and steps == sorted(steps)
    assert json.loads((root_dir / "provenance.json").read_text())[0]["seed"] == 0


@pytest.mark.parametrize("name", ["metrics.csv", "config.gin", "run_id", "tensorboard"])
def test_a_single_file_is_restored_and_the_run_is_whole(tmp_path, whole, name, caplog):
    root_dir = tmp_path / "run"

    def remove(path):
        shutil.rmtree(path / name) if (path / name).is_dir() else (path / name).unlink()

    caplog.clear()
    train(root_dir, remove)
    loud = [one.getMessage() for one in caplog.records if "DELETED OR MOVED" in one.getMessage()]
    assert len(loud) == (name != "tensorboard") and all(name in one for one in loud)
    assert sorted(os.listdir(root_dir)) == sorted(os.listdir(whole))
    assert [row.split(",")[0] for row in rows(root_dir)] == [row.split(",")[0] for row in rows(whole)]


def test_a_run_stops_where_another_one_has_taken_its_place(tmp_path):
    held = []

    def replace(path):
        os.rename(path, tmp_path / "elsewhere")
        path.mkdir()
        held.append(files.lock(path, replace))

    with pytest.raises(UsageError, match="is already used for training"):
        train(tmp_path / "run", replace)
    assert os.listdir(tmp_path / "run") == []
