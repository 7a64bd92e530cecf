"""Sweeps of real runs, whose controller and members are killed: the table equals that of an uninterrupted sweep."""

import contextlib
import csv
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from alfish.sweeps.table import CSV

RATE = "--search=Learner.learning_rate=log(1e-4, 1e-1)"
ACTIVATION = "--search=MLP.activation=choice('tanh', 'relu')"


def sweep(toy, directory, *flags):
    """The process of `alfish sweep`."""
    command = [sys.executable, "-m", "alfish", "sweep", f"--gin_file={toy}", f"--root_dir={directory}", *flags]
    with open(directory.with_suffix(".log"), "ab") as output:
        return subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)


def members(directory):
    """Process ids of the runs that are being trained in a sweep's directory."""
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


def whole(toy, directory, *flags):
    """The table of a sweep that nobody interrupts."""
    assert sweep(toy, directory, *flags).wait(600) == 0, directory.with_suffix(".log").read_text()
    return (directory / CSV).read_text()


def progress(directory):
    """Steps of all newest checkpoints together."""
    newest = {}
    for path in directory.glob("[0-9]*/checkpoints/checkpoint-*.pt"):
        newest[path.parent] = max(newest.get(path.parent, 0), int(path.stem.removeprefix("checkpoint-")))
    return sum(newest.values())


def killed(toy, directory, num_kills, total, *flags):
    """The table of a sweep whose controller, members or both are killed at random moments; and who was killed.

    Moments are points of its progress, of which the last 30 % stay free, so that no machine is too fast for
    them. Half of the kills come some time after that point: then a process may be starting or writing.
    """
    draw, victims = random.Random(num_kills), []
    process = sweep(toy, directory, *flags)
    for point in sorted(draw.uniform(0, 0.7 * total) for _ in range(num_kills)):
        while progress(directory) < point:
            assert process.poll() is None, directory.with_suffix(".log").read_text()
            time.sleep(0.01)
        time.sleep(draw.choice([0, draw.uniform(0, 4)]))
        who = draw.choice(["controller", "members", "both"])
        pids = members(directory) if who != "controller" else []
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(pid, signal.SIGKILL)
        if not pids or who != "members":
            process.kill()
            process.wait()
            process = sweep(toy, directory, *flags)
        victims.append(who if pids else "controller")
    assert process.wait(600) == 0, directory.with_suffix(".log").read_text()
    return (directory / CSV).read_text(), victims


def assert_nothing_is_left(directory):
    end = time.monotonic() + 60
    while members(directory):
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.slow
def test_a_killed_sweep_equals_an_uninterrupted_one(toy, tmp_path):
    flags = "--sampler=random", "--trials=3", "--jobs=2", RATE, ACTIVATION
    found, victims = killed(toy, tmp_path / "killed", 3, 3 * 2000, *flags)
    assert found == whole(toy, tmp_path / "whole", *flags)
    assert len(victims) == 3
    assert_nothing_is_left(tmp_path / "killed")


@pytest.mark.long
@pytest.mark.parametrize(
    "flags",
    [
        ("--sampler=tpe", "--trials=16", "--jobs=1"),
        ("--sampler=tpe", "--trials=16", "--jobs=1", "--prune"),
        ("--sampler=random", "--trials=12", "--jobs=2", "--seeds=2"),
    ],
)
def test_a_sweep_killed_20_times_equals_an_uninterrupted_one(toy, tmp_path, flags):
    toy.write_text(toy.read_text() + "Trainer.num_env_steps = 10000\nEvaluate.period = 1000\n")
    flags = *flags, RATE, ACTIVATION
    expected = whole(toy, tmp_path / "whole", *flags)
    total = progress(tmp_path / "whole")
    found, victims = killed(toy, tmp_path / "killed", 20, total, *flags)
    assert found == expected
    assert len(victims) == 20 and set(victims) == {"controller", "members", "both"}
    assert_nothing_is_left(tmp_path / "killed")


@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), pytest.param(signal.SIGINT, marks=pytest.mark.long)],
)
def test_a_signal_ends_the_runs_with_their_checkpoints_and_a_failed_trial_is_no_end(toy, tmp_path, number):
    """One of the trials has a loss that is not finite."""
    toy.write_text(toy.read_text() + "Trainer.num_env_steps = 60000\nCheckpointSaver.period = 50000\n")
    flags = "--search=Learner.learning_rate=grid(1e-3, 1e30)", "--jobs=2"
    directory = tmp_path / "s"
    process = sweep(toy, directory, *flags)
    end = time.monotonic() + 120
    while not list(directory.glob("000/eval/*")):
        assert time.monotonic() < end and process.poll() is None, directory.with_suffix(".log").read_text()
        time.sleep(0.05)
    process.send_signal(number)
    assert process.wait(120) == 128 + number and not members(directory)
    assert list(directory.glob("000/checkpoints/*.pt")) and not (directory / "000" / "done").exists()
    assert "the same command continues" in directory.with_suffix(".log").read_text()
    table = list(csv.DictReader(whole(toy, directory, *flags).splitlines()))
    assert [row["state"] for row in table] == ["complete", "failed"]
    assert "not finite" in table[1]["reason"]
