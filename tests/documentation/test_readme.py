"""The commands of README.md and docs/: their subcommands, flags and files exist. `.ci/readme_commands.py` runs them."""

import importlib.util
import itertools
import re
import shlex
from pathlib import Path

import pytest
import yaml
from absl.flags import UnrecognizedFlagError

from alfish.__main__ import SUBCOMMANDS, module_of
from alfish.configuration import locating

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.fixture(scope="module")
def readme_commands():
    spec = importlib.util.spec_from_file_location("readme_commands", ROOT / ".ci" / "readme_commands.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_of_a_page_have_flags_and_files_that_exist(page, readme_commands, monkeypatch):
    monkeypatch.chdir(ROOT)
    text = page.read_text()
    scripts = [line for script in blocks(text, "bash") for line in script.splitlines() if line.startswith("alfish ")]
    commands = [shlex.split(command, comments=True) for command in [*readme_commands.commands(text), *scripts]]
    for command in [*commands, *(container["command"] for container in containers(text))]:
        flags = flags_of(command)
        for file in flags.gin_file if flags is not None and "gin_file" in flags else []:
            if page.name == "README.md":
                locating.find(file)


def blocks(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def containers(text):
    """Containers of the Kubernetes jobs in a page."""
    jobs = [job for block in blocks(text, "yaml") for job in yaml.safe_load_all(block)]
    return [container for job in jobs for container in job["spec"]["template"]["spec"]["containers"]]


def flags_of(command):
    """Flags of a command of alfish, which torchrun or environment variables may precede; None: of another command."""
    words = [word for word in command if word != "..."]
    while words and re.fullmatch(r"\w+=.*", words[0]):
        words.pop(0)
    if words[:1] == ["torchrun"]:
        words = words[words.index("-m") + 1 :]
    if words[:1] != ["alfish"] or words == ["alfish", "--help"]:
        return None
    assert words[1] in SUBCOMMANDS, command
    module = importlib.import_module(module_of(words[1]))
    flags = module.FLAGS
    for flag in flags:
        flags[flag].unparse()
    rest = flags([" ".join(command), *itertools.takewhile("&".__ne__, words[2:])])[1:]
    assert not rest or getattr(module, "TAKES_WORDS", False), command
    return flags


def test_commands_are_found_in_scripts_and_in_kubernetes_jobs_and_behind_torchrun(readme_commands):
    text = (ROOT / "docs" / "scale.md").read_text()
    (job,) = containers(text)
    assert flags_of(job["command"]).gin_file == ["ppo_halfcheetah.gin"]
    with pytest.raises(UnrecognizedFlagError):
        flags_of([*job["command"], "--rootdir=x"])
    behind = [shlex.split(command) for command in readme_commands.commands(text) if "torchrun" in command]
    assert all(flags_of(command).gin_file for command in behind) and len(behind) == 3
    assert flags_of(["RAY_ADDRESS=HEAD:6379", "alfish", "sweep", "--ray", "..."]).ray
    assert flags_of(["pip", "install", "alfish"]) is None


def test_readme_has_the_commands_of_a_first_hour(readme_commands):
    found = readme_commands.commands((ROOT / "README.md").read_text())
    for start in ("git clone", "alfish train", "alfish evaluate", "alfish play", "alfish record", "alfish import"):
        assert any(command.startswith(start) for command in found), start
    # A rule that no command needs any more is a mistake.
    for table in (readme_commands.SKIPPED, readme_commands.APPENDED, readme_commands.REPLACED):
        for pattern in table:
            assert any(readme_commands.first({pattern: ""}, command) is not None for command in found), pattern


def test_commands_of_alfish_without_operators_and_patterns_need_no_shell(readme_commands):
    plain = "alfish plot 'runs/*' --output=a.png", 'alfish train --search="x=log(1, 2)"', "alfish confs ppo"
    assert not any(map(readme_commands.needs_shell, plain))
    others = "alfish plot runs/*", "alfish confs > a", "alfish confs | head", "torchrun -m alfish", "alfish play $RUN"
    assert all(map(readme_commands.needs_shell, others))


def test_a_command_that_fails_is_found(readme_commands, tmp_path, monkeypatch, capsys):
    (tmp_path / "page").mkdir(), (tmp_path / "page" / "examples").mkdir(), (tmp_path / "run").mkdir()
    page = tmp_path / "page" / "README.md"
    page.write_text(
        "Text.\n\n    true        # all is well\n    pip install nothing\n\n"
        "```python\nraise\n```\n\n```sh\nfalse\ntrue\n```\n"
    )
    monkeypatch.chdir(tmp_path / "run")
    assert readme_commands.main(page) == 1
    words = capsys.readouterr().out
    assert "s  true" in words and "skipped  pip install nothing" in words and "exit status 1 of: false" in words
    monkeypatch.chdir(tmp_path / "page")
    assert readme_commands.main(page) == 2
