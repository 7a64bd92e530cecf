"""A packed run is evaluated, loaded and continued as the run itself."""

import os
import shutil
import sys

import pytest
import torch
import yaml

import alfish
from alfish import nest
from alfish.__main__ import main
from alfish.analysis.report import report
from alfish.analysis.run_source import read_evaluations
from alfish.errors import UsageError
from alfish.exporting.packing import card, pack
from alfish.parameters.description import CONFIG_FILE, OPERATIVE_FILE
from alfish.runs.checkpoints import Checkpoints
from alfish.runs.packed import archive, fetching

ON_POLICY = {
    "num_env_steps": 160, "unroll_length": 16, "make_environment.num_envs": 2, "MLP.layers": (8,),
    "EpochBatches.minibatch_size": 16, "Evaluate.period": 80, "Evaluate.num_episodes": 2, "CheckpointSaver.period": 64,
}  # fmt: skip
OFF_POLICY = {
    "num_env_steps": 96, "unroll_length": 4, "make_environment.num_envs": 2, "MLP.layers": (8,),
    "ReplayBatches.warmup_env_steps": 16, "ReplayBatches.batch_size": 8, "ReplayBatches.capacity": 256,
    "Evaluate.num_episodes": 1, "CheckpointSaver.period": 32,
}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of PPO with a film."""
    root_dir = tmp_path_factory.mktemp("runs") / "ppo"
    alfish.train("PPO", "CartPole-v1", root_dir=root_dir, **ON_POLICY)
    (root_dir / "films").mkdir()
    (root_dir / "films" / "best return=9.0.mp4").write_bytes(b"film")
    (root_dir / "notes.txt").write_text("mine")
    return root_dir


def head_of(card):
    _, head, text = card.split("---\n", 2)
    return yaml.safe_load(head), text


def test_a_packed_run_acts_as_the_run(run, tmp_path, capsys):
    pack(run, tmp_path / "run.zip")
    policy, packed = alfish.load(run), alfish.load(tmp_path / "run.zip")
    for k in range(5):
        observation = policy.observation_space.sample()
        assert policy.act(observation, first=k == 0) == packed.act(observation, first=k == 0)
    words = []
    for place in (run, tmp_path / "run.zip"):
        assert main(["evaluate", f"--root_dir={place}", "--num_episodes=3", "--json"]) == 0
        words.append(capsys.readouterr().out)
    assert words[0] == words[1]


def test_only_files_of_the_run_are_packed(run, tmp_path):
    (run / "films" / ".film.12.34.tmp.mp4").write_bytes(b"of a process that was killed")
    manifest = pack(run, tmp_path / "run.zip")
    names = set(manifest.files)
    assert (tmp_path / "run.zip").read_bytes().count(b"killed") == 0
    assert {"config.gin", "README.md", "films/best return=9.0.mp4", "replay.mp4", "metrics.csv", "run_id"} <= names
    assert not [name for name in names if name.startswith(("tensorboard", "log", "notes"))]
    packed = [name for name in names if name.startswith("checkpoints/checkpoint")]
    checkpoints = Checkpoints(run / "checkpoints")
    steps = {checkpoints.steps()[-1], checkpoints.best()}
    assert packed and set(packed) == {f"checkpoints/{checkpoints.path(step).name}" for step in steps}


def test_the_card_has_the_fields_that_the_hub_reads(run, tmp_path):
    pack(run, tmp_path / "run.zip")
    archive.unpack(tmp_path / "run.zip", tmp_path / "new")
    head, text = head_of((tmp_path / "new" / "README.md").read_text())
    assert head["library_name"] == "alfish" and head["pipeline_tag"] == "reinforcement-learning"
    assert {"PPO", "CartPole-v1"} <= set(head["tags"])
    (model,) = head["model-index"]
    (result,) = model["results"]
    assert result["dataset"]["name"] == "CartPole-v1" and result["task"]["type"] == "reinforcement-learning"
    last = result["metrics"][0]
    summary = read_evaluations(run)
    values = summary[max(summary)]
    assert last["type"] == "mean_reward" and last["value"] == pytest.approx(sum(values) / len(values))
    assert "95 % interval [" in last["name"]
    assert '<video controls src="films/best return=9.0.mp4">' in text and "mean return" in text


def test_a_run_without_evaluation_has_a_card_without_metrics(run, tmp_path):
    shutil.copytree(run, tmp_path / "bare")
    shutil.rmtree(tmp_path / "bare" / "eval")
    pack(tmp_path / "bare", tmp_path / "run.zip")
    archive.unpack(tmp_path / "run.zip", tmp_path / "new")
    head, text = head_of((tmp_path / "new" / "README.md").read_text())
    assert "model-index" not in head and "was not evaluated" in text


def test_the_card_and_the_report_have_an_evaluation_of_another_name(run, tmp_path):
    named = shutil.copytree(run, tmp_path / "named")
    for path in (named / "eval").glob("evaluation-*.csv"):
        path.rename(path.with_name(path.name.replace("evaluation", "against_random")))
    for name in (OPERATIVE_FILE, CONFIG_FILE):
        if (path := named / name).is_file():
            kept = [line for line in path.read_text().splitlines() if not line.startswith("Evaluate.name")]
            path.write_text("\n".join([*kept, "Evaluate.name = 'against_random'", "Trainer.policies = 'each'", ""]))
    text = card(named, [], True)
    assert "was not evaluated" not in text and "| last |" in text and 'alfish.load("run.zip", policy="...")' in text
    assert "last evaluation" in report(named) and "none yet" not in report(named)


@pytest.mark.parametrize("replay", [True, False])
def test_a_run_continued_with_its_replay_buffer_is_bit_identical(tmp_path, replay, capsys):
    original = tmp_path / "original"
    alfish.train("DQN", "CartPole-v1", root_dir=original, **OFF_POLICY)
    command = ["pack", f"--root_dir={original}", f"--output={tmp_path / 'run.zip'}", *["--replay"] * replay]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert ("same updates" in said) == replay and ("buffer is not packed" in said) != replay
    assert main(["unpack", f"--input={tmp_path / 'run.zip'}", f"--root_dir={tmp_path / 'copy'}"]) == 0
    weights = []
    for root_dir in (original, tmp_path / "copy"):
        alfish.train("DQN", "CartPole-v1", root_dir=root_dir, **{**OFF_POLICY, "num_env_steps": 160})
        _, state = Checkpoints(root_dir / "checkpoints").load("latest")
        assert state["counters"]["env_steps"] >= 160
        weights.append(nest.leaves(state["algorithm"]))
    equal = all(torch.equal(a, b) for a, b in zip(*weights) if isinstance(a, torch.Tensor))
    assert equal == replay


def test_unpackable_runs_are_reported_in_one_sentence(run, tmp_path, capsys):
    with pytest.raises(UsageError, match="no replay buffer to pack"):
        pack(run, tmp_path / "run.zip", replay=True)
    with pytest.raises(UsageError, match="is not a run"):
        pack(tmp_path, tmp_path / "run.zip")
    (tmp_path / "config.gin").write_text("")
    with pytest.raises(UsageError, match="no checkpoint yet"):
        pack(tmp_path, tmp_path / "run.zip")
    for arguments, words in (
        (["pack"], "--root_dir is missing"),
        (["pack", f"--root_dir={run}"], "--output is missing"),
        (["pack", f"--root_dir={run}", "--output=run.tar"], "must end in .zip"),
        (["pack", f"--root_dir={run}", f"--output={tmp_path}/no/run.zip"], "there is no directory"),
        (["unpack", f"--root_dir={tmp_path}/x"], "--input is missing"),
        (["unpack", "--input=run.zip"], "--root_dir is missing"),
        (["unpack", f"--input={tmp_path}/none.zip", f"--root_dir={tmp_path}/x"], "there is no file"),
    ):
        assert main(arguments) == 2
        said = capsys.readouterr().err
        assert words in said and said.count("\n") == 1
    assert not list(tmp_path.glob("*.zip"))


def test_a_repository_whose_card_was_removed_is_unpacked(run, tmp_path, monkeypatch):
    pack(run, tmp_path / "run.zip")
    archive.unpack(tmp_path / "run.zip", tmp_path / "repository")
    (tmp_path / "repository" / "README.md").unlink()
    monkeypatch.setattr(fetching, "download", lambda name: tmp_path / "repository")
    fetching.unpack("hf:org/name", tmp_path / "new")
    assert not (tmp_path / "new" / "README.md").exists() and (tmp_path / "new" / "config.gin").is_file()


def test_nothing_is_written_into_the_copy_of_a_packed_run(run, tmp_path, capsys):
    pack(run, tmp_path / "run.zip")
    for command in (["evaluate", "--video"], ["watch", "--idle_seconds=0"], ["train"]):
        assert main([*command, f"--root_dir={tmp_path / 'run.zip'}"]) == 2
        assert "run.zip is packed; unpack it first with `alfish unpack`" in capsys.readouterr().err


def test_the_configuration_of_a_packed_run_is_not_trusted(run, tmp_path, capsys):
    """As that of any run: docs/security.md."""
    shutil.copytree(run, tmp_path / "theirs")
    config = tmp_path / "theirs" / "config.gin"
    config.write_text("import antigravity\n" + config.read_text())
    pack(tmp_path / "theirs", tmp_path / "run.zip")
    alfish.load(tmp_path / "run.zip")  # which needs nothing of that module
    assert "antigravity" not in sys.modules
    assert main(["evaluate", f"--root_dir={tmp_path / 'run.zip'}"]) == 2
    assert "antigravity" in capsys.readouterr().err


def test_an_older_checkpoint_is_packed_instead_of_a_damaged_one(run, tmp_path):
    root_dir = shutil.copytree(run, tmp_path / "run")
    checkpoints = Checkpoints(root_dir / "checkpoints")
    (root_dir / "checkpoints" / "best.json").unlink(missing_ok=True)
    *_, older, newest = checkpoints.steps()
    checkpoints.path(newest).write_bytes(checkpoints.path(newest).read_bytes()[:-100])
    manifest = pack(root_dir, tmp_path / "run.zip")
    assert manifest.about["checkpoints"] == [older]
    assert f"checkpoints/{checkpoints.path(newest).name}" not in manifest.files
    for step in checkpoints.steps():
        checkpoints.path(step).write_bytes(b"damaged")
    with pytest.raises(UsageError, match="None of the .* checkpoints in .*run/checkpoints is readable"):
        pack(root_dir, tmp_path / "other.zip")
    assert not (tmp_path / "other.zip").exists()


def test_links_out_of_the_run_are_not_packed_or_shown(run, tmp_path, capsys):
    root_dir = shutil.copytree(run, tmp_path / "run")
    (tmp_path / "secret").write_bytes(b"the key of somebody")
    (root_dir / "films" / "a.mp4").symlink_to(tmp_path / "secret")
    assert main(["report", f"--root_dir={root_dir}", f"--output={tmp_path / 'x.html'}"]) == 0
    page = (tmp_path / "x.html").read_text()
    assert "dGhlIGtleSBvZiBzb21lYm9keQ" not in page and "a.mp4 is a link that leads out of the run" in page
    with pytest.raises(UsageError, match="films/a.mp4 is a link that leads out of the run, to .*secret; put the file"):
        pack(root_dir, tmp_path / "run.zip")
    assert not (tmp_path / "run.zip").exists()


def test_films_with_undecodable_names_are_shown(run, tmp_path):
    root_dir = shutil.copytree(run, tmp_path / "run")
    with open(os.fsencode(root_dir / "films") + b"/\xff.mp4", "wb") as file:
        file.write(b"film")
    assert main(["report", f"--root_dir={root_dir}", f"--output={tmp_path / 'x.html'}"]) == 0
    with pytest.raises(UsageError, match=r"'films/\\udcff.mp4' cannot be packed"):
        pack(root_dir, tmp_path / "run.zip")


def test_films_outside_the_run_are_not_searched(run, tmp_path):
    root_dir = shutil.copytree(run, tmp_path / "run")
    shutil.rmtree(root_dir / "films")
    (root_dir / "films").symlink_to("/")
    with pytest.raises(UsageError, match="run/films is a link that leads out of the run, to /; put"):
        pack(root_dir, tmp_path / "run.zip")
