"""Runs the shell commands of a page as they are printed, in the current directory, and stops at the first that fails.

  python .ci/readme_commands.py README.md

The current directory is an empty one outside the checkout; `alfish` and the page's extras are installed in the
environment whose Python runs this. Runs are shortened by --gin_param; what needs the network, a server or the checkout
itself is skipped, and each reason is printed.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

SHORT = "--gin_param=Trainer.num_env_steps=1000 --gin_param=Evaluate.num_episodes=2"
LIMIT = 300  # seconds a command

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
}
REPLACED = {
    # A data set of the same environment and name, in place of the one that is downloaded.
    "alfish import --source=minari:": (
        "alfish train --gin_file=sac_hopper.gin --root_dir=runs/hopper --gin_param=Trainer.num_env_steps=200 "
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


def main(page: Path) -> int:
    checkout = page.resolve().parent
    if Path.cwd() == checkout:
        print("readme_commands: run it in an empty directory, not in the checkout")
        return 2
    shutil.copytree(checkout / "examples", "examples", dirs_exist_ok=True)  # as a clone has them
    paths = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": paths, "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    for command in commands(page.read_text()):
        if (reason := first(SKIPPED, command)) is not None:
            print(f"skipped  {command}\n         it needs {reason}", flush=True)
            continue
        replaced = first(REPLACED, command)
        run = replaced or f"{command} {first(APPENDED, command) or ''}".strip()
        began = time.monotonic()
        done = subprocess.run(run, shell=True, env=environment, capture_output=True, text=True, timeout=LIMIT)
        print(f"{time.monotonic() - began:5.1f} s  {run}", flush=True)
        if done.returncode:
            print(f"{done.stdout}{done.stderr}\nreadme_commands: exit status {done.returncode} of: {run}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
