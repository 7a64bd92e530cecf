"""`alfish verify`: a run is trained again, and its state is compared with a checkpoint bit by bit."""

import contextlib

import pytest
import torch

from alfish.__main__ import main
from alfish.bin import verify
from alfish.runs.checkpoints import checkpoints_of

CONF = """
include 'ppo.gin'
make_environment.env_id = 'CartPole-v1'
make_environment.num_envs = 2
Trainer.num_env_steps = 192
Trainer.unroll_length = 16
Trainer.listeners = [@CheckpointSaver(), @Evaluate()]
CheckpointSaver.period = 64
Evaluate.period = 64
Evaluate.num_episodes = 2
EpochBatches.num_epochs = 1
EpochBatches.minibatch_size = 8
MLP.layers = (8,)
Learner.compile = False
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("verify") / "run"
    conf = path.with_suffix(".gin")
    conf.write_text(CONF)
    assert main(["train", f"--gin_file={conf}", f"--root_dir={path}"]) == 0
    return path


@contextlib.contextmanager
def changed(run, old, new):
    """Has another text in the run's configuration within the context."""
    config = run / "config.gin"
    text = config.read_text()
    assert old in text
    config.write_text(text.replace(old, new))
    try:
        yield
    finally:
        config.write_text(text)


def test_a_run_is_repeated_up_to_each_checkpoint(run, capsys):
    files = sorted(path.name for path in run.rglob("*"))
    assert main(["verify", f"--root_dir={run}"]) == 0
    first, *_, last = checkpoints_of(run).steps()
    assert capsys.readouterr().out == f"{run} can be repeated here: after {first} steps, all values are bitwise equal\n"
    assert main(["verify", f"--root_dir={run}", "--checkpoint=latest"]) == 0
    assert f"after {last} steps, all values are bitwise equal" in capsys.readouterr().out
    assert sorted(path.name for path in run.rglob("*")) == files


def test_a_run_of_another_seed_is_not_repeated(run, capsys):
    with changed(run, "Trainer.num_env_steps = 192", "Trainer.num_env_steps = 192\nTrainer.seed = 1"):
        assert main(["verify", f"--root_dir={run}"]) == 1
    out = capsys.readouterr().out
    assert f"{run} cannot be repeated here: after {checkpoints_of(run).steps()[0]} steps" in out
    assert "of the entries differ, by at most" in out
    assert "the first evaluation that differs is eval/evaluation-000000000064.csv" in out


def test_a_run_with_other_steps_is_refused(run, capsys):
    with changed(run, "Trainer.unroll_length = 16", "Trainer.unroll_length = 24"):
        assert main(["verify", f"--root_dir={run}"]) != 0
    assert "another configuration wrote it" in capsys.readouterr().err


def test_bits_are_compared_and_not_values():
    state = {"algorithm": {"w": torch.tensor([0.0, float("nan")])}, "transforms": [], "learner": {"updates": 3}}
    same = {**state, "algorithm": {"w": torch.tensor([0.0, float("nan")])}}
    assert list(verify.differences(state, same)) == []
    changed = {**state, "algorithm": {"w": torch.tensor([-0.0, float("nan")])}, "learner": {"updates": 4, "x": 1}}
    assert list(verify.differences(state, changed)) == [
        "algorithm.w: only the signs of zeros, or the bits of nan, differ",
        "learner.updates: 3 in the checkpoint, 4 here",
        "learner.x is missing in the checkpoint",
    ]
    for other, words in (
        (torch.tensor([2.0, float("nan")]), "50% of the entries differ, by at most 2"),
        (torch.zeros(0), "'[2] torch.float32' in the checkpoint, '[0] torch.float32' here"),
        (torch.zeros(2).double(), "'[2] torch.float32' in the checkpoint, '[2] torch.float64' here"),
    ):
        assert next(verify.differences(state, {**state, "algorithm": {"w": other}})) == f"algorithm.w: {words}"


def test_a_run_that_time_ends_is_refused(run, capsys):
    with changed(run, "Trainer.num_env_steps = 192", "Trainer.wall_seconds = 1"):
        assert main(["verify", f"--root_dir={run}"]) != 0
    assert "its schedules follow the time" in capsys.readouterr().err
