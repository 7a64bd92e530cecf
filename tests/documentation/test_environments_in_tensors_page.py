"""docs/environments_in_tensors.md: its class passes the checks, and its commands train."""

import ast
import re
import shlex

import pytest
from test_examples import PROJECT

import alfish
from alfish.__main__ import main
from alfish.environments import FunctionalEnvironment, make_environment

pytestmark = pytest.mark.slow

PAGE = (PROJECT / "docs" / "environments_in_tensors.md").read_text()
(ROOM,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
COMMANDS = re.findall(r"^    (alfish .*)", PAGE, re.MULTILINE)
FEW = ("--gin_param=Trainer.num_env_steps=600", "--gin_param=make_environment.num_envs=4")
PLAIN = ("--gin_param=CompiledUnroller.compile=False", "--gin_param=Learner.compile=False")
PLAIN += ("--gin_param=EpochBatches.minibatch_size=64",)
FEW += ("--gin_param=Evaluate.num_episodes=1", "--gin_param=Trainer.unroll_length=32")


@pytest.fixture
def beside_the_file(tmp_path, monkeypatch):
    """A working directory with my_lab.py, as a reader has it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_lab.py").write_text(ROOM)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's compiler, at import
def test_the_class_of_the_page_has_no_problem(beside_the_file, capsys, untried_training, interpreted):
    (command,) = [one for one in COMMANDS if one.startswith("alfish check-env")]
    assert main(shlex.split(command)[1:]) == 0
    assert "problem" not in capsys.readouterr().out


def test_the_commands_of_the_page_train(beside_the_file):
    commands = [one for one in COMMANDS if one.startswith("alfish train")]
    assert len(commands) == 4
    for command in commands:
        # Compiling takes half a minute, and has tests of its own.
        assert main([*shlex.split(command)[1:], *FEW, *PLAIN]) == 0


def test_the_class_trains_by_python(beside_the_file, tmp_path):
    import my_lab

    assert 'alfish.train(environment=Room, conf="ppo_tensor.gin", num_env_steps=500_000' in PAGE
    few = dict(flag.removeprefix("--gin_param=").split("=") for flag in (*FEW, *PLAIN))
    settings = {name: ast.literal_eval(value) for name, value in few.items()}
    policy = alfish.train(environment=my_lab.Room, conf="ppo_tensor.gin", root_dir=tmp_path / "run", **settings)
    assert policy.act(my_lab.Room.observation_space.sample()) in (0, 1)


def test_each_id_of_the_page_exists():
    ids = set(re.findall(r"`(alfish/[\w-]+)`", PAGE))
    assert len(ids) == 8
    for env_id in ids:
        assert isinstance(make_environment(env_id), FunctionalEnvironment)
