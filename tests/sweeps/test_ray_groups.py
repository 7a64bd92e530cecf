"""Sweeps and populations on a Ray cluster equal those of one machine, also where Ray's processes are killed."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest
import toy_confs

sys.path.append(str(Path(__file__).parents[1] / "unrollers"))
from kills import run, start  # noqa: E402
from ray_cluster import nodes  # noqa: E402, F401
from test_kills import ACTIVATION, RATE, assert_nothing_is_left, members, sweep, whole  # noqa: E402
from test_population_kills import assert_equal  # noqa: E402

from alfish.errors import RunError  # noqa: E402
from alfish.sweeps import ray_jobs  # noqa: E402

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("nodes")]
FLAGS = ("--sampler=random", "--trials=2", "--jobs=2", RATE, ACTIVATION)


def until(condition, process, directory):
    # Ray gives its workers a low priority: beside two busy processes they take ten times as long.
    end = time.monotonic() + 600
    while not condition():
        if time.monotonic() > end or process.poll() is not None:
            process.kill()  # or the next test warns of it
            process.wait()
            pytest.fail(directory.with_suffix(".log").read_text())
        time.sleep(0.02)


def parent(pid):
    return int((Path("/proc") / str(pid) / "stat").read_text().rsplit(")", 1)[1].split()[1])


def ended(jobs):
    while not (found := jobs.wait(60)):
        pass
    return found


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The table of the sweep on one machine."""
    directory = tmp_path_factory.mktemp("expected")
    toy = directory / "toy.gin"
    toy.write_text(toy_confs.PPO)
    return whole(toy, directory / "one", *FLAGS)


@pytest.mark.parametrize("victim", ["task", pytest.param("machine", marks=pytest.mark.long)])
def test_a_ray_sweep_with_kills_equals_a_local_sweep(toy, tmp_path, expected, request, victim):
    directory = tmp_path / "ray"
    process = sweep(toy, directory, "--ray", *FLAGS)
    until(lambda: list(directory.glob("00*/checkpoints/*.pt")) and members(directory), process, directory)
    worker = parent(members(directory)[0])  # Ray's; the run ends with its lifeline
    if victim == "task":
        os.kill(worker, signal.SIGKILL)
    else:
        cluster = request.getfixturevalue("nodes")
        (node,) = [node for node in cluster.nodes if node.all_processes["raylet"][0].process.pid == parent(worker)]
        cluster.kill(node)
    assert process.wait(400) == 0, directory.with_suffix(".log").read_text()
    assert (directory / "trials.csv").read_text() == expected
    assert_nothing_is_left(directory)


@pytest.mark.long
def test_a_ray_population_with_a_kill_equals_a_local_population(toy, tmp_path):
    """Copies continue from files that another task of the cluster has written."""
    flags = "--members=2", "--share=0.5", "--generations=2", "--jobs=2", "--perturb=Learner.learning_rate=1e-4..1e-1"
    directory = tmp_path / "ray"
    process = start("population", toy, directory, "--ray", *flags)
    until(lambda: list(directory.glob("g00*/m*/checkpoints/*.pt")) and members(directory), process, directory)
    os.kill(parent(members(directory)[0]), signal.SIGKILL)
    assert process.wait(400) == 0, directory.with_suffix(".log").read_text()
    run("population", toy, tmp_path / "one", *flags)
    assert_equal(directory, tmp_path / "one")
    assert_nothing_is_left(directory)


def test_a_signal_ends_running_and_waiting_ray_runs(toy, tmp_path):
    toy.write_text(toy.read_text() + "Trainer.num_env_steps = 5_000_000\nCheckpointSaver.period = 150000\n")
    directory = tmp_path / "s"
    process = sweep(toy, directory, "--ray", *FLAGS, "--jobs=5", "--trials=5", "--cpus_per_run=4")
    until(lambda: list(directory.glob("000/eval/*")) and list(directory.glob("001/eval/*")), process, directory)
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 143, directory.with_suffix(".log").read_text()
    assert_nothing_is_left(directory)
    assert all(list((directory / name).glob("checkpoints/*.pt")) for name in ("000", "001"))
    assert not list(directory.glob("*/done")) and not list(directory.glob("*/stop"))


@pytest.mark.parametrize("is_stopped", [True, False])
def test_a_failed_task_counts_as_stopped_after_a_stop_request(nodes, tmp_path, monkeypatch, is_stopped):  # noqa: F811
    def fails(directory, arguments):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        (Path(directory) / "begun").touch()
        while is_stopped and not (Path(directory) / ray_jobs.STOP).exists():
            time.sleep(0.02)
        raise TypeError("SIGINT is ignored")

    monkeypatch.setattr(ray_jobs, "train", fails)
    jobs = ray_jobs.RayJobs(1)
    jobs.start(tmp_path, [])
    try:
        if is_stopped:
            while not (tmp_path / "begun").exists():
                assert not jobs.wait(0.1)
            jobs.stop(tmp_path)
            assert ended(jobs) == [(tmp_path, ray_jobs.STOPPED)]
        else:
            with pytest.raises(RunError, match="could not be started: SIGINT is ignored"):
                ended(jobs)
    finally:
        jobs.close()
