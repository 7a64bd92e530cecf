"""docs/own_task.md: its file is that of examples/, and its commands and code run in the order of the page."""

import re
import shlex

import pytest
from test_examples import PROJECT

from alfish.__main__ import main

pytestmark = pytest.mark.slow

PAGE = (PROJECT / "docs" / "own_task.md").read_text()
EXAMPLE = (PROJECT / "examples" / "tanks.py").read_text()
FEW = ("--gin_param=Trainer.num_env_steps=2000", "--gin_param=Evaluate.num_episodes=1")
FEW += ("--gin_param=EpochBatches.num_epochs=1",)
COMMANDS = re.findall(r"^    (alfish .*)", PAGE, re.MULTILINE)
BLOCKS = [block for block in re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE) if block != EXAMPLE]
CHECKED = re.search(r"^```text\n(observation .*?)^```", PAGE, re.DOTALL | re.MULTILINE)


@pytest.fixture
def beside_the_file(tmp_path, monkeypatch):
    """A working directory with tanks.py, as a reader has it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "tanks.py").write_text(EXAMPLE)


def run(command, *more):
    return main([*shlex.split(command)[1:], *more])


def test_the_page_quotes_the_example_exactly():
    assert f"```python\n{EXAMPLE}```" in PAGE


def test_check_env_prints_what_the_page_shows(beside_the_file, capsys, untried_training):
    (command,) = [one for one in COMMANDS if one.startswith("alfish check-env")]
    assert run(command) == 0
    printed = capsys.readouterr().out
    for line in CHECKED[1].splitlines():
        pattern = re.escape(line).replace(r"\.\.\.", ".*")
        pattern = re.sub(r"about\\ [\d,.]+\\ (seconds?|minutes?|hours)?", r"about .*", pattern)
        assert re.search(rf"^{pattern}$", printed, re.MULTILINE), line


def test_the_policy_of_the_page_is_trained_evaluated_and_used(beside_the_file, capsys):
    random, by_python, use = BLOCKS
    names = {}
    exec(compile(random, "own_task.md", "exec"), names)
    assert -230 < float(capsys.readouterr().out) < -170
    train, evaluate = [one for one in COMMANDS if one.startswith(("alfish train", "alfish evaluate"))]
    assert run(train, *FEW) == 0
    assert run(evaluate, "--num_episodes=2") == 0
    assert "num_env_steps=100_000" in by_python
    exec(compile(by_python.replace("100_000", "2_000, **{'EpochBatches.num_epochs': 1}"), "own_task.md", "exec"), names)
    capsys.readouterr()
    exec(compile(use, "own_task.md", "exec"), names)
    assert float(capsys.readouterr().out) < 0
