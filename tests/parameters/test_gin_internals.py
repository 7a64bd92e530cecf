"""gin's private names are used in one module only, and code that does not need them works without them."""

import builtins
import contextlib
import functools
import re
from pathlib import Path

import gin
import pytest

import alfish
from alfish.__main__ import main
from alfish.algorithms.ppo import PPO
from alfish.configuration import reading
from alfish.environments import make_environment
from alfish.errors import UsageError
from alfish.parameters import differences, gin_internals
from alfish.unrollers.workers.environment_maker import EnvironmentMaker

PACKAGE = Path(alfish.__file__).parent


def test_entries_of_dicts_keep_their_order_in_texts_and_workers():
    given = "{'speed': 'info:v', 'energy': 'info:e'}"
    with reading.preserved():
        reading.read(["ppo_cartpole.gin"], [f"make_environment.rewards={given}"])
        text, digest = reading.text(), reading.digest()
        maker = EnvironmentMaker(gin.get_bindings("alfish.Trainer")["environment"])
        reading.read(["ppo_cartpole.gin"], ["make_environment.rewards={'energy': 'info:e', 'speed': 'info:v'}"])
        assert differences.difference(text, reading.text()) == "" and digest == reading.digest()
        reading.read(["ppo_cartpole.gin"], ["make_environment.rewards={'energy': 'info:v', 'speed': 'info:e'}"])
        assert differences.difference(text, reading.text()) and digest != reading.digest()
        gin.clear_config()
        maker()
        assert list(gin.query_parameter("make_environment.rewards")) == ["speed", "energy"]
    assert f"make_environment.rewards = {given}" in text


def test_a_value_that_no_configuration_can_save_is_refused():
    with (
        reading.preserved(),
        pytest.raises(UsageError, match="this call binds make_environment.env_kwargs to {'limit': inf, 'size': 3}"),
    ):
        reading.read(["ppo_cartpole.gin"], ["make_environment.env_kwargs={'limit': 1e999, 'size': 3}"])


def test_no_other_module_uses_private_names_of_gin():
    private = re.compile(r"\bgin\.(config|config_parser|selector_map|utils)\b|\bgin\._|^\s*from gin\b", re.MULTILINE)
    users = [str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if private.search(path.read_text())]
    assert users == ["parameters/gin_internals.py"]


def test_moved_gin_internals_affect_only_configurations(tmp_path, monkeypatch, capsys):
    def moved(name, module="gin.config"):
        return hidden(f"not_{name}", module)

    hidden = gin_internals._name_of
    monkeypatch.setattr(gin_internals, "_name_of", moved)
    environment = functools.partial(make_environment, "CartPole-v1", num_envs=1)
    parts = {"algorithm": functools.partial(PPO, gamma=0.5), "environment": environment}
    alfish.Trainer(tmp_path / "run", **parts, num_iterations=1, unroll_length=8, device="cpu").train()
    assert main(["train", "--gin_file=ppo_cartpole.gin", f"--root_dir={tmp_path / 'other'}"]) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("alfish train: the installed gin-config has no gin.config")
    assert "install gin-config 0.5.0, or build the Trainer in Python" in said
    monkeypatch.undo()
    with pytest.raises(UsageError, match="which no configuration can refer to: construct the Trainer in Python"):
        alfish.load(tmp_path / "run")
    with contextlib.closing(alfish.Trainer(tmp_path / "run", **parts, num_iterations=1, device="cpu")) as trainer:
        assert trainer.load_policy() == 8


def test_a_class_may_be_defined_again_in_a_notebook(monkeypatch):
    def define():
        return gin.configurable(module="notebook")(type("Cell", (), {"__init__": lambda self, size=1: None}))

    gin_internals.allow_redefinitions()
    define()
    with pytest.raises(ValueError, match="already exists"):
        define()
    monkeypatch.setattr(builtins, "__IPYTHON__", True, raising=False)
    gin_internals.allow_redefinitions()
    try:
        assert gin.get_configurable("notebook.Cell") is not define()
        with gin_internals.redefining():
            pass
        define()  # still allowed
    finally:
        gin.exit_interactive_mode()
    with pytest.raises(ValueError, match="already exists"):
        define()
