"""The configurations that docs/compose.md shows run as they stand, by the shipped command."""

import importlib.util
import json
import re
from pathlib import Path

import pytest
from test_confs import NEEDS, tiny

import alfish
from alfish.__main__ import main

pytestmark = pytest.mark.slow

PAGE = Path(alfish.__file__).parent.parent / "docs" / "compose.md"
# An indented block with a configuration, below the heading of its section.
BLOCK = re.compile(r"^## ([^\n]+)$|(?:^    include [^\n]+\n(?:(?:    [^\n]*)?\n)+)", re.MULTILINE)


def shown():
    """Yields the name and the text of each configuration; those that name another run have tests of their own."""
    section, count = "", {}
    for found in BLOCK.finditer(PAGE.read_text()):
        if found[1]:
            section = found[1]
            continue
        count[section] = count.get(section, 0) + 1
        text = re.sub(r"^    ", "", found[0], flags=re.MULTILINE)
        if "runs/" not in text:
            yield pytest.param(text, id=f"{section}, {count[section]}")


@pytest.mark.parametrize("text", list(shown()))
def test_a_configuration_of_the_page_trains(tmp_path, text):
    conf = tmp_path / "shown.gin"
    conf.write_text(text)
    chosen = tiny(conf, tmp_path)
    for pattern, module in NEEDS.items():
        if re.search(pattern, text) and importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    assert main(["train", f"--gin_file={conf}", f"--root_dir={tmp_path / 'run'}", *chosen]) == 0
    done = json.loads((tmp_path / "run" / "done").read_text())
    assert done["iterations"] == 2 and done["updates"] > 0
    assert alfish.load(tmp_path / "run").env_steps == done["env_steps"]
