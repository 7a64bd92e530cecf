"""Applies each mutation of `tests/mutations` to a copy of the tree, and names the test that fails.

    make mutants                        # all of them
    python tests/mutants.py replay-07   # those whose name begins so

A mutation is a patch that breaks one contract. The lines before its first `---` are a header:

    Breaks: a return crosses the end of its episode.
    Test: tests/test_returns.py::test_a_return_stops_at_the_end_of_its_episode

`Test` holds arguments of pytest: files, tests, options. The exit status is 1 unless each mutation makes one of its
tests fail. That the same tests pass without the mutation is what `make test` says.
"""

import concurrent.futures
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
MUTATIONS = Path(__file__).parent / "mutations"
COPIED = (
    *("alfish", "benchmarks", "confs", "docs", "examples", "tests"),
    *("CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "README.md", "pyproject.toml"),
)
NUM_COPIES = 2
SECONDS = 300  # of one mutation; a test that hangs counts as failing


class Mutation(NamedTuple):
    name: str
    path: Path
    breaks: str
    test: str


class Outcome(NamedTuple):
    mutation: Mutation
    failed: str | None  # the test's id; None: no test failed
    problem: str | None  # why there is no answer
    seconds: float


def read(path: Path) -> Mutation:
    """Returns the mutation of a patch file.

    Raises:
      ValueError: the header is incomplete.
    """
    header, _, _ = path.read_text().partition("\n--- ")
    fields = dict(re.findall(r"^(Breaks|Test): (.+)$", header, re.MULTILINE))
    if len(fields) != 2:
        raise ValueError(f"{path.name} begins with neither 'Breaks: ...' and 'Test: ...'")
    return Mutation(path.stem, path, fields["Breaks"], fields["Test"])


def mutations(prefixes: tuple[str, ...] = ("",)) -> list[Mutation]:
    """Returns the mutations whose names begin with one of the prefixes, by name."""
    return [read(path) for path in sorted(MUTATIONS.glob("*.patch")) if path.stem.startswith(prefixes)]


def apply(patch: Path, tree: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Runs `git apply` in a tree; one line of context on each side must match."""
    command = ["git", "apply", "-C1", "--recount", *options, str(patch)]
    return subprocess.run(command, cwd=tree, capture_output=True, text=True)


def run(mutation: Mutation, tree: Path) -> Outcome:
    """Applies one mutation to `tree`, runs its tests there, and takes the mutation out again."""
    began = time.monotonic()
    applied = apply(mutation.path, tree)
    if applied.returncode:
        return Outcome(mutation, None, f"does not apply: {applied.stderr.strip()}", 0.0)
    try:
        # -B: a mutation of equal length within the same second would leave the old bytecode valid.
        tests = [
            "-B",
            "-m",
            "pytest",
            "-x",
            "-p",
            "no:cacheprovider",
            "-m",
            "",
            "--tb=no",
            "-rfE",
            *mutation.test.split(),
        ]
        environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            ran = subprocess.run(
                [sys.executable, *tests], cwd=tree, env=environment, capture_output=True, text=True, timeout=SECONDS
            )
        except subprocess.TimeoutExpired:
            return Outcome(mutation, f"no end after {SECONDS} s", None, time.monotonic() - began)
        failed = re.search(r"^(?:FAILED|ERROR) (\S+)", ran.stdout, re.MULTILINE)
        seconds = time.monotonic() - began
        if ran.returncode in (1, 2) and failed:
            return Outcome(mutation, failed[1], None, seconds)
        if ran.returncode == 0:
            return Outcome(mutation, None, None, seconds)
        return Outcome(
            mutation, None, f"pytest ended with {ran.returncode}: {ran.stdout[-500:]}{ran.stderr[-500:]}", seconds
        )
    finally:
        apply(mutation.path, tree, "--reverse")


def copy_to(tree: Path) -> Path:
    """Copies what tests need; a copy has no `.git`, so `git apply` treats it as a plain directory."""
    tree.mkdir()
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__", ".venv*"))
        else:
            shutil.copy(source, tree / name)
    return tree


def main(prefixes: list[str]) -> int:
    chosen = mutations(tuple(prefixes) or ("",))
    if not chosen:
        print(f"no mutation begins with {' or '.join(prefixes)}", file=sys.stderr)
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
            print(f"{outcome.mutation.name:<16} {outcome.seconds:5.1f} s  {answer}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} mutations were caught")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
