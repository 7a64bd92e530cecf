"""`alfish watch` and `alfish train`, killed at random moments: results are whole, and none is missing or repeated."""

import contextlib
import csv
import json
import random
import re
import subprocess
import sys
import time
from collections import Counter

import pytest

from alfish.__main__ import main
from alfish.runs.checkpoints import Checkpoints

SETTINGS = [
    "Trainer.num_env_steps=100_000_000",
    "Trainer.unroll_length=64",
    "Trainer.listeners=[@CheckpointSaver(), @Summaries()]",
    "Trainer.max_evaluation_length=100",
    "CheckpointSaver.period=512",
    "CheckpointSaver.keep_last=4",
    "Learner.compile=False",  # a compilation would be longer than most processes live
]
EPISODES = ["--num_episodes=3", "--seed=5"]


class Process:
    """`alfish train` or `alfish watch` of a run, started again after each kill."""

    def __init__(self, stack, path, name, *flags):
        self._log = path.with_suffix(f".{name}.log")
        self._command = [sys.executable, "-u", "-m", "alfish", name, f"--root_dir={path}", *flags]
        self.start()
        stack.callback(self.kill_if_alive)

    def start(self):
        with open(self._log, "ab") as output:
            self._process = subprocess.Popen(self._command, stdout=output, stderr=output)

    def kill(self):
        assert self._process.poll() is None, self.words()
        self.kill_if_alive()

    def kill_if_alive(self):
        self._process.kill()
        self._process.wait()

    def wait(self):
        assert self._process.wait(300) == 0, self.words()

    def words(self):
        return self._log.read_text()


def results(path):
    """Results by their steps; fails on one that is not whole."""
    found, tables = {}, list((path / "eval").glob("evaluation-*.csv"))  # first, because a table follows its result
    for result in (path / "eval" / "watch").glob("evaluation-*.json"):
        found[int(result.stem.split("-")[1])] = json.loads(result.read_text())
    for table in tables:
        with open(table, newline="") as file:
            rows = list(csv.DictReader(file))
        assert [row["seed"] for row in rows] == ["5", "6", "7"], table
        assert [float(row["return"]) for row in rows] == found[int(table.stem.split("-")[1])]["evaluation"]["returns"]
    return found


def check_kills(stack, path, num_kills, seed):
    draw = random.Random(seed)
    train = Process(stack, path, "train", "--gin_file=ppo_pendulum.gin", *(f"--gin_param={one}" for one in SETTINGS))
    until(lambda: Checkpoints(path / "checkpoints").steps())
    watch = Process(stack, path, "watch", "--all", *EPISODES)
    until(lambda: results(path))
    for kill in range(num_kills):
        if kill % 2:  # else a process may still be starting
            before = len(results(path))
            until(lambda before=before: len(results(path)) > before)
        end = time.monotonic() + draw.uniform(0, 2)
        while time.monotonic() < end:
            results(path)  # a reader at any moment
            time.sleep(0.02)
        victims = [[watch], [train], [watch, train]][kill % 3]
        for victim in victims:
            victim.kill()
        for victim in victims:
            victim.start()
    train.kill()
    watch.kill()
    last = Process(stack, path, "watch", "--all", "--idle_seconds=0", *EPISODES)
    last.wait()
    kept = Checkpoints(path / "checkpoints").steps()
    found = results(path)
    assert kept and set(kept) <= set(found)
    assert {path.name for path in (path / "tensorboard" / "watch").iterdir()} == {
        f"events.out.tfevents.{steps:012d}.evaluation" for steps in found
    }
    assert {int(path.stem.split("-")[1]) for path in (path / "eval").glob("*.csv")} == set(found)
    evaluated = Counter(re.findall(r"checkpoint ([\d,]+): return", last.words()))
    assert set(evaluated.values()) <= {1}, evaluated
    # An uninterrupted process gets the same numbers.
    assert main(["watch", f"--root_dir={path}", "--all", "--idle_seconds=0", "--name=again", *EPISODES]) == 0
    for steps in kept:
        tables = [(path / "eval" / f"{name}-{steps:012d}.csv").read_text() for name in ("evaluation", "again")]
        assert tables[0] == tables[1]
    return len(found)


def until(condition):
    end = time.monotonic() + 600  # on a machine with other work
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.fixture
def stack():
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.mark.long
def test_results_survive_kills(stack, tmp_path):
    assert check_kills(stack, tmp_path / "run", 3, seed=0) >= 1


@pytest.mark.long
def test_results_survive_50_kills(stack, tmp_path):
    assert check_kills(stack, tmp_path / "run", 50, seed=1) >= 20
