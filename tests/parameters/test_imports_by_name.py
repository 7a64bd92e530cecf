"""What a configuration may import: anything in a file of the user, alfish and allowed modules in a saved run."""

import sys

import gin
import modules
import pytest

import alfish
from alfish.__main__ import main
from alfish.configuration import reading
from alfish.environments import make_environment
from alfish.errors import UsageError
from alfish.parameters import imports

ALGORITHM = "import alfish.algorithms.ppo\nTrainer.algorithm = @PPO\nTrainer.num_iterations = 1\n"
DYNAMIC = """from __gin__ import dynamic_registration
import pathlib
import alfish.training.trainer
pathlib.Path.touch.self = 'x'
alfish.training.trainer.Trainer.environment = @pathlib.Path.touch()
"""


@pytest.fixture(autouse=True)
def own_path(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory with a module that leaves a mark when it is executed, and the names of two others."""
    (tmp_path / "my_lab_of_tests.py").write_text(
        "from pathlib import Path\nimport gin\nfrom gymnasium.envs.classic_control import CartPoleEnv\n"
        f"Path({str(tmp_path / 'executed')!r}).touch()\n"
        "@gin.configurable(module='my_lab_of_tests')\nclass MyCartPole(CartPoleEnv):\n    pass\n"
    )
    for name in ("json.py", "random.py", "torch.py", "envpool.py"):
        (tmp_path / name).write_text("raise RuntimeError('a file of the working directory was executed')\n")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    modules.forget(["my_lab_of_tests"])


def stranger(tmp_path, text):
    """A run directory that someone else has made."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.gin").write_text(text)
    return tmp_path / "run"


COMMANDS = [["evaluate"], ["play"], ["record", "--output=data"], ["export", "--output=data"], ["train"]]


@pytest.mark.parametrize(
    "text, words",
    [
        (
            DYNAMIC,
            "has `from __gin__ import dynamic_registration`, a statement that lets a configuration call any function",
        ),
        (
            ALGORITHM + "import my_lab_of_tests\n",
            "imports 'my_lab_of_tests', which is not part of alfish; if you trust",
        ),
        (ALGORITHM + "include 'ppo_cartpole.gin'\n", "includes 'ppo_cartpole.gin'; the configuration of a run is one"),
        (
            ALGORITHM + "ID = 'my_lab_of_tests:My-v0'\nmake_environment.env_id = %ID\n",
            "make_environment.env_id imports 'my_lab_of_tests', which is not part of alfish; if you trust that module, "
            "add --allow_import=my_lab_of_tests",
        ),
        (
            ALGORITHM + "make_environment.env_id = 'GymV26Environment-v0'\n"
            "make_environment.env_kwargs = {'env_id': 'my_lab_of_tests:My-v0'}\n",
            "make_environment.env_kwargs imports 'my_lab_of_tests', which is not part of alfish",
        ),
    ],
)
def test_another_users_run_imports_and_calls_none_of_its_code(here, capsys, text, words):
    root_dir = stranger(here, text)
    for command in COMMANDS:
        assert main([*command, f"--root_dir={root_dir}"]) == 2
        said = capsys.readouterr().err
        assert words in said and said.startswith(f"alfish {command[0]}: ") and said.count("\n") == 1
    with pytest.raises(UsageError, match="my_lab_of_tests|dynamic_registration|is one file|no checkpoint"):
        alfish.load(root_dir)  # which builds no environment
    assert not (here / "executed").exists() and "my_lab_of_tests" not in sys.modules


def test_what_the_user_allows_or_has_imported_may_be_named(here, capsys):
    text = ALGORITHM + "import my_lab_of_tests\nmake_environment.env_id = @MyCartPole\n"
    root_dir = stranger(here, text)
    assert main(["evaluate", f"--root_dir={root_dir}", "--allow_import=my_lab_of_tests"]) == 2
    assert "checkpoint" in capsys.readouterr().err and (here / "executed").exists()  # the policy let it pass
    with pytest.raises(UsageError, match="checkpoint"):  # now it is imported already
        alfish.load(root_dir)
    with imports.restricted(["my_lab_of_tests"]):
        imports.admit("my_lab_of_tests.deep.inside", "here")
        with pytest.raises(UsageError, match="'my_lab_of_tests_and_more', which is not installed"):
            imports.admit("my_lab_of_tests_and_more", "here")
    with imports.restricted("my_lab_of_tests"), pytest.raises(UsageError, match="'m', which is not installed"):
        imports.admit("my_lab_of_tests.inside", "here")  # one name is one module, and not its letters
        imports.admit("m", "here")
    imports.admit("my_lab_of_tests_and_more", "here")  # in what the user has written


def test_a_missing_module_is_reported_before_permission_is_requested(here, capsys, monkeypatch):
    root_dir = stranger(here, ALGORITHM + "make_environment.env_id = 'my_lab_of_tests:My-v0'\n")
    assert main(["evaluate", f"--root_dir={root_dir}"]) == 2 and "--allow_import" in capsys.readouterr().err
    (here / "elsewhere").mkdir()
    monkeypatch.chdir(here / "elsewhere")
    assert main(["evaluate", f"--root_dir={root_dir}"]) == 2
    said = capsys.readouterr().err
    assert (
        "'my_lab_of_tests', which is not installed or not on PYTHONPATH; install it, or start in the directory" in said
    )
    assert "--allow_import" not in said and not (here / "executed").exists()


def test_the_policy_ends_with_the_run_that_was_opened(here):
    root_dir = stranger(here, ALGORITHM + "make_environment.env_id = 'CartPole-v1'\n")
    with reading.preserved(), reading.saved(root_dir / "config.gin"):
        assert imports.is_restricted()
    assert not imports.is_restricted()


def test_names_that_another_configuration_registered_dynamically_are_refused(here):
    gin.parse_config("from __gin__ import dynamic_registration\nimport fractions\nfractions.Fraction.numerator = 1\n")
    root_dir = stranger(here, ALGORITHM + "make_environment.env_id = @Fraction\n")
    with pytest.raises(UsageError, match="fractions.Fraction is registered dynamically, which the configuration of a"):
        alfish.load(root_dir)


def test_the_working_directory_is_searched_last_for_named_modules(here, capsys, untried_training):
    assert main(["confs"]) == 0 and main(["check-env", "--env_id=CartPole-v1", "--num_steps=200"]) == 0
    assert main(["train", "--gin_file=ppo_cartpole.gin", f"--root_dir={here / 'run'}", "--gin_param=PPO.gama=1"]) == 2
    assert str(here) not in sys.path
    mine = here / "mine.gin"
    mine.write_text("include 'ppo_cartpole.gin'\nimport my_lab_of_tests\nTrainer.num_iterations = 1\n")
    assert main(["train", f"--gin_file={mine}", f"--root_dir={here / 'run'}"]) == 2  # two budgets
    assert "exactly one budget" in capsys.readouterr().err
    assert sys.path[-1] == str(here) and sys.path.count(str(here)) == 1 and (here / "executed").exists()


def test_a_failing_import_is_reported_in_one_sentence(here, capsys):
    (here / "broken_module_of_tests.py").write_text("x = 1 / 0\n")
    (here / "needs_module_of_tests.py").write_text("import no_such_module_of_tests\n")
    for name, words in (
        ("broken_module_of_tests", "which raises ZeroDivisionError: division by zero; `python -c 'import broken_"),
        ("needs_module_of_tests", "which raises ModuleNotFoundError: No module named 'no_such_module_of_tests'"),
        ("absent_module_of_tests", "which is not installed or not on PYTHONPATH"),
    ):
        (here / "inner.gin").write_text(f"import {name}\n")
        (here / "mine.gin").write_text("include 'inner.gin'\n")
        for arguments, where in (
            ([f"--gin_param=import {name}", "--gin_file=ppo_cartpole.gin"], f"--gin_param=import {name}"),
            (["--gin_file=mine.gin"], "inner.gin"),
        ):
            assert main(["train", *arguments, f"--root_dir={here / 'run'}"]) == 2
            said = capsys.readouterr().err
            assert f"{where} imports {name!r}, {words}" in said and said.count("\n") == 1
        with pytest.raises(UsageError, match="make_environment.env_id imports"):
            make_environment(f"{name}:My-v0")
