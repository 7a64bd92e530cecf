"""Makes each mutation of `tests/mutations` in a copy of the tree, and names the test that fails.

    make mutants                          # all of them
    python tests/mutants.py replay        # those of a package
    python tests/mutants.py 'end of its'  # those whose description contains a text

A mutation breaks one contract. `tests/mutations` has a table for each package:

    [[mutations]]
    breaks = "a return crosses the end of its episode."
    test = "tests/functional/test_returns.py::test_a_return_stops_at_the_end_of_its_episode"
    file = "alfish/functional/returns.py"
    old = 'not_done * following'
    new = 'following'

`old` occurs once in the file; `test` has arguments of pytest: files, tests, options but -k. The exit status is 1 unless
each mutation makes one of its tests fail. That the same tests pass without the mutation is what `make test` says.
"""

import concurrent.futures
import contextlib
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it

ROOT = Path(__file__).parents[1]
MUTATIONS = Path(__file__).parent / "mutations"
COPIED = (
    *("alfish", "benchmarks", "confs", "docs", "examples", "tests"),
    *("CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "README.md", "pyproject.toml"),
)
NUM_COPIES = 2
SECONDS = 300  # of one mutation; a test that hangs counts as failing
# Each mutation is tested in a fork of a process that has imported what most tests import.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["gymnasium", "gin", "optree", "pytest", "torch.utils.tensorboard"])


class Mutation(NamedTuple):
    package: str  # name of its table
    breaks: str
    test: str
    file: str
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.package}: {self.breaks}"

    def problem(self, tree: Path) -> str | None:
        """Returns why the mutation cannot be made in `tree`; None if it can."""
        if not (tree / self.file).is_file():
            return f"there is no {self.file}"
        count = (tree / self.file).read_text().count(self.old)
        return None if count == 1 else f"`old` occurs {count} times in {self.file}"


class Outcome(NamedTuple):
    mutation: Mutation
    failed: str | None  # the test's id; None: no test failed
    problem: str | None  # why there is no answer
    seconds: float


def mutations(texts: tuple[str, ...] = ()) -> list[Mutation]:
    """Returns the mutations of the packages that are named, and those whose description has one of the texts.

    Args:
      texts: names of packages, and parts of descriptions; empty means all mutations.
    """
    tables = {path.stem: tomllib.loads(path.read_text())["mutations"] for path in sorted(MUTATIONS.glob("*.toml"))}
    every = [Mutation(package, **row) for package, rows in tables.items() for row in rows]
    return [m for m in every if not texts or any(text == m.package or text in m.breaks for text in texts)]


def run(mutation: Mutation, tree: Path) -> Outcome:
    """Makes one mutation in `tree`, runs its tests there, and takes the mutation out again."""
    problem = mutation.problem(tree)
    if problem:
        return Outcome(mutation, None, problem, 0.0)
    began = time.monotonic()
    path = tree / mutation.file
    original = path.read_text()
    path.write_text(original.replace(mutation.old, mutation.new))
    output = tree.parent / f"{tree.name}.txt"
    process = PROCESSES.Process(target=run_tests, args=(tree, output, mutation.test.split()))
    try:
        process.start()
        process.join(SECONDS)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # also the processes that its tests have started
        path.write_text(original)
    seconds, has_ended = time.monotonic() - began, process.exitcode is not None
    process.join()
    if not has_ended:
        return Outcome(mutation, f"no end after {SECONDS} s", None, seconds)
    said = output.read_text(errors="replace")
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", said, re.MULTILINE)
    if process.exitcode in (1, 2) and failed:
        return Outcome(mutation, failed[1], None, seconds)
    if process.exitcode == 0:
        return Outcome(mutation, None, None, seconds)
    return Outcome(mutation, None, f"pytest ended with {process.exitcode}: {said[-1000:]}", seconds)


def run_tests(tree: Path, output: Path, arguments: list[str]) -> None:
    """Runs pytest in `tree`, writes what it prints to `output`, and exits with its status."""
    os.setsid()
    with output.open("w") as file, open(os.devnull) as nothing:
        for descriptor, target in enumerate((nothing, file, file)):
            os.dup2(target.fileno(), descriptor)
    os.chdir(tree)
    sys.path[0] = str(tree)  # in place of the directory of this file
    # A mutation of equal length within the same second would leave the old bytecode valid.
    sys.dont_write_bytecode = True
    os.environ.update(PYTHONPATH=str(tree), OMP_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1")
    import pytest

    sys.exit(pytest.main(["-x", "-p", "no:cacheprovider", "-m", "", "--tb=no", "-rfE", *arguments]))


def copy_to(tree: Path) -> Path:
    """Copies what tests need."""
    tree.mkdir()
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__", ".venv*"))
        else:
            shutil.copy(source, tree / name)
    return tree


def main(texts: list[str]) -> int:
    chosen = mutations(tuple(texts))
    if not chosen:
        print(f"no package is named {' or '.join(texts)}, and no description has it", file=sys.stderr)
        return 2
    local = threading.local()
    with tempfile.TemporaryDirectory() as directory, concurrent.futures.ThreadPoolExecutor(NUM_COPIES) as pool:

        def one(mutation: Mutation) -> Outcome:
            if not hasattr(local, "tree"):
                local.tree = copy_to(Path(directory) / str(threading.get_ident()))
            return run(mutation, local.tree)

        missed = 0
        for outcome in pool.map(one, chosen):
            answer = outcome.problem or outcome.failed or "NO TEST FAILED"
            missed += outcome.failed is None
            print(f"{outcome.seconds:5.1f} s  {outcome.mutation}  {answer}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} mutations were caught")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
