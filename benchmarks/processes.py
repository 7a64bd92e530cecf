"""Child processes: measuring scripts in the Python of alfish or of another library, `alfish`, and busy processes.

This module imports neither torch nor alfish. A script runs with the project on its path, from any working directory.
"""

import contextlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import PROJECT
from benchmarks.runs.script import NO_SUCH_RECIPE

PEERS = PROJECT / "benchmarks" / "peers"


class NoSuchRecipe(Exception):
    """A script has no such recipe, reported by its exit status."""


def machine() -> str:
    """Returns the processor, the number of cores and Python's version."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    model = models[0] if models else platform.processor() or platform.machine()
    return f"{model}, {os.cpu_count()} cores, Python {platform.python_version()}"


def peer_python(peer: str) -> str:
    """Returns the Python of a library's virtual environment.

    It is made from `peers/PEER.txt` at first use, and again if that file has changed or the installation broke off.
    """
    directory = PEERS / f".venv-{peer}"
    python, requirements, installed = directory / "bin" / "python", PEERS / f"{peer}.txt", directory / "installed.txt"
    if not installed.is_file() or installed.read_bytes() != requirements.read_bytes():
        subprocess.run([sys.executable, "-m", "venv", "--clear", directory], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--requirement", requirements], check=True)
        shutil.copy(requirements, installed)
    return str(python)


def with_threads(threads: int) -> dict[str, str]:
    """Returns environment variables for a process with this number of threads in OpenMP, MKL and XLA."""
    variables = {"OMP_NUM_THREADS": str(threads), "NPROC": str(threads), "PYTHONPATH": str(PROJECT)}
    return os.environ | variables | ({"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"} if threads == 1 else {})


def side(python: str, library: str, benchmark: str, task: str, seed: int, *options: str) -> list[str]:
    """Returns the command of a library's side of a benchmark."""
    script = str(PROJECT / "benchmarks" / "runs" / f"{library}_run.py")
    return [python, script, task, str(seed), *options, f"--benchmark={benchmark}"]


def run_script(
    command: Sequence[str], environment: Mapping[str, str], watch: Callable[[int], None] | None = None
) -> dict[str, Any]:
    """Runs a script and returns the JSON object of its last printed line.

    Args:
      command: the program and its arguments.
      environment: all of its variables, as `with_threads` gives them.
      watch: is called with the process's id twice a second until it ends.

    Raises:
      NoSuchRecipe: the script ended with the status `NO_SUCH_RECIPE`.
      SystemExit: it failed; holds what it wrote to standard error.
    """
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(command, stdout=output, stderr=errors, env=environment, cwd=PROJECT) as process:
            try:
                while watch is not None and process.poll() is None:
                    watch(process.pid)
                    time.sleep(0.5)
                process.wait()
            finally:
                process.kill()  # one that has ended does not mind; another must not go on unwatched
        output.seek(0), errors.seek(0)
        if process.returncode == NO_SUCH_RECIPE:
            raise NoSuchRecipe(" ".join(command))
        if process.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{errors.read()}")
        return json.loads(output.read().splitlines()[-1])


def alfish(*arguments: str) -> None:
    """Runs `alfish` with one thread in the project's directory; its output is shown.

    Raises:
      CalledProcessError: it failed.
    """
    subprocess.run([sys.executable, "-m", "alfish", *arguments], check=True, env=with_threads(1), cwd=PROJECT)


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Runs `count` processes that only count."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def memory_mb(pid: int | str) -> float:
    """Returns MB of memory of a process and its descendants, shared pages divided among users; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        tasks = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:
        return 0.0
    own = sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024
    return own + sum(memory_mb(child) for children in tasks for child in children.split())
