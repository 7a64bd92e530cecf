"""The pages of docs/: their settings, names, configurations, links and pictures are those of the code."""

import inspect
import re
from pathlib import Path

import pytest

import alfish
from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.configuration import catalogue, reading
from alfish.parameters import gin_internals
from benchmarks import settings_tables

ROOT = Path(alfish.__file__).parent.parent
PAGES = sorted((ROOT / "docs").rglob("*.md"))
NAMES = [str(page.relative_to(ROOT / "docs")) for page in PAGES]
NAME = re.compile(r"`@?(?:[\w.]+/)?([A-Z]\w+)\.(\w+)")
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


@pytest.fixture(scope="module")
def entries():
    return catalogue.entries()


def test_the_tables_of_settings_are_those_of_the_code(entries):
    pages = settings_tables.pages()
    assert len(pages) > 15
    stale = [page.name for page in pages if settings_tables.filled(page.read_text(), entries) != page.read_text()]
    assert not stale, f"{stale}: run `python -m benchmarks.settings_tables`"


def test_each_algorithm_has_a_page_with_its_settings_and_its_sections(entries):
    registered = gin_internals.configurables().items()
    algorithms = [part.__name__ for name, part in registered if name.startswith("alfish.") and _is_algorithm(part)]
    pages = [page.read_text() for page in (ROOT / "docs" / "algorithms").glob("*.md")]
    assert len(algorithms) > 12
    for name in algorithms:
        assert any(f"{name}." in found[2] for page in pages for found in settings_tables.TABLE.finditer(page)), name
    for page in pages:
        for heading in ("Method", "What it takes", "Settings", "What it reaches", "When to use it"):
            assert page.startswith("# The algorithms") or f"\n## {heading}\n" in page, page.partition("\n")[0]


def _is_algorithm(part):
    return inspect.isclass(part) and issubclass(part, RLAlgorithm)


def test_a_table_for_a_name_that_does_not_exist_is_refused(entries):
    with pytest.raises(ValueError, match=r"no parameter is called PPO\.lamda; `alfish params` lists all of them"):
        settings_tables.table(["PPO.gamma", "PPO.lamda"], entries)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_settings_that_a_page_names_exist(page, entries):
    known = {entry.name for entry in entries}
    classes = {}
    for selector, part in gin_internals.configurables().items():
        classes[selector.rpartition(".")[2]] = part
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for owner, parameter in set(NAME.findall(text)):
        if owner in classes and f"{owner}.{parameter}" not in known:
            assert _has(classes[owner], parameter), f"{owner}.{parameter}"


def _has(part, name):
    """Returns True for an attribute of a class, and for an argument that the code passes."""
    return hasattr(part, name) or name in inspect.signature(part).parameters


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_configurations_of_a_page_are_read(page, entries, tmp_path):
    for block in re.findall(r"^```gin\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
        (tmp_path / "block.gin").write_text(block)
        assert reading.read([str(tmp_path / "block.gin")], []).bindings


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=[*NAMES, "README"])
def test_links_of_a_page_lead_somewhere(page):
    for target in LINK.findall(re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)):
        if re.match(r"\w+:", target):
            continue
        file, _, anchor = target.partition("#")
        path = (page.parent / file).resolve() if file else page
        assert path.exists(), target
        if anchor and path.suffix == ".md":
            assert anchor in anchors(path), target


def anchors(path):
    headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    plain = [re.sub(r"\]\([^)]*\)|[`\[\]]", "", heading).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}
