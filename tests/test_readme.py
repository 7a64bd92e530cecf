"""The commands of README.md and docs/: their subcommands, flags and files exist. `.ci/readme_commands.py` runs them."""

import importlib.util
import shlex
from pathlib import Path

import pytest

from alfish.__main__ import SUBCOMMANDS, module_of
from alfish.configuration import locating

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.fixture(scope="module")
def readme_commands():
    spec = importlib.util.spec_from_file_location("readme_commands", ROOT / ".ci" / "readme_commands.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_of_a_page_have_flags_and_files_that_exist(page, readme_commands, monkeypatch):
    monkeypatch.chdir(ROOT)
    for command in readme_commands.commands(page.read_text()):
        name, *arguments = shlex.split(command, comments=True) or [""]
        if name != "alfish":
            continue
        assert arguments[0] in SUBCOMMANDS, command
        module = importlib.import_module(module_of(arguments[0]))
        flags = module.FLAGS
        for flag in flags:
            flags[flag].unparse()
        words = flags([command, *arguments[1:]])[1:]
        assert not words or getattr(module, "TAKES_WORDS", False), command
        for file in flags.gin_file if "gin_file" in flags else []:
            if page.name == "README.md":
                locating.find(file)


def test_readme_has_the_commands_of_a_first_hour(readme_commands):
    found = readme_commands.commands((ROOT / "README.md").read_text())
    for start in ("git clone", "alfish train", "alfish evaluate", "alfish play", "alfish record", "alfish import"):
        assert any(command.startswith(start) for command in found), start
    # A rule that no command needs any more is a mistake.
    for table in (readme_commands.SKIPPED, readme_commands.APPENDED, readme_commands.REPLACED):
        for pattern in table:
            assert any(readme_commands.first({pattern: ""}, command) is not None for command in found), pattern


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
