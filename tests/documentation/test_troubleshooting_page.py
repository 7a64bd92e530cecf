"""docs/troubleshooting.md quotes what the code says: its commands are run, and its other messages found in the code."""

import ast
import functools
import re
import shlex
from pathlib import Path

import pytest

import alfish
from alfish.__main__ import main

pytestmark = pytest.mark.slow

PAGE = Path(alfish.__file__).parent.parent / "docs" / "troubleshooting.md"
BLOCKS = [" ".join(block.split()) for block in re.findall(r"^```text\n(.*?)^```", PAGE.read_text(), re.S | re.M)]
COMMANDS = [block for block in BLOCKS if block.startswith("$ ")]
MESSAGES = [block for block in BLOCKS if not block.startswith("$ ")]
NAMES = [re.sub(r".*alfish \w+: |\W+", " ", block).strip()[:50] for block in BLOCKS]


def test_the_page_has_many_entries_each_with_a_cure():
    text = PAGE.read_text()
    assert len(BLOCKS) >= 40 and len(COMMANDS) >= 25
    assert len(re.findall(r"^### ", text, re.M)) == text.count("**Cure:**") == len(BLOCKS)


@pytest.mark.parametrize("block", COMMANDS, ids=[name for name, block in zip(NAMES, BLOCKS) if block in COMMANDS])
def test_commands_print_what_the_page_quotes(block, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    line, _, message = block.removeprefix("$ ").partition(" alfish ")
    code = main(shlex.split(line)[1:])
    said = " ".join(capsys.readouterr().err.split())
    assert code in (1, 2)
    assert re.search(pattern(f"alfish {message}"), said), said


@pytest.mark.parametrize("block", MESSAGES, ids=[name for name, block in zip(NAMES, BLOCKS) if block in MESSAGES])
def test_a_message_of_the_page_is_in_the_code(block):
    assert any(fits(template, block) for template in templates()), block


@pytest.mark.parametrize(
    "message",
    [
        "runs/x is already used for training by another program",
        # Only the message inside it is in the code.
        "WrongShape breaks gymnasium's interface: step ended in ValueError: the environments returned observations of "
        "shape (4,), but their observation_space has shape (3,)",
    ],
)
def test_unknown_messages_are_not_found(message):
    assert not any(fits(template, message) for template in templates())


def pattern(quoted):
    """Returns a quoted text as a pattern in which `...` stands for any text."""
    return ".*".join(re.escape(part) for part in quoted.split("..."))


def fits(template, quoted):
    """Returns True if the parts of a template stand in a text one after another, the first one near its beginning."""
    position = 0
    for part in template:
        position = quoted.find(part, position) + len(part)
        if position < len(part):
            return False
    first = next(part for part in template if len(part) >= 8)
    return quoted.find(first) < 40


@functools.cache
def templates():
    """Returns the long texts of the code, each as its parts between what the code inserts."""
    found = []
    for file in Path(alfish.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            parts = []
            if isinstance(node, ast.JoinedStr):
                parts = [one.value for one in node.values if isinstance(one, ast.Constant)]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                parts = node.value.split("%s")
            if sum(map(len, parts)) >= 25:
                found.append([re.sub(r"\s+", " ", part) for part in parts])
    return found
