"""Sweeps of real runs, whose controller and members are killed: the table equals that of an uninterrupted sweep."""

import csv
import functools
import signal
import time

import pytest
from kills import assert_nothing_is_left, kill, members, progress, run, start

from alfish.sweeps.table import CSV

RATE = "--search=Learner.learning_rate=log(1e-4, 1e-1)"
ACTIVATION = "--search=MLP.activation=choice('tanh', 'relu')"


sweep = functools.partial(start, "sweep")


def table_of(directory):
    return (directory / CSV).read_text()


def whole(toy, directory, *flags):
    """The table of a sweep that nobody interrupts."""
    run("sweep", toy, directory, *flags)
    return table_of(directory)


@pytest.mark.long
def test_a_killed_sweep_equals_an_uninterrupted_one(toy, tmp_path):
    flags = "--sampler=random", "--trials=2", "--jobs=2", RATE, ACTIVATION
    victims = kill("sweep", toy, tmp_path / "killed", 2, 2 * 2000, *flags)
    assert table_of(tmp_path / "killed") == whole(toy, tmp_path / "whole", *flags)
    assert len(victims) == 2
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
    victims = kill("sweep", toy, tmp_path / "killed", 20, total, *flags)
    assert table_of(tmp_path / "killed") == expected
    assert len(victims) == 20 and set(victims) == {"controller", "members", "both"}
    assert_nothing_is_left(tmp_path / "killed")


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_runs_with_checkpoints_a_failed_trial_does_not(toy, tmp_path, number):
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
    assert "run the same command again to continue" in directory.with_suffix(".log").read_text()
    table = list(csv.DictReader(whole(toy, directory, *flags).splitlines()))
    assert [row["state"] for row in table] == ["complete", "failed"]
    assert "not finite" in table[1]["reason"]
