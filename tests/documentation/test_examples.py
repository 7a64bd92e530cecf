"""The example in `examples/` is what the README shows, small, and runs."""

import json
import re
from pathlib import Path

import pytest

from alfish.__main__ import main

pytestmark = pytest.mark.slow

PROJECT = Path(__file__).parents[2]
EXAMPLE = PROJECT / "examples" / "reinforce.py"


def test_a_complete_algorithm_is_under_60_lines():
    assert len(EXAMPLE.read_text().splitlines()) < 60


def test_the_readme_quotes_the_example_exactly():
    readme = (PROJECT / "README.md").read_text()
    shown = re.search(r"```python\n(@gin.configurable\nclass Reinforce.*?)```", readme, re.DOTALL)
    assert shown is not None
    assert shown[1] in EXAMPLE.read_text()


def test_the_example_trains_from_its_gin_file(tmp_path, monkeypatch):
    monkeypatch.chdir(PROJECT)
    command = ["train", "--gin_file=examples/reinforce_cartpole.gin", f"--root_dir={tmp_path / 'run'}"]
    assert main([*command, "--gin_param=Trainer.num_env_steps=300", "--gin_param=Evaluate.num_episodes=1"]) == 0
    assert (tmp_path / "run" / "done").is_file()


def test_a_policy_clones_an_expert_that_overrides_actions(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(PROJECT)
    root_dir = tmp_path / "run"
    command = ["train", "--gin_file=examples/interventions.gin", f"--root_dir={root_dir}"]
    assert main([*command, "--gin_param=Evaluate.num_episodes=1"]) == 0
    capsys.readouterr()
    assert main(["evaluate", f"--root_dir={root_dir}", "--num_episodes=10", "--allow_import=examples", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["mean"] > -2, "at first it takes over in about 18 of 20 steps"


def test_custom_parts_can_be_used_from_a_gin_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(PROJECT)
    few = ["Trainer.num_env_steps=1024", "EpochBatches.num_epochs=1", "Announce.length=10.0", "Evaluate.num_episodes=1"]
    command = ["train", "--gin_file=examples/parts_cartpole.gin", f"--root_dir={tmp_path / 'run'}"]
    assert main([*command, *(f"--gin_param={one}" for one in few)]) == 0
    assert "Episodes are 10 steps long after" in capsys.readouterr().err
    assert "metrics/largest_reward" in (tmp_path / "run" / "metrics.csv").read_text()
