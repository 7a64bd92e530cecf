"""Processes of runs: they end with their starter, each alone gets its signals, and nothing of them is left."""

import os
import signal
import subprocess
import sys
import time

import pytest

from alfish.sweeps import jobs, run_state
from alfish.sweeps.jobs import OUTPUT, JobEnded, LocalJobs
from alfish.sweeps.run_state import MAX_DEATHS, Endings, RunState, mark_failed

# In place of the real program: says what it was given, and ends by itself, or when it is asked to.
STUB = """
import signal, sys, time
from alfish.sweeps.jobs import follow
follow(int(sys.argv[1]), sys.argv[2])
print(*sys.argv[3:], flush=True)
if "--gin_param=sleep" in sys.argv:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    print("ready", flush=True)
    while True:
        time.sleep(0.05)
sys.exit(int(sys.argv[-1]))
"""


@pytest.fixture
def pool(monkeypatch):
    monkeypatch.setattr(jobs, "PROGRAM", STUB)
    pool = LocalJobs(2)
    yield pool
    pool.close()


def directory(tmp_path, name="run"):
    (tmp_path / name).mkdir()
    return tmp_path / name


def until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def text(path):
    return path.read_text() if path.is_file() else ""


def ended(pool):
    """The next ends, however long they take."""
    found = []
    until(lambda: found.extend(pool.wait(1.0)) or found)
    return found


def test_a_process_gets_its_directory_and_arguments_and_its_end_is_reported_once(tmp_path, pool):
    run = directory(tmp_path)
    pool.start(run, ["--gin_param=a=1", "3"])
    assert list(pool.running) == [run]
    assert ended(pool) == [JobEnded(run, 3)]
    assert not pool.running and pool.wait(0) == []
    assert (run / OUTPUT).read_text() == f"train --root_dir={run} --gin_param=a=1 3\n"


def test_a_process_is_stopped_in_its_own_process_group(tmp_path, pool):
    runs = directory(tmp_path, "a"), directory(tmp_path, "b")
    for run in runs:
        pool.start(run, ["--gin_param=sleep"])
    until(lambda: all("ready" in text(run / OUTPUT) for run in runs))
    groups = {os.getpgid(process.pid) for process in pool._processes.values()}
    assert len(groups) == 2 and os.getpgid(0) not in groups
    pool.stop(runs[1])
    assert ended(pool) == [JobEnded(runs[1], 143)]
    assert list(pool.running) == [runs[0]]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_processes_end_when_their_starter_ends(tmp_path, number):
    """Whatever ended it, and although a descriptor of the pipe was inherited by the other member."""
    starter = f"""
import sys, time
from pathlib import Path
from alfish.sweeps import jobs
jobs.PROGRAM = {STUB!r}
pool = jobs.LocalJobs(2)
for name in ("a", "b"):
    pool.start(Path(sys.argv[1]) / name, ["--gin_param=sleep"])
print(*(process.pid for process in pool._processes.values()), flush=True)
time.sleep(600)
"""
    runs = [directory(tmp_path, name) for name in "ab"]
    with subprocess.Popen([sys.executable, "-c", starter, tmp_path], stdout=subprocess.PIPE, text=True) as process:
        members = [int(word) for word in process.stdout.readline().split()]
        until(lambda: all("ready" in text(run / OUTPUT) for run in runs))
        process.send_signal(number)
    until(lambda: not any(map(is_running, members)))


def is_running(pid):
    """Zombies have ended: nobody may be there to collect their status."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_run_waits_until_the_previous_run_leaves_the_directory(tmp_path, pool):
    from alfish.runs import files

    run = directory(tmp_path)
    holder = Endings()
    unlock = files.lock(run, holder)
    pool.start(run, ["0"])
    assert pool.wait(0.5) == [] and not text(run / OUTPUT)
    unlock()
    assert ended(pool) == [JobEnded(run, 0)]


def test_interrupted_runs_are_continued_and_failed_ones_are_not(tmp_path):
    run, endings = directory(tmp_path), Endings()
    (run / OUTPUT).write_text("a line\nalfish train: a minibatch does not divide\n")
    for status in (0, 75, 130, 143):
        assert endings.failure(JobEnded(run, status)) is None
    assert endings.failure(JobEnded(run, 2)) == "a minibatch does not divide"
    (run / OUTPUT).write_text("Traceback\n  line\nValueError: shapes differ\n\n")
    assert endings.failure(JobEnded(run, 1)) == "ValueError: shapes differ"
    (run / OUTPUT).write_text("alfish train: worker 0 failed:\nTraceback\n  line\nValueError: no such map\n")
    assert endings.failure(JobEnded(run, 1)) == "worker 0 failed: ValueError: no such map"


def test_a_repeatedly_killed_run_fails_without_progress(tmp_path):
    run, endings = directory(tmp_path), Endings()
    checkpoints = run / "checkpoints"
    checkpoints.mkdir()
    for _ in range(MAX_DEATHS - 1):
        assert endings.failure(JobEnded(run, -9)) is None
    (checkpoints / "checkpoint-000000000100.pt").touch()
    for _ in range(MAX_DEATHS - 1):
        assert endings.failure(JobEnded(run, -9)) is None
    assert "SIGKILL 5 times without saving a new checkpoint" in endings.failure(JobEnded(run, -9))


def test_the_state_of_a_run_is_read_from_its_directory(tmp_path):
    run = tmp_path / "run"
    assert RunState.read(run) == RunState(run, False, None, None, {})
    (run / "eval").mkdir(parents=True)
    for clock, returns in ((1000, (3.0, 5.0)), (500, (1.0, 2.0)), (1500, (0.1, 0.2))):
        rows = "".join(f"{k},{k},{value!r},7\n" for k, value in enumerate(returns))
        (run / "eval" / f"evaluation-{clock:012d}.csv").write_text(f"episode,seed,return,length\n{rows}")
    (run / "eval" / "other-000000000500.csv").write_text("episode,seed,return,length\n0,0,9.0,7\n")
    (run / "eval" / ".evaluation-000000002000.csv.7.tmp").write_text("episode,se")
    assert RunState.read(run).evaluations == {500: (1.0, 2.0), 1000: (3.0, 5.0), 1500: (0.1, 0.2)}
    state = RunState.read(run)
    assert state.means == {500: 1.5, 1000: 4.0, 1500: pytest.approx(0.15)}
    (run / "checkpoints").mkdir()
    for clock in (1000, 500):
        (run / "checkpoints" / f"checkpoint-{clock:012d}.pt").touch()
    mark_failed(run, "why")
    (run / "done").touch()
    state = RunState.read(run)
    assert (state.is_done, state.failure, state.checkpoint) == (True, "why", 1000)
    assert run_state.FAILED == "failed"
