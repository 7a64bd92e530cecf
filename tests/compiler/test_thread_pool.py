"""The threads that help kernels: `thread_pool_check.cpp` runs each check as a program of its own.

Cores and their use by others are read from a file that the check writes, and intervals are shorter than in training.
"""

import shutil
import subprocess
from pathlib import Path

import pytest

from alfish.compiler import kernels

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
CHECKS = (
    "every_task_is_done_once",
    "helpers_give_way",
    "helpers_that_are_held_up_are_sent_away",
    "helpers_that_slow_calls_are_sent_away",
    "a_forked_process_has_its_own_helpers",
    "helpers_without_work_sleep_and_end",
    "helpers_compute_in_the_callers_mode",
)
FASTER = {
    '"/proc/stat"': "stat_file",
    "!CPU_ISSET(core, &mine)": "false",
    "LOOK = SECOND * 3 / 10": "LOOK = SECOND / 20",
    "IDLE = 5 * SECOND": "IDLE = SECOND / 5",
    "SHORTEST_PAUSE = SECOND,": "SHORTEST_PAUSE = SECOND / 5,",
}


def build(directory, *options):
    """Compiles the checks with the header as it is, but for `FASTER`."""
    header = Path(kernels.__file__).with_name("thread_pool.h").read_text()
    for old, new in FASTER.items():
        assert old in header
        header = header.replace(old, new)
    source, program = directory / "check.cpp", directory / "check"
    checks = Path(__file__).with_name("thread_pool_check.cpp").read_text()
    source.write_text(f"static const char* stat_file;\n{header}{checks}")
    command = ["g++", "-std=c++17", "-O1", "-pthread", *options, str(source), "-o", str(program)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return program


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    return build(tmp_path_factory.mktemp("pool"))


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory):
    try:
        return build(tmp_path_factory.mktemp("sanitized"), "-fsanitize=thread", "-g")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no thread sanitizer: {error.stderr[:200]}")


def run(program, name):
    found = subprocess.run([program, name, program.with_suffix(".stat")], capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stderr


@pytest.mark.parametrize("name", CHECKS)
def test_of_the_pool(program, name):
    run(program, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["every_task_is_done_once", "helpers_give_way"])
def test_no_two_threads_race(sanitized, name):
    run(sanitized, name)
