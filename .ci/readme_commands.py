"""Runs the shell commands of a page as they are printed, in the current directory, and stops at the first that fails.

  python .ci/readme_commands.py README.md

The current directory is an empty one outside the checkout; `alfish` and the page's extras are installed in the
environment whose Python runs this. Runs are shortened by --gin_param; what needs the network, a server or the checkout
itself is skipped, and each reason is printed.

Commands until the first training start from the shell, as a user's do. Later ones of alfish run in forks of this
process, which has imported torch: a process takes two seconds for that. What needs a shell always gets one.
"""

import importlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO

SHORT = "--gin_param=Trainer.num_env_steps=1000 --gin_param=Evaluate.num_episodes=2"
LIMIT = 300  # seconds a command
IMPORTED = ("torch", "alfish.training.trainer")

# The first pattern that a command begins with decides; a command without one runs as it is printed.
SKIPPED = {
    "git clone": "the network, and the checkout that this page is in",
    "make ": "the checkout; .ci/run makes the same there",
    "pip install": "the checkout; .ci/run installs the wheel with the same extras",
    "minari download": "the network",
    "tensorboard": "a server that runs until it is interrupted",
    "alfish train .*ray.gin": "a Ray cluster",
}
APPENDED = {
    "alfish train .*--profile": f"{SHORT} --gin_param=ReplayBatches.warmup_env_steps=900",
    "alfish train --gin_file=iql": "--gin_param=Trainer.num_updates=100 --gin_param=Evaluate.num_episodes=2",
    "alfish train": SHORT,
    "torchrun": SHORT,
    "alfish sweep": f"{SHORT} --trials=2",
    "alfish population": (
        "--gin_param=Trainer.num_env_steps=4096 --gin_param=Evaluate.period=2048 --gin_param=Evaluate.num_episodes=2 "
        "--members=2 --share=0.5 --generations=2"
    ),
    "alfish record": "--num_episodes=2",
    "alfish evaluate": "--num_episodes=5",
}
REPLACED = {
    # A data set of the same environment and name, in place of the one that is downloaded.
    "alfish import --source=minari:": (
        "alfish train --gin_file=sac_hopper.gin --root_dir=runs/hopper --gin_param=Trainer.num_env_steps=300 "
        "--gin_param=ReplayBatches.warmup_env_steps=100 "
        "--gin_param=Evaluate.num_episodes=2 && "
        "alfish record --root_dir=runs/hopper --num_episodes=50 --sample --output=data/hopper"
    ),
}


def commands(text: str) -> list[str]:
    """The commands of a page's shell blocks: indented by four spaces, or between ```sh and ```."""
    found, fence = [], None
    for line in re.sub(r"\s*\\\n\s*", " ", text).splitlines():  # a command may continue on the next line
        if line.startswith("```"):
            fence = None if fence is not None else line[3:].strip()
        elif fence == "sh" or (fence is None and line.startswith("    ")):
            command = re.sub(r"\s+#.*", "", line).strip()
            found += [command] if command else []
    return found


def first(table: dict[str, str], command: str) -> str | None:
    return next((value for pattern, value in table.items() if re.match(pattern, command)), None)


def needs_shell(command: str) -> bool:
    """Whether a command is no command of alfish, or has operators or patterns outside of quotes."""
    unquoted = re.sub(r"'[^']*'|\"[^\"]*\"", "", command)
    return not command.startswith("alfish ") or re.search(r"[|&;<>$`*?~\\]", unquoted) is not None


def run_in_shell(command: str, environment: dict[str, str], output: IO[str]) -> int:
    """Runs a command, and returns its exit status."""
    done = subprocess.run(command, shell=True, env=environment, stdout=output, stderr=output, timeout=LIMIT)
    return done.returncode


def run_in_fork(command: str, environment: dict[str, str], output: IO[str]) -> int:
    """Runs a command of alfish in a fork of this process, and returns its exit status."""
    for module in IMPORTED:
        importlib.import_module(module)
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        for descriptor in (1, 2):
            os.dup2(output.fileno(), descriptor)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = [str(Path(sys.executable).with_name("alfish")), *shlex.split(command)[1:]]
        sys.exit(importlib.import_module("alfish.__main__").main())
    deadline = time.monotonic() + LIMIT
    while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            raise TimeoutError(f"{command} ran for more than {LIMIT} s")
        time.sleep(0.02)
    return os.waitstatus_to_exitcode(ended[1])


def main(page: Path) -> int:
    checkout = page.resolve().parent
    if Path.cwd() == checkout:
        print("readme_commands: run it in an empty directory, not in the checkout")
        return 2
    shutil.copytree(checkout / "examples", "examples", dirs_exist_ok=True)  # as a clone has them
    paths = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": paths, "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    is_first = True
    for command in commands(page.read_text()):
        if (reason := first(SKIPPED, command)) is not None:
            print(f"skipped  {command}\n         it needs {reason}", flush=True)
            continue
        replaced = first(REPLACED, command)
        for run in (replaced or f"{command} {first(APPENDED, command) or ''}".strip()).split(" && "):
            began = time.monotonic()
            with tempfile.TemporaryFile("w+") as output:
                status = (run_in_shell if is_first or needs_shell(run) else run_in_fork)(run, environment, output)
                output.seek(0)
                printed = output.read()
            is_first &= not run.startswith("alfish train")
            print(f"{time.monotonic() - began:5.1f} s  {run}", flush=True)
            if status:
                print(f"{printed}\nreadme_commands: exit status {status} of: {run}")
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
