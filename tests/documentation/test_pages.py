"""The pages of docs/: their settings, names, configurations, links and pictures are those of the code."""

import importlib.util
import inspect
import re
from pathlib import Path

import numpy as np
import pytest
from gymnasium import spaces
from test_confs import NEEDS, tiny, with_included

import alfish
from alfish import nest
from alfish.__main__ import main
from alfish.algorithms.a2c import A2C
from alfish.algorithms.appo import APPO
from alfish.algorithms.bc import BC
from alfish.algorithms.cql import CQL
from alfish.algorithms.dqn import DQN
from alfish.algorithms.iql import IQL
from alfish.algorithms.ppo import PPO
from alfish.algorithms.recurrent_sac import RecurrentSAC
from alfish.algorithms.recurrent_td3 import RecurrentTD3
from alfish.algorithms.reppo import REPPO
from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.algorithms.sac import SAC
from alfish.algorithms.td3 import TD3
from alfish.algorithms.td3_bc import TD3BC
from alfish.configuration import catalogue
from alfish.errors import UsageError
from alfish.parameters import gin_internals
from benchmarks import settings_tables

pytestmark = pytest.mark.slow

ROOT = Path(alfish.__file__).parent.parent
PAGES = sorted((ROOT / "docs").rglob("*.md"))
NAMES = [str(page.relative_to(ROOT / "docs")) for page in PAGES]
NAME = re.compile(r"`@?(?:[\w.]+/)?([A-Z]\w+)\.(\w+)")
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


@pytest.fixture(scope="module")
def entries():
    return catalogue.entries()


def test_settings_tables_match_the_code(entries):
    pages = settings_tables.pages()
    assert len(pages) > 15
    stale = [page.name for page in pages if settings_tables.filled(page.read_text(), entries) != page.read_text()]
    assert not stale, f"{stale}: run `python -m benchmarks.settings_tables`"


def test_each_algorithm_has_a_page_with_its_settings_and_its_sections(entries):
    registered = gin_internals.configurables().items()
    algorithms = {
        part.__name__: part for name, part in registered if name.startswith("alfish.") and _is_algorithm(part)
    }
    pages = [page.read_text() for page in (ROOT / "docs" / "algorithms").glob("*.md")]
    assert len(algorithms) > 12
    settings = [found[2] for page in pages for found in settings_tables.TABLE.finditer(page)]
    for name, part in algorithms.items():
        parameters = inspect.signature(part).parameters.values()
        own = {one.name for one in parameters if one.kind is one.KEYWORD_ONLY}
        own -= {one for base in part.__mro__[1:-1] for one in inspect.signature(base).parameters}
        where = settings if own else pages
        assert any(f"{name}." in text or (not own and name in text) for text in where), name
    for page in pages:
        assert page.startswith("# The algorithms") or "(../pictures/" in page, page.partition("\n")[0]
        for heading in ("Method", "What it takes", "Settings", "What it reaches", "When to use it"):
            assert page.startswith("# The algorithms") or f"\n## {heading}\n" in page, page.partition("\n")[0]


SPECS = {
    "Discrete": spaces.Discrete(3),
    "MultiDiscrete": spaces.MultiDiscrete([2, 3]),
    "bounded Box": spaces.Box(-1, 1, (2,), np.float32),
    "Box": spaces.Box(-np.inf, np.inf, (2,), np.float32),
}
TAKEN = {  # by words of the row `actions`
    "any nest of Box": set(SPECS),
    "as [PPO]": set(SPECS),
    "any nest of bounded Box": set(SPECS) - {"Box"},
    "one Discrete leaf, by itself": {"Discrete"},
    "bounded Box leaves and at most one Discrete": {"Discrete", "bounded Box"},
    "as [SAC]": {"Discrete", "bounded Box"},
    "bounded Box leaves, or one Discrete leaf": {"Discrete", "bounded Box"},
    "a nest of bounded Box leaves |": {"bounded Box"},
}
OF_PAGE = {
    "ppo": PPO, "a2c": A2C, "appo": APPO, "dqn": DQN, "sac": SAC, "recurrent_sac": RecurrentSAC, "td3": TD3,
    "reppo": REPPO, "recurrent_td3": RecurrentTD3, "td3_bc": TD3BC, "bc": BC, "iql": IQL,
    "cql": CQL,
}  # fmt: skip


@pytest.mark.parametrize("name", OF_PAGE)
def test_pages_list_the_actions_that_algorithms_support(name):
    kind, page = OF_PAGE[name], (ROOT / "docs" / "algorithms" / f"{name}.md").read_text()
    said = dict(re.findall(r"^\| ([a-z ]+) \| (.*)$", page, re.MULTILINE))
    observation, reward = spaces.Box(-1, 1, (3,), np.float32), spaces.Box(-np.inf, np.inf, (), np.float32)
    (expected,) = [taken for words, taken in TAKEN.items() if words in said["actions"]]
    taken = {label for label, space in SPECS.items() if _accepts(kind, observation, space, reward)}
    assert taken == expected
    action = SPECS[min(expected)]
    vector = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    assert _accepts(kind, observation, action, vector) is said["vector rewards"].startswith("yes")
    made = kind(observation, action, reward)
    collects = not made.on_policy or made.unroll_use.handles_stale_policies
    assert collects is not said["collection by workers"].startswith("no")
    by_default = made.initial_state(1) is not None and nest.leaves(made.initial_state(1)) != []
    assert by_default is name.startswith("recurrent")


def _accepts(kind, *specs):
    try:
        kind(*specs)
    except UsageError:
        return False
    return True


def _is_algorithm(part):
    return inspect.isclass(part) and issubclass(part, RLAlgorithm)


def test_a_table_for_a_name_that_does_not_exist_is_refused(entries):
    with pytest.raises(ValueError, match=r"no parameter is called PPO\.lamda; `alfish params` lists all parameters"):
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


def configurations():
    """Yields each configuration of a page as page and text, with an environment if it has none."""
    for page, name in zip(PAGES, NAMES):
        for number, text in enumerate(re.findall(r"^```gin\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)):
            marks = [pytest.mark.slow] if "@TorchOptimizer" in text else []  # torch's optimizers import its compiler
            yield pytest.param(page, text, id=f"{name}, {number + 1}", marks=marks)


@pytest.mark.parametrize(("page", "text"), list(configurations()))
def test_a_configuration_of_a_page_trains(page, text, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    for name, code in re.findall(r"^```python\n# (my_\w+\.py)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
        (tmp_path / name).write_text(code)
    conf = tmp_path / "shown.gin"
    conf.write_text(text)
    whole = "".join(path.read_text() for path in with_included(conf))
    for needed, module in NEEDS.items():
        if re.search(needed, whole) and importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    chosen = tiny(conf, tmp_path)
    if "Torso.mlp = " in text or "actor/MLP.layers" in text:  # nothing reads the usual setting then
        chosen.remove("--gin_param=MLP.layers=(8,)")
    if "make_environment.env_id" not in whole:
        chosen += ["--gin_param=make_environment.env_id='CartPole-v1'"]
    assert main(["train", f"--gin_file={conf}", f"--root_dir={tmp_path / 'run'}", *chosen]) == 0


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
