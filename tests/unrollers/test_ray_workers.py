"""Workers on a Ray cluster: the rows are those of one machine, and each failure has one sentence.

The last test breaks the cluster once in each way, or for ALFISH_SOAK_SECONDS (ten minutes in `make soak`).
"""

import functools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from ray_cluster import MARKS, ON_RAY, QUICK, nodes, wait_until_no_worker_is_left  # noqa: F401
from test_async import ALIKE, LOG, unroller_of
from worker_parts import Faulty, Seeing, SeeingOffPolicy, failing_once

from alfish import nest
from alfish.environments import make_environment
from alfish.errors import UsageError
from alfish.unrollers import Workers
from alfish.unrollers.ray import ray_workers
from alfish.unrollers.ray.cluster import Cluster
from alfish.unrollers.ray.object_store import ReceivedSegments
from benchmarks.ray_runs import soak

ray = pytest.importorskip("ray")
pytestmark = [*MARKS, pytest.mark.usefixtures("nodes")]
SECONDS = float(os.environ.get("ALFISH_SOAK_SECONDS", "0"))
KINDS = ("actor", "worker", "raylet", "stop")
TINY = [
    *("AsyncUnroller.num_workers=4", "RayWorkers.per_host=2", "RayWorkers.cpus_per_worker=0.5"),
    *("Trainer.unroll_length=8", "make_environment.num_envs=2", "Workers.close_timeout=2.0"),
    *("EpochBatches.num_epochs=2", "EpochBatches.minibatch_size=8", "Learner.compile=False"),
    *("Evaluate.num_episodes=1", "Trainer.max_evaluation_length=40"),
]


@pytest.fixture
def made(nodes):  # noqa: F811
    """Makes unrollers with workers on the cluster, and closes them."""
    unrollers = []

    def make(*arguments, **settings):
        unrollers.append(unroller_of(*arguments, **{"workers": ON_RAY} | settings))
        return unrollers[-1]

    make.close_all = lambda: [unroller.close() for unroller in unrollers]
    yield make
    make.close_all()
    assert not ray.is_initialized()
    wait_until_no_worker_is_left(nodes)


@pytest.fixture
def replies(monkeypatch):
    """All segments that come by Ray, each with a copy that was made when it came."""
    kept = []
    add = ReceivedSegments.add

    def keep(self, segment, words):
        kept.append((words, words.copy()))
        add(self, segment, words)

    monkeypatch.setattr(ReceivedSegments, "add", keep)
    return kept


def lockstep(make, algorithm, num_workers, workers):
    """Rows and records of five iterations, between which the weights change."""
    unroller = make(ALIKE, algorithm, num_workers=num_workers, mode="lockstep", workers=workers)
    rows = []
    for k in range(5):
        rows.append((nest.map(torch.clone, unroller.unroll(4)), unroller.records))
        unroller._algorithm.weight.data.fill_(k + 1)
        unroller.publish()
        unroller._ledger.check_valid()
        assert set(rows[-1][0].policy_version.tolist()) == {max(0, k - 1)}
    unroller.close()
    return rows


@pytest.mark.parametrize(
    "algorithm, num_workers, per_host, inline", [(Seeing, 2, 1, True), (SeeingOffPolicy, 4, 2, False)]
)
def test_lockstep_is_bit_identical_to_one_machine(made, monkeypatch, algorithm, num_workers, per_host, inline):
    if not inline:
        monkeypatch.setattr("alfish.unrollers.ray.object_store.INLINE_BYTES", 0)  # weights go by reference
    here = lockstep(unroller_of, algorithm, num_workers, QUICK)
    there = lockstep(made, algorithm, num_workers, functools.partial(ON_RAY, per_host=per_host))
    for (one, arrived), (other, also) in zip(here, there, strict=True):
        assert all(map(torch.equal, nest.leaves(one), nest.leaves(other)))
        assert (arrived.step_type == also.step_type).all() and (arrived.reward == also.reward).all()


def test_nothing_is_written_into_a_reply(made, replies):
    unroller = made(num_workers=2, max_policy_lag=0, segments_per_unroll=1)  # one segment is returned without a copy
    for _ in range(6):
        unroller.unroll(4)
        unroller.publish()
    assert unroller.stats()["masked_rows"] > 0
    assert replies and all((words == copy).all() for words, copy in replies)


def test_faults_of_environments_are_handled_in_their_host(made, tmp_path):
    kinds = "hang", "raise"
    maker = functools.partial(failing_once, Faulty, kinds, os.getpid(), str(tmp_path), {})
    workers = functools.partial(ON_RAY, workers=functools.partial(Workers, step_timeout=0.7, close_timeout=0.3))
    unroller = made(functools.partial(make_environment, maker), num_workers=2, workers=workers)
    began = time.monotonic()
    sentences = "stepping environments for", "broken on purpose", "Its stack", "host 0 on "
    while not all(any(sentence in line for line in LOG) for sentence in sentences):
        unroller.unroll(4)
        assert time.monotonic() - began < 100
    unroller.unroll(4)
    unroller._ledger.check_valid()
    stats = unroller.stats()
    assert stats["restarts"] == 1 and stats["env_errors"] == 1


def test_a_module_that_a_host_cannot_import_is_named_or_sent(made, tmp_path, monkeypatch):
    (tmp_path / "only_here.py").write_text("from toys import Stamped\n\n\nclass Here(Stamped):\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    import only_here

    environment = functools.partial(make_environment, only_here.Here, num_envs=2)
    with pytest.raises(UsageError, match=r"workers on machine .* cannot import 'only_here': .*code = 'here'"):
        made(environment, num_workers=2).unroll(4)
    with pytest.raises(UsageError, match="this process is already connected"):
        made(environment, num_workers=2, workers=functools.partial(ON_RAY, code="here")).unroll(4)
    made.close_all()
    monkeypatch.chdir(tmp_path)
    # Ray lets hosts of this machine look into the directory too; what was sent must do without.
    check = Cluster.check_room
    monkeypatch.setattr(
        Cluster, "check_room", lambda *arguments: (tmp_path / "only_here.py").unlink() or check(*arguments)
    )
    unroller = made(environment, num_workers=2, workers=functools.partial(ON_RAY, code="here"))
    assert unroller.unroll(4).time_step.reward.shape == (5, 4)


def test_a_cluster_that_is_too_small_or_differs_is_refused(made, monkeypatch):
    sentence = r"2 hosts need 40 CPUs each .* has room for 0: its machines have .*4 \+ 4.* CPUs"
    with pytest.raises(UsageError, match=sentence):
        made(num_workers=4, workers=functools.partial(ON_RAY, cpus_per_worker=20)).unroll(4)
    versions = ray_workers.versions()
    monkeypatch.setattr(ray_workers, "versions", lambda: {**versions, "alfish": "9.9"})
    with pytest.raises(UsageError, match=r"machine .* has alfish .* \(here 9.9\); install equal versions"):
        made(num_workers=2).unroll(4)


def test_hosts_that_find_room_later_join(made, nodes):  # noqa: F811
    workers = functools.partial(ON_RAY, per_host=1, cpus_per_worker=6, min_hosts=0)
    unroller = made(ALIKE, SeeingOffPolicy, num_workers=2, workers=workers)
    unroller._start()
    for _ in range(3):
        assert list(unroller._workers.wait(0.2)) == []
    assert unroller._workers.activities().count("may wait for room") == 2
    nodes.add(6)
    assert unroller.unroll(4).time_step.step_type.shape[1] == 4
    ready = [worker.index for worker in unroller._workers.all if worker.started]
    assert len(ready) == 1  # the other one waits still


def command(tmp_path, *bindings):
    files = ["--gin_file=appo_cartpole.gin", "--gin_file=ray.gin", f"--root_dir={tmp_path / 'run'}"]
    return ["train", *files, *(f"--gin_param={binding}" for binding in (*TINY, *bindings))]


def test_a_spare_host_replaces_a_dead_host(made):
    unroller = made(ALIKE, num_workers=4, workers=functools.partial(ON_RAY, spare_hosts=1))
    on_ray = unroller._workers
    wait_for(unroller, lambda: on_ray._actors._spares)
    ((_, greeting),) = on_ray._actors._spares
    spare, host = ray.get(greeting), on_ray.hosts[0]
    wait_for(unroller, lambda: all(worker.started for worker in on_ray.all))
    os.kill(host.greeting.pid, signal.SIGKILL)
    wait_for(unroller, lambda: host.greeting == spare and all(worker.started for worker in on_ray.all))
    assert len(on_ray._actors._spares) == 1, "another one is requested"
    imported = [Path(f"/proc/{host.greeting.pid}/maps").read_text() for host in on_ray.hosts]
    assert not any("libtorch" in maps for maps in imported), "also with its workers a host needs no torch"


def wait_for(unroller, is_true, seconds=60):
    """Takes unrolls until something is true."""
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline
        unroller.unroll(4)


def test_the_shipped_conf_trains_and_sigterm_saves(tmp_path, nodes):  # noqa: F811
    run = subprocess.Popen([sys.executable, "-m", "alfish", *command(tmp_path, "Trainer.num_env_steps=1_000_000")])
    metrics = tmp_path / "run" / "metrics.csv"
    began = time.monotonic()
    while not metrics.is_file() or len(metrics.read_text().splitlines()) < 3:
        assert run.poll() is None and time.monotonic() - began < 100
        time.sleep(0.1)
    run.send_signal(signal.SIGTERM)
    assert run.wait(60) == 128 + signal.SIGTERM
    assert list((tmp_path / "run" / "checkpoints").iterdir())
    assert "stopped at" in (tmp_path / "run" / "log.txt").read_text()
    wait_until_no_worker_is_left(nodes)


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_every_row_is_right_while_hosts_die(nodes):  # noqa: F811
    lines, memory = [], []
    num_rows, breaking = soak(
        nodes,
        SECONDS or 200.0,
        num_workers=4,
        # By default, until new rows have come after each kind of death, and a stopped host has been given up.
        enough=lambda breaking: (
            not SECONDS
            and {kind for kind, _ in breaking.waits} == set(KINDS)
            and any("silent for" in line for line in lines)
        ),
        log=lambda line: (lines.append(line), memory.append(resident_bytes())),
        kinds=KINDS,
        pause=(2.0, 3.0),
        host_timeout=3.0,
    )
    print(f"{num_rows} rows; {breaking}")
    assert {kind for kind, _ in breaking.waits} == set(KINDS)
    assert any("silent for" in line for line in lines)
    assert memory[-1] - memory[len(memory) // 3] < 30e6
    wait_until_no_worker_is_left(nodes)
