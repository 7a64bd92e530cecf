"""Files of a run with a right checksum and other content, or with bytes that are not text, are named in a sentence."""

import math
import shutil

import pytest
import torch

import alfish
from alfish import nest
from alfish.__main__ import main
from alfish.errors import UsageError
from alfish.runs.checkpoint_file import read_header, write_file
from alfish.runs.checkpoints import Checkpoints

CONF = """
import toys
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


def forge(root_dir, change, name="checkpoints", **header):
    """Changes the state of each checkpoint, and its header; the checksum is right again."""
    checkpoints = Checkpoints(root_dir / name)
    for step in checkpoints.steps():
        path = checkpoints.path(step)
        write_file(path, read_header(path, step)._replace(**header), change(checkpoints.load(step)[1]))


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
    assert f"{path} does not have the contents that this version of alfish saves" in words
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


@pytest.mark.parametrize("kind", [torch.int64, torch.complex64, torch.float64, list])
def test_weights_of_another_kind_are_named_with_their_file(run, capsys, kind):
    def change(state):
        name = next(name for name in state["algorithm"] if name.endswith("weight"))
        weight = state["algorithm"][name]
        return state | {"algorithm": state["algorithm"] | {name: [1.0] if kind is list else weight.to(kind)}}

    forge(run, change)
    [path] = (run / "checkpoints").glob("*.pt")
    words = refused(run, capsys, "evaluate")
    assert f"{path}: The checkpoint does not fit the DQN" in words
    assert ("is a list in" if kind is list else f"{str(kind).removeprefix('torch.')} in the checkpoint") in words


OUT_OF_RANGE = {
    "owed_steps is nan": lambda state: state | {"counters": state["counters"] | {"owed_steps": math.nan}},
    "iterations is -5": lambda state: state | {"counters": state["counters"] | {"iterations": -5}},
    "num_threads is 1000000000": lambda state: state | {"num_threads": 10**9},
    "consecutive_skips is nan": lambda state: (
        state | {"learner": state["learner"] | {"consecutive_skips": torch.tensor(math.nan)}}
    ),
}


@pytest.mark.parametrize("words", OUT_OF_RANGE)
def test_a_count_that_no_run_has_is_named(run, capsys, words):
    forge(run, OUT_OF_RANGE[words])
    [path] = (run / "checkpoints").glob("*.pt")
    said = refused(run, capsys, "train", "--gin_param=Trainer.num_env_steps=60")
    assert str(path) in said and words in said


def test_saved_rows_with_other_leaves_are_named(run, capsys):
    def change(state):
        return state | {"rows": nest.map(lambda x: x.double() if x.is_floating_point() else x, state["rows"])}

    forge(run, change, "replay")
    capsys.readouterr()
    assert main(["train", f"--root_dir={run}", "--gin_param=Trainer.num_env_steps=60"]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(
        "alfish train: the rows of the saved replay do not fit: reward is [] torch.float64 there, but"
    )


def test_no_command_reads_checkpoints_of_another_run(run, capsys):
    [path], [rows] = (run / "checkpoints").glob("*.pt"), (run / "replay").glob("*.pt")
    forge(run, lambda state: state, "replay", run="another")
    capsys.readouterr()
    assert main(["import", f"--source=run:{run}"]) == 2
    assert f"{rows} is a checkpoint of another run (another, " in capsys.readouterr().err
    forge(run, lambda state: state, run="another")
    for command, flags in {"pack": [f"--output={run}.zip"], "export-policy": [f"--output={run}.py"]}.items():
        assert f"{path} is a checkpoint of another run (another, " in refused(run, capsys, command, *flags)
    with pytest.raises(UsageError, match="is a checkpoint of another run"):
        alfish.load(run)


@pytest.mark.parametrize("content", ["one\ntwo", "\x1b[2J", "x" * 101, b"\xff", None])
@pytest.mark.parametrize("command", ["evaluate", "pack"])
def test_invalid_run_ids_are_not_shown(run, capsys, command, content):
    if content is None:
        (run / "run_id").unlink()
        (run.parent / "secret").write_text("the key of somebody")
        (run / "run_id").symlink_to(run.parent / "secret")
    else:
        (run / "run_id").write_bytes(content if isinstance(content, bytes) else content.encode())
    words = refused(run, capsys, command, *([f"--output={run}.zip"] if command == "pack" else []))
    assert f"{run / 'run_id'} " in words and "the key" not in words


def test_a_missing_best_checkpoint_is_named(run, capsys):
    (run / "checkpoints" / "best.json").write_text('{"steps": 5}')
    words = refused(run, capsys, "evaluate", "--checkpoint=best")
    assert f"{run}/checkpoints/best.json names the checkpoint at 5 steps, which is missing; load 'latest'" in words


def test_a_configuration_with_a_byte_order_mark_is_read(run):
    (run / "config.gin").write_bytes(b"\xef\xbb\xbf" + (run / "config.gin").read_bytes())
    assert main(["evaluate", f"--root_dir={run}", "--num_episodes=1"]) == 0


@pytest.mark.parametrize("command", ["evaluate", "pack"])
def test_a_configuration_that_is_a_directory_is_named(run, capsys, command):
    (run / "config.gin").unlink()
    (run / "config.gin").mkdir()
    words = refused(run, capsys, command, *([f"--output={run}.zip"] if command == "pack" else []))
    assert f"{run / 'config.gin'} cannot be read: it is not a regular file" in words
