"""Shared parts of the run scripts: their command line, and readings at the start and end of the measured time."""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

NO_SUCH_RECIPE = 3  # exit status
PROFILE = "--profile"
# Of a game whose wrapper skips frames: sticky actions, and episodes of 250 steps, so that some end in a short run.
ATARI = {"frameskip": 1, "repeat_action_probability": 0.25, "max_num_frames_per_episode": 1000}


class Reading(NamedTuple):
    """Clocks and counters at one moment of a run."""

    seconds: float
    cpu_seconds: float  # of all threads and descendants
    env_steps: int
    updates: int  # gradient steps


def read(env_steps: int, updates: int) -> Reading:
    """Returns the clocks now, with the counters."""
    return Reading(time.perf_counter(), cpu_seconds(), env_steps, updates)


def cpu_seconds(pid: int | str = "self") -> float:
    """Returns CPU seconds of a process and its descendants, user and system mode; 0 if it has ended.

    Descendants that still run count, which the system's own sums leave out: workers and compilers.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        children = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:
        return 0.0
    own = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")  # with children that have ended
    return own + sum(cpu_seconds(child) for each in children for child in each.split())


def report(first: Reading | None, last: Reading, average_return: float, versions: str) -> None:
    """Prints the differences of two readings as a JSON object; `first` is None if there was no eighth update."""
    if first is None:
        raise SystemExit("the run ended before its eighth update")
    result = {name: end - start for name, start, end in zip(Reading._fields, first, last)}
    print(json.dumps(result | {"return": average_return, "versions": versions}))


def versions(*packages: str) -> str:
    """Returns the names of installed packages, each with its version."""
    return ", ".join(f"{name} {version(name)}" for name in packages)


def main(recipes: Mapping[str, Callable[..., None]], **benchmarks: Callable[[argparse.Namespace], None]) -> None:
    """Runs what the command line says.

    Args:
      recipes: recipes of `benchmarks.throughput` by name, each called with a seed and, if one is given, a variant.
      **benchmarks: the library's side of other benchmarks, each called with the whole command line.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("recipe", help="or the name of a task")
    parser.add_argument("seed", type=int)
    parser.add_argument("variant", nargs="*", help="of a recipe of alfish; of defaults: the algorithm")
    parser.add_argument("--benchmark", choices=["throughput", *benchmarks], default="throughput")
    parser.add_argument(PROFILE, action="store_true", help="throughput of alfish only")
    parser.add_argument("--started", type=float, default=time.monotonic(), help="when the process was started")
    parser.add_argument("--max_env_steps", type=int, help="threshold: end here at the latest; schedules do not notice")
    parser.add_argument("--gin_param", action="append", default=[], help="threshold of alfish only")
    arguments = parser.parse_args()
    if arguments.benchmark in benchmarks:
        benchmarks[arguments.benchmark](arguments)
    elif arguments.recipe in recipes:
        recipes[arguments.recipe](arguments.seed, *arguments.variant)
    else:
        print(f"no {arguments.recipe} here; there is {', '.join(recipes)}", file=sys.stderr)
        sys.exit(NO_SUCH_RECIPE)
