"""The boundary between the core and its optional packages: which imports are allowed in each direction.

The core imports an optional package only where `CORE_IMPORTS` lists it, so a mistake there cannot break the rest. An
optional package imports only the public modules listed here, and no private name, so that all other modules of the core
may change without a look at the optional packages.
"""

import ast
import subprocess
import sys

import pytest
from test_imports import FILES, imports_of, is_module, module_of, nodes, parse

import alfish

WRITERS = "alfish.runs.writers"
TRACKERS = tuple(f"{WRITERS}.{name}" for name in ("tracker", "mlflow_writer", "trackio_writer", "wandb_writer"))
# Public modules of the core: those that `alfish` itself offers, those that any optional package may import, and those
# that one optional package imports because it replaces a part of the core, continues its work, or reads its files.
EVERYWHERE = {
    *("alfish", *alfish._HOME.values()),
    *("alfish.errors", "alfish.errors", "alfish.nest", "alfish.specs", "alfish.parameters"),
    *("alfish.parameters.description", "alfish.parameters.differences"),
    *("alfish.runs.checkpoints", "alfish.runs.contents", "alfish.runs.files"),
} - {"alfish.analysis.plotting"}
PUBLIC = {
    "alfish.offline.sources": {
        *("alfish.offline.data_set", "alfish.offline.episode"),
        *("alfish.offline.limits", "alfish.offline.recorded_spaces", "alfish.replay"),
    },
    "alfish.offline.pickles": set(),
    "alfish.unrollers.ray": {
        *("alfish.errors.user_code", "alfish.runs.stop_signals"),
        *("alfish.processes.host", "alfish.processes.messages", "alfish.processes.pool"),
        *("alfish.processes.worker_handle", "alfish.unrollers.workers.shared_tensors"),
        *("alfish.unrollers.workers.slots", "alfish.unrollers.workers.transport"),
        "alfish.unrollers.workers.worker_process",
    },
    "alfish.exporting": {
        *("alfish.algorithms.acting", "alfish.compiler.numpy_operations", "alfish.compiler.numpy_program"),
        *("alfish.compiler.tracer", "alfish.offline", "alfish.runs.random_state", "alfish.runs.packed.archive"),
        *("alfish.runs.packed.fetching", "alfish.training.evaluations.evaluation"),
    },
    "alfish.sweeps": {
        *("alfish.configuration.reading", "alfish.environments.finding", "alfish.parameters.kinds"),
        *("alfish.parameters.varied", "alfish.processes.inheritance", "alfish.runs.stop_signals", "alfish.runs.trust"),
        *("alfish.training.clock", "alfish.training.evaluations.evaluation", "alfish.training.generations"),
    },
    "alfish.analysis": {
        *("alfish.configuration.locating", "alfish.configuration.reading", "alfish.runs.run_log"),
        *("alfish.training.evaluations.evaluation", "alfish.training.evaluations.results", f"{WRITERS}.writer"),
    },
    "alfish.simulators": {"alfish.environments.simulator", "alfish.parameters.kinds"},
    **{tracker: {f"{WRITERS}.writer"} for tracker in TRACKERS},
}
# Imports of optional packages by the core, besides commands: `alfish.plot`, names that a configuration may use, and
# schemes of recorded data.
CORE_IMPORTS = {
    "alfish": {"alfish.analysis.plotting"},
    "alfish.configuration.reading": set(TRACKERS[1:]),
    WRITERS: set(TRACKERS[1:]),
    **{f"alfish.offline{name}": {"alfish.offline.sources"} for name in ("", ".outputs", ".source_reading")},
}
NAMED_TUPLE = {"_replace", "_fields", "_asdict", "_make"}
PATHS = {module_of(path): path for path in FILES}
USED = set()  # pairs of an optional package and a module that it imports


def optional_package_of(module):
    return next((package for package in PUBLIC if module == package or module.startswith(package + ".")), None)


def is_command(module):
    return module.startswith(("alfish.bin.", "alfish.__main__")) or module == "alfish.bin"


def private_names(tree):
    """Private names that a module takes from another one, or from an object that is not its own."""
    attributes = [node for node in nodes(tree) if isinstance(node, ast.Attribute)]
    own = {node.attr for node in attributes if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")}
    for node in nodes(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("alfish"):
            yield from (alias.name for alias in node.names if alias.name.startswith("_"))
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            is_torch = ast.unparse(node.value) == "aten"  # operations, as `aten._softmax`
            if node.attr not in NAMED_TUPLE | own and not is_torch:
                yield ast.unparse(node)


def complaints(module, tree):
    """Yields a sentence for each import that crosses the boundary where it may not."""
    here = optional_package_of(module)
    for imported in imports_of(tree):
        there = optional_package_of(imported)
        if (
            here is None
            and there is not None
            and not is_command(module)
            and imported not in CORE_IMPORTS.get(module, ())
        ):
            yield f"{module} imports {imported}, which belongs to an optional package"
        if here is not None and there is None:
            USED.add((here, imported))
            if imported not in EVERYWHERE | PUBLIC[here]:
                yield f"{module} imports {imported}, which is not public for {here}"
    if here is not None:
        yield from (f"{module} takes the private name {name}" for name in private_names(tree))


def test_optional_packages_import_public_modules_and_the_core_imports_them_where_listed():
    assert [each for module, path in PATHS.items() for each in complaints(module, parse(path))] == []


@pytest.fixture(scope="module")
def loaded():
    """Modules that a program has loaded after a Trainer's imports, and after it imported the workers on Ray too."""
    program = """
import sys, alfish.training.trainer, alfish.configuration.runs
print(*sys.modules)
import alfish.unrollers.ray
print(*sys.modules)
"""
    lines = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    return [line.split() for line in lines.splitlines()]


def test_building_a_trainer_loads_no_optional_package(loaded):
    # `open_source` lists the schemes of recorded data, and recognizes files of other libraries.
    listed = [f"alfish.offline.sources{name}" for name in ("", ".recognition", ".source_files")]
    assert sorted(module for module in loaded[0] if optional_package_of(module)) == listed


def test_ray_is_imported_where_workers_start_and_not_before(loaded):
    assert "alfish.unrollers.ray" in loaded[1] and "ray" not in loaded[1]


def test_every_listed_module_exists_and_is_imported():
    for module, path in PATHS.items():
        list(complaints(module, parse(path)))
    needed = {package: {imported for one, imported in USED if one == package} for package in PUBLIC}
    assert {
        package: modules - needed[package] for package, modules in PUBLIC.items() if modules - needed[package]
    } == {}
    at_home = {"alfish", *alfish._HOME.values()}
    assert [each for each in sorted(EVERYWHERE - at_home) if sum(each in one for one in needed.values()) < 2] == []
    assert all(is_module(each) for each in (*CORE_IMPORTS, *PUBLIC, *EVERYWHERE))


@pytest.mark.parametrize(
    "module, text",
    [
        ("alfish.sweeps.sweep", "from alfish.training.loop import Loop"),
        ("alfish.sweeps.sweep", "def f():\n    from alfish.learner import updates"),
        ("alfish.analysis.curves", "from alfish.runs.contents import _clock"),
        ("alfish.exporting.graph", "from alfish.training import policy\npolicy._missing('x')"),
        ("alfish.exporting.graph", "def f(policy): return policy._runners"),
        ("alfish.runs.writers.wandb_writer", "from alfish.training.clock import Clock"),
        ("alfish.training.loop", "from alfish.sweeps.jobs import Jobs"),
        ("alfish.training.loop", "def f():\n    import alfish.exporting.graph"),
        ("alfish.offline.buffer", "from alfish.offline.sources.npz import NpzSource"),
        ("alfish.offline.outputs", "from alfish.offline.sources.source_files import said"),
    ],
)
def test_a_forbidden_import_is_found(module, text):
    assert len(list(complaints(module, ast.parse(text)))) == 1


@pytest.mark.parametrize(
    "module, text",
    [
        ("alfish.sweeps.sweep", "from alfish.analysis.tables import as_text"),
        ("alfish.exporting.graph", "from alfish.training.policy import Policy"),
        ("alfish.exporting.onnx_operations", "aten._softmax"),
        ("alfish.bin.sweep", "def f():\n    from alfish.sweeps.sweep import Sweep"),
        ("alfish.training.loop", "from alfish.training.clock import Clock"),
    ],
)
def test_listed_imports_are_accepted(module, text):
    assert list(complaints(module, ast.parse(text))) == []
