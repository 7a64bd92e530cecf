"""Sizes that keep the code readable: of classes, constructors, packages, and of what a reader must open."""

import ast
from pathlib import Path

import alfish

PACKAGE = Path(alfish.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
CLASS_LINES = 300
CLASS_ATTRIBUTES = 20
INIT_LINES = 40  # without the docstring
PACKAGE_FILES = 15

# What is opened to understand SAC whole: the algorithm, its hooks, the mathematics, and the networks it is built from.
SAC = [
    *("algorithms/sac.py", "algorithms/soft_critics.py", "algorithms/rl_algorithm.py", "data.py", "returns.py"),
    *("targets.py", "losses.py"),
    *("networks/hybrid/policy.py", "networks/critics.py", "networks/target.py", "networks/encoders.py"),
    *("networks/layers.py", "distributions/categorical.py", "distributions/squashed_normal.py"),
]
# What is opened to follow one update of SAC: what each hook computes, from rows to losses and the next target network.
# Networks, distributions and the recursion of returns are known by their names.
SAC_UPDATE = [
    *("algorithms/sac.py", "algorithms/hybrid_actor.py", "algorithms/delayed_actor.py", "values/scalar.py"),
    *("algorithms/soft_critics.py", "targets.py", "networks/hybrid/temperatures.py", "networks/target.py"),
]
# What is opened before a first algorithm of one's own is written.
NEWCOMER = ["data.py", "algorithms/rl_algorithm.py", "algorithms/actor_critic.py", "algorithms/ppo.py", "returns.py"]

# What is still too large; whoever mends one removes its line.
KNOWN: list[str] = []


def length(node):
    """Lines of a definition, decorators and docstring included."""
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return node.end_lineno - first + 1


def without_docstring(node):
    docstring = node.body[0] if ast.get_docstring(node) is not None else None
    return length(node) - (docstring.end_lineno - docstring.lineno + 1 if docstring else 0)


def attributes(node):
    """Names that methods of a class assign to `self`."""
    stored = (n for n in ast.walk(node) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store))
    return {n.attr for n in stored if isinstance(n.value, ast.Name) and n.value.id == "self"}


def too_large(path, text):
    """What of a module exceeds a limit, each in words."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.ClassDef):
            continue
        if length(node) > CLASS_LINES:
            yield f"{path}: {node.name} has {length(node)} lines"
        if len(attributes(node)) > CLASS_ATTRIBUTES:
            yield f"{path}: {node.name} has {len(attributes(node))} attributes"
        for method in node.body:
            is_init = isinstance(method, ast.FunctionDef) and method.name == "__init__"
            if is_init and without_docstring(method) > INIT_LINES:
                yield f"{path}: {node.name}.__init__ has {without_docstring(method)} lines"


def count(names):
    return sum(len((PACKAGE / name).read_text().splitlines()) for name in names)


def test_no_class_and_no_constructor_is_too_large():
    found = [one for path in FILES for one in too_large(path.relative_to(PACKAGE), path.read_text())]
    assert found == KNOWN


def test_no_package_has_too_many_files():
    for directory in {path.parent for path in FILES}:
        parts = list(directory.iterdir())
        has_subpackage = any((part / "__init__.py").is_file() for part in parts)
        modules = [part for part in parts if part.suffix == ".py"]
        assert has_subpackage or len(modules) <= PACKAGE_FILES, f"{directory} has {len(modules)} modules"


def test_sac_is_read_in_1410_lines_and_a_newcomer_reads_600():
    assert count(SAC) < 1410
    assert count(NEWCOMER) < 600


def test_an_update_of_sac_is_read_in_700_lines():
    assert count(SAC_UPDATE) <= 700


def test_the_off_policy_algorithms_are_short():
    assert count(["algorithms/sac.py"]) <= 180
    assert count(["algorithms/dqn.py"]) <= 180
    assert count(["algorithms/td3.py"]) <= 160


def test_a_large_class_would_be_found():
    lines = "\n".join(f"        self.a{k} = {k}" for k in range(CLASS_ATTRIBUTES + 1))
    assert list(too_large("x.py", f"class A:\n    def __init__(self):\n{lines}\n")) == ["x.py: A has 21 attributes"]
    lines = "\n".join("        x = 1" for _ in range(CLASS_LINES))
    assert list(too_large("x.py", f"class A:\n    def __init__(self):\n{lines}\n")) == [
        "x.py: A has 302 lines",
        "x.py: A.__init__ has 301 lines",
    ]
