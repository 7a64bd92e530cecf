"""Files of a run with a right checksum and other content, or with bytes that are not text, are named in a sentence."""

import shutil

import pytest

import alfish
from alfish.__main__ import main
from alfish.errors import UsageError
from alfish.runs.checkpoint_file import read_header, write_file
from alfish.runs.checkpoints import Checkpoints

CONF = """
import alfish.environments.toy
include 'dqn.gin'
make_environment.env_id = @Stamped
Trainer.num_env_steps = 40
ReplayBatches.batch_size = 4
ReplayBatches.warmup_env_steps = 20
MLP.layers = (4,)
Evaluate.num_episodes = 1
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    directory = tmp_path_factory.mktemp("trained")
    (directory / "conf.gin").write_text(CONF)
    assert main(["train", f"--gin_file={directory}/conf.gin", f"--root_dir={directory}/run"]) == 0
    return directory


@pytest.fixture
def run(trained, tmp_path):
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    return tmp_path / "run"


def forge(run, change):
    """Changes the state of each checkpoint; the checksum is right again."""
    checkpoints = Checkpoints(run / "checkpoints")
    for step in checkpoints.steps():
        path = checkpoints.path(step)
        write_file(path, read_header(path, step), change(checkpoints.load(step)[1]))


def refused(run, capsys, command, *flags):
    capsys.readouterr()
    assert main([command, f"--root_dir={run}", *flags]) == 2
    words = capsys.readouterr().err
    assert words.count("\n") == 1 and words.startswith(f"alfish {command}: ")
    return words


FORGED = {
    "no config": lambda state: {name: value for name, value in state.items() if name != "config"},
    "no counters": lambda state: {name: value for name, value in state.items() if name != "counters"},
    "counters without steps": lambda state: {**state, "counters": {}},
    "steps in words": lambda state: {**state, "counters": {"env_steps": "many"}},
    "a configuration in a list": lambda state: {**state, "config": [1]},
    "a configuration of a number": lambda state: {**state, "config": {"operative_config.gin": 3}},
    "None": lambda state: None,
    "a number": lambda state: 3,
}


@pytest.mark.parametrize("command", ["export", "record"])
@pytest.mark.parametrize("name", FORGED)
def test_a_checkpoint_of_other_content_is_named(run, capsys, command, name):
    forge(run, FORGED[name])
    words = refused(run, capsys, command, f"--output={run}/set")
    [path] = (run / "checkpoints").glob("*.pt")
    assert f"{path} does not hold what this alfish saves" in words
    assert not (run / "set").exists()


@pytest.mark.parametrize("command", ["train", "evaluate", "export", "record"])
def test_a_configuration_that_is_not_text_is_named(run, capsys, command):
    config = run / "config.gin"
    config.write_bytes(b"# \xe9\n" + config.read_bytes())
    words = f"{config} is not text in UTF-8: line 1 has the byte 0xe9; save it as UTF-8, or restore it from a copy"
    flags = {"train": [f"--gin_file={run.parent}/conf.gin"], "evaluate": []}.get(command, [f"--output={run}/set"])
    assert words in refused(run, capsys, command, *flags)
    with pytest.raises(UsageError, match="is not text in UTF-8: line 1"):
        alfish.load(run)
