"""A run's replay becomes a data set, row by row."""

import hashlib

import gin
import gymnasium
import pytest
from data_sets import STAMPED, TOY, about, assert_same, left_by, trained
from recorded import SPACES, assert_rows

from alfish.__main__ import main
from alfish.offline import OfflineBuffer, SourceReading, open_source


def test_a_runs_replay_is_exported_row_by_row(tmp_path, output, capsys):
    truncates = not output.startswith("minari:")
    name = trained(tmp_path, TOY + STAMPED.format(truncates=truncates, steps=200))
    kept = [episode for episode in open_source(name, SPACES).episodes() if episode.length]
    capsys.readouterr()
    assert main(["export", f"--root_dir={tmp_path}/run", f"--output={output}"]) == 0
    exported = output if output.startswith("minari:") else f"alfish:{output}"
    words = capsys.readouterr().out
    assert f"{len(kept)} kept" in words and f"OfflineBuffer.sources = ['{exported}']" in words
    assert_same(list(SourceReading([exported])), kept)
    buffer = OfflineBuffer([exported])
    assert buffer.spaces == SPACES
    assert_rows(buffer, kept)
    told = about(exported)
    assert told["algorithm"] == "DQN" and told["env_spec"] is None
    assert told["config"] == (tmp_path / "run" / "operative_config.gin").read_text()
    [path] = (tmp_path / "run" / "checkpoints").glob("*.pt")
    assert told["checkpoint"]["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert told["report"]["num_kept"] == len(kept)


gin.external_configurable(gymnasium.wrappers.TimeAwareObservation, module="test_export")
WRAPPED = """
make_environment.env_id = 'CartPole-v1'
make_environment.training_wrappers = [@StickyAction]
make_environment.wrappers = [@TimeAwareObservation]
Trainer.num_env_steps = 60
ReplayBatches.batch_size = 4
ReplayBatches.warmup_env_steps = 20
MLP.layers = (4,)
Evaluate.num_episodes = 1
"""


def test_exported_tasks_exclude_training_wrappers(tmp_path):
    output = tmp_path / "set"
    trained(tmp_path, "include 'dqn.gin'\nimport alfish.environments\n" + WRAPPED)
    assert main(["export", f"--root_dir={tmp_path}/run", f"--output={output}"]) == 0
    told = about(f"alfish:{output}")["env_spec"]
    assert told["id"] == "CartPole-v1"
    assert [wrapper["name"] for wrapper in told["additional_wrappers"]] == ["TimeAwareObservation"]


def test_a_run_without_replay_is_reported(tmp_path, refused):
    conf = "include 'ppo_cartpole.gin'\nTrainer.num_env_steps = 64\nMLP.layers = (4,)\nEvaluate.num_episodes = 1\n"
    (tmp_path / "conf.gin").write_text(conf)
    assert main(["train", f"--gin_file={tmp_path}/conf.gin", f"--root_dir={tmp_path}/run"]) == 0
    before = left_by(tmp_path)
    words = refused("export", f"--root_dir={tmp_path}/run", f"--output={tmp_path}/set")
    assert "has no replay/checkpoint-*.pt: an on-policy run keeps no rows" in words
    assert left_by(tmp_path) == before


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--output=x"], "--root_dir is missing"),
        (["--root_dir=x"], "--output is missing: give a directory to create, or a data set such as minari:"),
        (["--root_dir=nowhere", "--output=x"], "nowhere is not a run"),
    ],
)
def test_mistakes_are_reported_in_one_sentence(flags, words, refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert words in refused("export", *flags)
    assert left_by(tmp_path) == []
