"""A package imports lower layers only, and some constructions are used nowhere."""

import ast
import functools
from pathlib import Path

import pytest

import alfish

PACKAGE = Path(alfish.__file__).parent
FILES = sorted(path for path in PACKAGE.rglob("*.py"))

# The packages of each layer, lowest first: a package imports packages of lower layers only.
LAYERS = [
    ["errors", "nest"],
    ["data", "host", "parameters", "processes", "specs"],
    ["compiler", "functional", "metrics", "runs"],
    ["environments", "networks", "replay"],
    ["offline", "simulators", "transforms"],
    ["algorithms"],
    ["learner", "unrollers"],
    ["policies"],
    ["training"],
    ["configuration"],
    ["analysis"],
    ["exporting", "sweeps"],
    ["bin"],
    ["__main__"],
]
LAYER = {package: layer for layer, packages in enumerate(LAYERS) for package in packages}
# Algorithms that are bases; others are siblings and do not import each other.
BASES = tuple(
    f"alfish.algorithms.{name}"
    for name in (
        "acting",
        "rl_algorithm",
        "contract",
        "actor_critic",
        "ddpg",
        "soft_actor",
        "crossq",
        "dqn",
        "recurrent_sac",
        "q_learning",
        "ppo",
        "a2c",
        "appo",
        "sac",
        "td3",
        "bc",
    )
)
BASES += tuple(f"alfish.algorithms.imitation.{name}" for name in ("external", "expert", "apprentice"))


def package_of(module):
    """`alfish.networks.heads` is in the package `networks`."""
    return module.split(".")[1]


def module_of(path):
    parts = ("alfish", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def is_module(name):
    path = PACKAGE.joinpath(*name.split(".")[1:])
    return path.with_suffix(".py").is_file() or path.is_dir()


@functools.cache
def imports_of(tree):
    """Each module of ours that is imported, inside functions too."""

    def walk(node):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING":
                continue  # for the type checker alone: nothing is imported when the program runs
            if isinstance(child, ast.Import):
                yield from (alias.name for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"line {child.lineno}: imports are absolute"
                for alias in child.names:
                    whole = f"{child.module}.{alias.name}"
                    yield whole if child.module.startswith("alfish") and is_module(whole) else child.module
            yield from walk(child)

    return [module for module in walk(tree) if module == "alfish" or module.startswith("alfish.")]


@functools.cache
def parse(path):
    return ast.parse(path.read_text(), str(path))


@functools.cache
def nodes(tree):
    return tuple(ast.walk(tree))


def is_sibling(module):
    """An algorithm that no other imports. The parts of a composition are a package of their own."""
    is_algorithm = module.startswith("alfish.algorithms.") and not module.startswith("alfish.algorithms.composition")
    return is_algorithm and module not in BASES


def complaints(module, tree):
    """Yields a sentence for each import that is not allowed."""
    here = package_of(module)
    for imported in imports_of(tree):
        if imported == "alfish":
            continue
        there = package_of(imported)
        if there not in LAYER:
            yield f"{module} imports {imported}, which has no layer"
        elif here != there and LAYER[there] >= LAYER[here]:
            yield f"{module} imports {imported}, which is not in a lower layer"
        elif here == there == "algorithms" and is_sibling(imported) and imported != module:
            yield f"{module} imports its sibling {imported}"


def test_a_package_imports_lower_layers_only():
    modules = {module_of(path): path for path in FILES if module_of(path) != "alfish"}
    assert {package_of(module) for module in modules} <= set(LAYER), "add the package to LAYERS"
    assert [sentence for module, path in modules.items() for sentence in complaints(module, parse(path))] == []


@pytest.mark.parametrize(
    "module, text",
    [
        ("alfish.nest", "from alfish.data import trainable"),
        ("alfish.functional.returns", "from alfish.learner import optimizers"),
        ("alfish.learner.learner", "def f():\n    import alfish.training.trainer"),
        ("alfish.replay.samplers", "from alfish.training.trainer import Trainer"),
        ("alfish.algorithms.ppo", "from alfish.algorithms.reppo import REPPO"),
        ("alfish.data", "from alfish.utils import anything"),
    ],
)
def test_an_import_of_a_higher_layer_is_found(module, text):
    assert len(list(complaints(module, ast.parse(text)))) == 1


@pytest.mark.parametrize(
    "module, text",
    [
        ("alfish.training.trainer", "from alfish.training.listeners import Evaluate"),
        ("alfish.algorithms.ppo", "from alfish.algorithms.rl_algorithm import RLAlgorithm"),
        ("alfish.training.listeners", "if TYPE_CHECKING:\n    from alfish.training.trainer import Trainer"),
        ("alfish.networks.encoders", "from alfish.networks.encoders import Encoder"),
        ("alfish.training.trainer", "import alfish"),
    ],
)
def test_imports_downwards_are_accepted(module, text):
    assert list(complaints(module, ast.parse(text))) == []


def circles(imports):
    """Sorted modules of each circle of imports; `imports` maps each module to the modules that it imports."""
    reached = {module: set(imported) for module, imported in imports.items()}
    changed = True
    while changed:
        changed = False
        for imported in reached.values():
            more = set().union(*(reached.get(module, ()) for module in imported)) - imported
            changed = changed or bool(more)
            imported |= more
    return {tuple(sorted(m for m in reached[module] if module in reached.get(m, ()))) for module in reached} - {()}


def test_no_modules_import_each_other_in_a_circle():
    # `__init__` is left out, because it imports the modules of its package, which may import the package.
    imports = {
        module_of(path): {m for m in imports_of(parse(path)) if m != module_of(path)}
        for path in FILES
        if path.name != "__init__.py"
    }
    assert circles(imports) == set()


def test_a_circle_would_be_found():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == {("a", "b", "c")}


def test_importing_the_package_imports_no_modules():
    """`alfish.X` comes when it is first used; a type checker sees it under TYPE_CHECKING."""
    allowed = {"sys", "typing"}
    for node in parse(PACKAGE / "__init__.py").body:
        if isinstance(node, ast.Import):
            assert {alias.name for alias in node.names} <= allowed
        elif isinstance(node, ast.ImportFrom):
            assert node.module in allowed


def test_windows_is_refused_with_the_reason_and_the_remedy(monkeypatch):
    monkeypatch.setattr("sys.platform", "win32")
    with pytest.raises(
        ImportError, match="^alfish runs on Linux and macOS: Windows lacks the file locks, .* use .*WSL"
    ):
        exec(compile(parse(PACKAGE / "__init__.py"), "alfish", "exec"), {"__name__": "alfish"})


def test_a_type_checker_of_a_user_sees_the_annotations():
    assert (PACKAGE / "py.typed").is_file()


def test_no_module_is_named_for_leftovers():
    banned = {"utils", "util", "common", "core", "helpers", "misc"}
    assert not banned & {part for path in FILES for part in path.relative_to(PACKAGE).with_suffix("").parts}


def gin_calls(tree):
    """Lines that use gin other than as a decorator or for `gin.REQUIRED`."""
    allowed = set()
    for node in nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            allowed |= {id(inner) for decorator in node.decorator_list for inner in ast.walk(decorator)}
        elif isinstance(node, ast.Attribute) and node.attr == "REQUIRED":
            allowed.add(id(node.value))
    for node in nodes(tree):
        if isinstance(node, ast.ImportFrom):
            hidden = (node.module or "").split(".")[0] == "gin"
        elif isinstance(node, ast.alias):
            hidden = node.name.split(".")[0] == "gin" and (node.name != "gin" or node.asname)
        else:
            hidden = isinstance(node, ast.Name) and node.id == "gin" and id(node) not in allowed
        if hidden:
            yield node.lineno


def test_gin_is_called_in_configuration_only():
    outside = {module_of(path): path for path in FILES if "configuration" not in path.relative_to(PACKAGE).parts}
    # A worker and the process that compiles are separate programs, which read the configuration again. What a program
    # built is described as a configuration. The parts of each of several policies are built in its scope. Private names
    # of gin are used in one module.
    assert {module for module, path in outside.items() if list(gin_calls(parse(path)))} == {
        "alfish.unrollers.workers.environment_maker",
        "alfish.compiler.compiling_process",
        "alfish.parameters.description",
        "alfish.parameters.gin_internals",
        "alfish.policies.member",
    }


def test_gin_calls_are_found():
    found = (
        "import gin\ngin.parse_config('')\n@gin.configurable(module='x')\ndef f(a=gin.REQUIRED): gin.bind_parameter()\n"
    )
    assert list(gin_calls(ast.parse(found))) == [2, 4]
    assert list(gin_calls(parse(PACKAGE / "configuration" / "reading.py")))


def unsafe(tree):
    """Lines that would execute what they load, or that swallow everything."""
    for node in nodes(tree):
        if isinstance(node, ast.ExceptHandler) and node.type is None:
            yield node.lineno, "bare except"
        if isinstance(node, ast.ClassDef) and any("Unpickler" in ast.unparse(base) for base in node.bases):
            yield node.lineno, "Unpickler"
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        if name in ("pickle.load", "pickle.loads", "pickle.Unpickler", "load_module_pickle", "input", "eval", "exec"):
            yield node.lineno, name
        if any(word.arg == "allow_pickle" and ast.unparse(word.value) != "False" for word in node.keywords):
            yield node.lineno, "allow_pickle"
        if name in ("torch.load", "load"):
            weights_only = [ast.unparse(word.value) for word in node.keywords if word.arg == "weights_only"]
            if name == "torch.load" and weights_only != ["True"]:
                yield node.lineno, "torch.load without weights_only=True"
        if any(word.arg == "weights_only" and ast.unparse(word.value) != "True" for word in node.keywords):
            yield node.lineno, "weights_only is not True"


def test_loading_executes_no_code_and_hides_no_error():
    found = [(module_of(path), what) for path in FILES for _, what in unsafe(parse(path))]
    assert found == [
        ("alfish.compiler.numpy_program", "exec"),  # runs what it wrote itself, from a traced graph
        ("alfish.processes.channel", "pickle.loads"),  # messages between processes of one run
    ]


@pytest.mark.parametrize(
    "text",
    [
        "pickle.load(file)",
        "class Mine(pickle.Unpickler): pass",
        "torch.load(file)",
        "torch.load(file, weights_only=False)",
        "torch.load(file, weights_only=flag)",
        "np.load(file, allow_pickle=True)",
        "try:\n    x\nexcept:\n    pass",
        "input()",
    ],
)
def test_executed_pickles_and_swallowed_errors_would_be_found(text):
    assert list(unsafe(ast.parse(text)))
