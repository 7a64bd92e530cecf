"""The patterns by which `.ci/run` finds the files with slow tests and with tests on Ray: none is left out."""

import re
import subprocess
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
RUN = TESTS.parent / ".ci" / "run"


def files_with(pattern):
    """Names of the test files that `.ci/run` finds."""
    (function,) = re.findall(r"^files_with\(\) \{.*?^\}", RUN.read_text(), re.MULTILINE | re.DOTALL)
    command = f"{function}\nfiles_with '{pattern}'"
    return set(subprocess.check_output(["bash", "-c", command], cwd=TESTS.parent, text=True).split())


@pytest.mark.parametrize("mark", ["slow", "ray"])
def test_each_file_with_a_marked_test_is_found(mark):
    """A mark is written in the file of the test, or in a helper whose name is in the pattern."""
    (pattern,) = re.findall(rf"files_with '([^']*{mark}[^']*)'", RUN.read_text())
    found = files_with(pattern)
    paths = [path for path in TESTS.rglob("*.py") if f"mark.{mark}" in path.read_text()]
    in_tests = {str(path.relative_to(TESTS.parent)) for path in paths if path.name.startswith("test_")}
    helpers = {path.stem for path in paths if not path.name.startswith("test_")}
    assert in_tests and in_tests <= found
    assert all(helper in pattern for helper in helpers), helpers
