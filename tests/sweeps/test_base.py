"""The configuration of a group of runs: checked with every variant before anything starts, and copied."""

import pytest

from alfish.errors import UsageError
from alfish.sweeps.base import BASE, Base

RATES = [["Learner.learning_rate=1e-3"], ["Learner.learning_rate=1e-2"]]


def test_a_copy_with_another_configuration_is_recognized(toy, tmp_path):
    base = Base.read([str(toy)], ["Trainer.seed=3"], RATES)
    assert base.seed == 3
    base.write(tmp_path / "sweep")
    copy = str(tmp_path / "sweep" / BASE / "config.gin")
    assert Base.read([copy], [], RATES).difference(tmp_path / "sweep") == ""
    other = Base.read([str(toy)], ["Trainer.seed=3", "Trainer.num_env_steps=2001"], RATES)
    assert other.difference(tmp_path / "sweep").splitlines() == [
        "-Trainer.num_env_steps = 2000",
        "+Trainer.num_env_steps = 2001",
    ]


@pytest.mark.parametrize(
    "variants, words",
    [
        ([["PPO.gama=0.9"]], "did you mean gamma?"),
        ([["PPO.gamma=0.9"], ["PPO.gamma=1.5"]], "PPO.gamma is 1.5"),
        ([["SAC.gamma=0.9"]], "SAC"),
        ([["Linear.start=0.9"]], "nothing reads"),
        ([["Trainer.listeners=[@CheckpointSaver()]"]], "no @Evaluate()"),
        ([["Evaluate.name='other'"]], "no @Evaluate() with the name 'evaluation'"),
    ],
)
def test_bindings_are_refused_before_anything_starts(toy, tmp_path, variants, words):
    with pytest.raises(UsageError, match=words.replace("(", r"\(").replace(")", r"\)").replace("?", r"\?")):
        Base.read([str(toy)], [], variants)


def test_a_run_that_is_called_base_is_not_changed(toy, tmp_path, monkeypatch):
    (tmp_path / BASE / "checkpoints").mkdir(parents=True)
    (tmp_path / BASE / "checkpoints" / "checkpoint-000000000100.pt").touch()
    (tmp_path / BASE / "config.gin").write_text(toy.read_text() + "Trainer.seed = 8\n")
    monkeypatch.chdir(tmp_path)
    assert Base.read([str(toy)], ["Trainer.seed=3"], RATES).seed == 3


def test_an_unread_binding_is_refused_unless_a_variant_replaces_its_reader(toy):
    toy.write_text(toy.read_text() + "Learner.learning_rate = @rate/Linear()\nrate/Linear.start = 1e-3\n")
    Base.read([str(toy)], [], RATES)
    with pytest.raises(UsageError, match="nothing reads other/Linear.start"):
        Base.read([str(toy)], ["other/Linear.start=1e-3"], [["PPO.gamma=0.9"]])
