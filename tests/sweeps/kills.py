"""Commands that train groups of runs, and kills of their controllers and members at random moments."""

import contextlib
import itertools
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from alfish.__main__ import main


def arguments(subcommand, toy, directory, *flags):
    return [subcommand, f"--gin_file={toy}", f"--root_dir={directory}", *flags]


def start(subcommand, toy, directory, *flags):
    """The process of a command."""
    words = [sys.executable, "-m", "alfish", *arguments(subcommand, toy, directory, *flags)]
    with open(directory.with_suffix(".log"), "ab") as output:
        return subprocess.Popen(words, stdout=output, stderr=output, start_new_session=True)


def run(*command):
    """Runs a command to its end; its controller is this process, which has imported what it needs."""
    assert main(arguments(*command)) == 0


def members(directory):
    """Process ids of the runs that are being trained in the directory of a group."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
                is_ended = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
            except OSError:
                continue
            if "train" in words and any(word.startswith(f"--root_dir={directory}/") for word in words) and not is_ended:
                found.append(int(entry.name))
    return found


def progress(directory):
    """Steps of all newest checkpoints together."""
    newest = {}
    for path in directory.rglob("checkpoints/checkpoint-*.pt"):
        newest[path.parent] = max(newest.get(path.parent, 0), int(path.stem.removeprefix("checkpoint-")))
    return sum(newest.values())


def kill(subcommand, toy, directory, num_kills, total, *flags):
    """Runs a command to its end, and kills its controller, its members or both at random moments; returns whom.

    Moments are points of its progress, of which the last 30 % stay free, so that no machine is too fast for
    them. Half of the kills come some time after that point: then a process may be starting or writing.
    """
    draw, victims = random.Random(num_kills), []
    process = start(subcommand, toy, directory, *flags)
    points = sorted(draw.uniform(0, 0.7 * total) for _ in range(num_kills))
    for point, who in zip(points, itertools.cycle(["both", "members", "controller"])):
        while progress(directory) < point:
            assert process.poll() is None, directory.with_suffix(".log").read_text()
            time.sleep(0.01)
        time.sleep(draw.choice([0, draw.uniform(0, 4)]))
        pids = members(directory) if who != "controller" else []
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(pid, signal.SIGKILL)
        if not pids or who != "members":
            process.kill()
            process.wait()
            process = start(subcommand, toy, directory, *flags)
        victims.append(who if pids else "controller")
    assert process.wait(600) == 0, directory.with_suffix(".log").read_text()
    return victims


def assert_nothing_is_left(directory):
    end = time.monotonic() + 60
    while members(directory):
        assert time.monotonic() < end
        time.sleep(0.1)
