"""The process that workers are forked from: a worker finds what a program of its own would, and nothing is left."""

import errno
import functools
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import pytest
from test_async import QUICK, processes, unroller_of
from worker_parts import Leaving, Telling

from alfish.environments import make_environment
from alfish.errors import RunError
from alfish.processes import server, worker_handle


def told(tmp_path, name):
    """Facts of a new worker."""
    path = str(tmp_path / name)
    environment = functools.partial(make_environment, functools.partial(Telling, os.getpid(), path))
    unroller = unroller_of(environment)
    unroller.unroll(4)
    unroller.close()
    return json.loads(Path(path).read_text())


def test_a_worker_behaves_like_a_separate_program(tmp_path, monkeypatch, capfd):
    first = told(tmp_path, "first")
    capfd.readouterr()
    monkeypatch.setenv("ALFISH_TEST_VARIABLE", "new")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("PATH")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path, ""])
    cpus = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {max(cpus)})
        second = told(tmp_path, "second")
    finally:
        os.sched_setaffinity(0, cpus)
    path = [entry or str(tmp_path) for entry in sys.path]
    variables = dict.fromkeys(server.THREAD_VARIABLES, "1") | {"PYTHONPATH": os.pathsep.join(path)}
    assert second["environment"] == dict(os.environ) | variables
    assert second["path"] == path and second["directory"] == str(tmp_path)
    assert second["cpus"] == [max(cpus)] and first["cpus"] == sorted(cpus)
    default = [str(signal.getsignal(number)) for number in (signal.SIGCHLD, signal.SIGPIPE)]
    assert second["signals"] == ["1", "0", *default] and second["wakeup"] == -1
    # Of its own threads there is the one that waits for the trainer's end; of memories, those of this trainer.
    assert second["threads"] == 2 and second["inheritable"] == []
    assert len(second["descriptors"]) == len(first["descriptors"]) < 20
    assert second["group"] and second["session"] not in (0, os.getsid(0)) and second["parent"] == server.SERVER.pid
    assert not {"test_server", "test_async", "pytest"} & set(second["modules"])
    assert not [name for name in second["modules"] if name.startswith("alfish.policies")]  # there is one policy
    assert second["random"] == first["random"]  # by the seed, not by the order of the forks
    assert capfd.readouterr() == ("out\n", "err")


def test_a_worker_ends_in_order_but_leaves_its_memory_to_the_system(tmp_path, capfd):
    """The interpreter's clean-up would copy all pages that a worker shares with the server: 128 MB.

    Neither do the finalizers of shared objects run, of which torch has more than a hundred.
    """
    path = tmp_path / "ends"
    unroller = unroller_of(functools.partial(make_environment, functools.partial(Leaving, os.getpid(), str(path))))
    unroller.unroll(4)
    (process,) = processes(unroller)
    unroller.close()
    assert process.returncode == 0
    assert sorted(path.read_text().split("\n")) == ["", "exit function", "finalizer", "thread", "weak reference"]
    assert capfd.readouterr().out == "out"


def test_closing_the_single_threaded_server_ends_its_workers():
    unroller = unroller_of(num_workers=2)
    unroller.unroll(4)
    pid = server.SERVER.pid
    assert len(os.listdir(f"/proc/{pid}/task")) == 1
    running = processes(unroller)
    assert server.SERVER.close() == 0 and server.SERVER.pid is None
    began = time.monotonic()
    while any(Path(f"/proc/{process.pid}").exists() for process in running):  # without a signal from the trainer
        assert time.monotonic() - began < 4  # less than the lifeline takes
        time.sleep(0.05)
    assert [process.wait(10) for process in running] == [-signal.SIGKILL] * 2
    unroller.close()
    assert not Path(f"/proc/{pid}").exists()


def test_where_the_server_has_died_another_one_takes_its_place():
    unroller = unroller_of(num_workers=2, workers=functools.partial(QUICK, max_deaths=1))
    try:
        unroller.unroll(4)
        first = server.SERVER.pid
        os.kill(first, signal.SIGKILL)
        began = time.monotonic()
        while unroller.stats()["restarts"] < 2:
            unroller.unroll(4)
            assert time.monotonic() - began < 60
        assert server.SERVER.pid not in (None, first)
    finally:
        unroller.close()


def test_a_server_that_does_not_start_is_a_one_line_error(monkeypatch):
    monkeypatch.setattr(server, "PROGRAM", "raise SystemExit(7)")
    monkeypatch.setattr(worker_handle, "SERVER", server.Server())
    unroller = unroller_of(workers=QUICK)
    with pytest.raises(RunError) as raised:
        unroller.unroll(4)
    assert str(raised.value) == (
        "the process that forks workers ended with exit code 7; its output above shows the reason"
    )
    unroller.close()


def test_a_copied_trainer_has_its_own_server():
    unroller_of().close()
    unroller = unroller_of()
    unroller.unroll(4)
    assert server.SERVER.pid is not None
    copy = os.fork()
    if copy == 0:
        os._exit(0 if server.SERVER.pid is None and server.SERVER.close() is None else 1)
    assert os.waitpid(copy, 0)[1] == 0
    unroller.unroll(4)
    unroller.close()


def test_a_fork_that_fails_is_reported(monkeypatch):
    """By the server's loop, in this process."""

    def fork():
        raise OSError(errno.EAGAIN, "no room")

    ours, theirs = socket.socketpair()
    status, its_status = socket.socketpair()
    before = signal.getsignal(signal.SIGCHLD)
    monkeypatch.setattr(os, "fork", fork)
    socket.send_fds(ours, [b"\0"], [its_status.fileno()])
    ours.shutdown(socket.SHUT_WR)
    try:
        assert server._serve(theirs) == []
    finally:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, before)
    assert server._read_number(status, 0) == -errno.EAGAIN
    for end in (ours, theirs, status, its_status):
        end.close()


def test_a_worker_ends_with_its_lifeline():
    """Where its parent goes on: as on systems that have no signal for the death of a parent."""
    unroller = unroller_of()
    unroller.unroll(4)
    (worker,) = unroller._workers.all
    os.close(worker._lifeline)
    worker._lifeline = os.open(os.devnull, os.O_RDONLY)
    assert worker.process.wait(15) == -signal.SIGKILL
    unroller.close()
