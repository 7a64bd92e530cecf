"""Runs that this user has trained on this machine are opened without a flag; all others ask for one."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import modules
import pytest

import alfish
from alfish.__main__ import main
from alfish.errors import UsageError
from alfish.runs import trust

MODULE = """
import gin
from gymnasium.envs.classic_control import CartPoleEnv
from gymnasium.wrappers import TimeLimit


@gin.configurable(module="lab_of_trust")
def made():
    return TimeLimit(CartPoleEnv(), 20)
"""


@pytest.fixture
def lab(tmp_path, monkeypatch):
    """A working directory with a module of the user's own, and a state directory of its own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path / "home")
    Path("lab_of_trust.py").write_text(MODULE)
    yield tmp_path
    forget()


def forget():
    """Makes this process one that has not imported the module, as each command is."""
    modules.forget(["lab_of_trust"])
    sys.path[:] = [one for one in sys.path if one != os.getcwd()]


SHORT = {"EpochBatches.num_epochs": 1, "Evaluate.num_episodes": 1}


def trained(*arguments):
    settings = ["--gin_file=ppo_cartpole.gin", "--gin_param=Trainer.num_env_steps=256", *arguments]
    settings += [f"--gin_param={name}={value}" for name, value in SHORT.items()]
    task = "--gin_param=make_environment.env_id='lab_of_trust:made'"
    assert main(["train", "--root_dir=run", task, *settings]) == 0
    forget()


def evaluated(root_dir="run", *arguments):
    status = main(["evaluate", f"--root_dir={root_dir}", "--num_episodes=1", *arguments])
    forget()
    return status


def test_the_users_own_run_needs_no_flag(lab, capsys):
    trained()
    [entry] = (lab / "state" / "alfish" / "trusted").iterdir()
    assert entry.stat().st_mode & 0o777 == 0o600 and entry.read_text() == "lab_of_trust\n"
    assert entry.parent.stat().st_mode & 0o777 == 0o700
    assert evaluated() == 0
    alfish.load("run")
    forget()
    assert main(["train", "--root_dir=run", "--gin_param=Trainer.num_env_steps=512"]) == 0  # has another text
    forget()
    assert evaluated() == 0
    assert main(["pack", "--root_dir=run", "--output=run.zip"]) == 0
    assert evaluated("run.zip") == 0


def test_a_run_that_python_trained_is_opened_without_a_flag(lab):
    sys.path.append(os.getcwd())
    alfish.train("PPO", "lab_of_trust:made", root_dir="run", num_env_steps=256, **SHORT)
    forget()
    assert evaluated() == 0


def test_a_changed_or_foreign_run_requires_the_flag(lab, monkeypatch, capsys):
    trained()
    config = Path("run/config.gin")
    text = config.read_text()
    config.write_text(f"{text}\n# changed\n")
    capsys.readouterr()
    assert evaluated() == 2
    words = capsys.readouterr().err
    assert "add --allow_import=lab_of_trust, or set ALFISH_ALLOW_" in words
    assert "ALFISH_ALLOW_IMPORT=lab_of_trust\n" in words
    assert evaluated("run", "--allow_import=lab_of_trust") == 0
    with monkeypatch.context() as patch:
        patch.setenv("ALFISH_ALLOW_IMPORT", "other, lab_of_trust")
        assert evaluated() == 0
    config.write_text(text)
    monkeypatch.setenv("XDG_STATE_HOME", str(lab / "another"))
    assert evaluated() == 2


def test_opening_a_run_with_a_flag_does_not_record_it(lab):
    trained()
    shutil.rmtree(lab / "state")
    assert (
        main(["train", "--root_dir=run", "--gin_param=Trainer.num_env_steps=512", "--allow_import=lab_of_trust"]) == 0
    )
    forget()
    assert evaluated() == 2


def test_a_module_of_the_same_name_in_another_directory_is_not_imported(lab, monkeypatch):
    trained()
    shutil.copytree("run", lab / "elsewhere" / "run")
    (lab / "elsewhere" / "lab_of_trust.py").write_text(f"{MODULE}\nopen('executed', 'w').close()\n")
    monkeypatch.chdir(lab / "elsewhere")
    assert evaluated() == 2
    assert not Path("executed").exists()


def test_an_entry_that_others_may_write_is_not_believed(lab):
    trained()
    [entry] = (lab / "state" / "alfish" / "trusted").iterdir()
    entry.chmod(0o666)
    assert evaluated() == 2


def test_an_unwritable_state_directory_is_named_only_with_the_flag(lab, monkeypatch, capsys):
    (lab / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(lab / "file"))
    trained()
    assert "recorded" not in capsys.readouterr().err
    assert evaluated() == 2
    assert f"; runs that you train here are not marked as your own: [Errno 20] Not a directory: '{lab / 'file'}" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize(
    "line",
    [
        "import lab_of_trust.inside",
        "from lab_of_trust import inside",
        "# part: lab_of_trust.inside:Net",
        "make_environment.wrappers = [['lab_of_trust.inside:Wrapper', {'a': 1}]]",
        "Game.name = 'lab_of_trust.inside'",
    ],
)
def test_each_way_to_name_a_module_is_recorded(lab, line):
    trust.record(f"{line}\n")
    [entry] = (lab / "state" / "alfish" / "trusted").iterdir()
    assert entry.read_text() == "lab_of_trust.inside\n"


def test_a_configuration_that_is_a_pipe_is_refused_without_waiting(lab):
    Path("run").mkdir()
    os.mkfifo("run/config.gin")
    with pytest.raises(UsageError, match=r"config\.gin"):
        alfish.load("run")


def test_a_configuration_without_modules_of_the_user_needs_no_entry(lab):
    trust.record("import alfish.algorithms.ppo\nTrainer.algorithm = @PPO\n")
    assert not (lab / "state").exists()


def test_concurrent_and_killed_writers_leave_whole_entries(lab):
    program = (
        "import os, sys\nfrom alfish.runs import trust\n"
        "for number in range(40):\n    trust.record(f\"make_environment.env_id = 'lab_of_trust:A{number}'\")\n"
        "os.kill(os.getpid(), 9)\n"
    )
    processes = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(2)]
    assert [process.wait() for process in processes] == [-9] * 2
    entries = list((lab / "state" / "alfish" / "trusted").iterdir())
    assert len(entries) == 40 and {entry.read_text() for entry in entries} == {"lab_of_trust\n"}
